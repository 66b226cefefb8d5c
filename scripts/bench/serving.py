"""Measure serving: vLLM's server on stock vLLM and on the overlay, driven by vLLM's client.

    PYTHONPATH=scripts python -m bench.serving [--site SITE] [--rounds N] [--out DIR]

SITE is an installation of vLLM, and stays as it is: views of it are measured. In each round each
side runs vLLM's server in a process of its own, by turns, and `vllm bench serve` of the pristine
view drives it. DIR gets the table as serving.md and the run as serving.json, both after each
case, so that an interrupted run leaves what was measured.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from demo import model
from overlay import output

from bench.compare import command_line
from bench.compare.installations import SIDES, Installations, work_beside
from bench.compare.machine import describe
from bench.compare.progress import progress
from bench.compare.turns import in_turn
from bench.errors import Failure
from bench.reports.figures import ENOUGH
from bench.reports.markdown import markdown, publish
from bench.reports.run_file import replace
from bench.servers.load import CASES, CPU, GPU, Load
from bench.servers.processes import MRV2, Client, Server, Setting
from bench.servers.table import CaseResult, read_result, table

Served = Generator[tuple[str, CaseResult | None], None, None]
#: A problem of a run that was cut off.
UNFINISHED = "the run did not come to its end: this is what was measured until then"


class Run:
    """A run: its setting, and the results so far.

    Attributes:
        results: case to the results of each side and round.
        errors: what failed besides.
    """

    def __init__(self, setting: Setting, site: Path, rounds: int | None) -> None:
        self.setting, self._site, self._rounds = setting, site, rounds
        self._started = time.monotonic()
        self.results: dict[str, list[CaseResult]] = {case: [] for case in setting.cases}
        self.errors: list[str] = []
        #: Of one side in one round: the server's start, and each case.
        self._parts = 1 + len(setting.cases)

    def measure(self) -> None:
        """Measure every side in each round; one that fails leaves an error behind."""
        order = [*SIDES, *([MRV2] if self.setting.device != "CPU" else [])]
        rounds = self._rounds or fair_rounds(len(order))
        if rounds % len(order):
            print(
                f"bench: {rounds} is not a multiple of {len(order)} sides, so not each of them is "
                f"first equally often; --rounds {fair_rounds(len(order))} makes it so",
                file=sys.stderr,
            )
        with progress(rounds * len(order) * self._parts) as bar:
            bar.write(f"serving: the model is there; measuring on {self.setting.device}")
            for turn in range(1, rounds + 1):
                for side in in_turn(turn - 1, order):
                    bar.set_description(f"{side} round {turn}")
                    self._side(side, turn, bar)

    def _side(self, side: str, turn: int, bar: Any) -> None:
        left = self._parts
        try:
            with closing(_served(self.setting, side, turn)) as served:
                for case, result in served:
                    if result:
                        self.results[case].append(result)
                        speed = result.figures["output tokens/s"]
                        bar.write(f"serving: {result.name}, {case}: {speed:,.0f} tok/s")
                        self.write(complete=False)
                    left -= 1
                    bar.update(1)
        except Failure as error:
            self.errors.append(str(error).partition("\n")[0])
            bar.update(left)
            bar.write(f"serving: {error}")

    def write(self, complete: bool) -> dict[str, Any]:
        """Write the results so far; return the run's JSON."""
        setting = self.setting
        errors = [*([] if complete else [UNFINISHED]), *self.errors]
        digests = setting.installations.digests
        run = describe("table", self._started, digests, setting.device, self._site)
        results = {case: given for case, given in self.results.items() if given or complete}
        run |= {"complete": complete} | table(results, setting, errors)
        replace(setting.out / "serving.json", json.dumps(run, indent=1) + "\n")
        replace(setting.out / "serving.md", markdown(run))
        return run


def fair_rounds(sides: int) -> int:
    """Return the fewest rounds in which each side is first equally often, and no ratio marked."""
    return -(-ENOUGH // sides) * sides


def prepare(setting: Setting, load: Load | None, server: Sequence[str]) -> None:
    """Make the model, and set the device and the load.

    Args:
        setting: of the run; its ``device`` and ``load`` are set.
        load: None for one that fits the device.
        server: more arguments for the server.

    Raises:
        Failure: the side's Python cannot.
    """
    for size in [load] if load else [CPU, GPU]:  # torch has to be asked for the device first
        options: list[str] = []
        if setting.generated:
            changes = {"tie_word_embeddings": False, "max_position_embeddings": 32768}
            config = {**size.model, **changes}
            model.write(setting.directory, **config)
            vocabulary = config.get("vocab_size", model.CONFIG["vocab_size"])
            model.write_tokenizer(setting.tokenizer, vocabulary)
            options = ["--weights"]
        out, log = setting.work / "prepared.json", setting.work / "prepare.log"
        command = [setting.python, "-m", "bench.servers.child", "prepare", str(out)]
        command += [str(setting.directory), *options]
        code = setting.installations.run("stock", command, log, setting.timeout, {})
        if code != 0:
            raise setting.failure(f"preparing the model failed ({code})", log)
        prepared = json.loads(out.read_text())
        setting.installations.check_import("stock", prepared["package"])
        setting.device = prepared["device"]
        setting.load = changed(size, server=(*size.server, *server))
        if (setting.device == "CPU") == (size is CPU):
            break


def _served(
    setting: Setting, side: str, turn: int
) -> Generator[tuple[str, CaseResult | None], None, None]:
    """Yield "" and None when the server serves, then each case and its results.

    Raises:
        Failure: the server or the client failed.
    """
    server = Server(setting, side, turn)
    with server, Client(setting, side, turn, server.url) as client:
        server.wait()
        yield "", None
        try:
            for case, result in client.results():
                arguments = side, turn, setting.load, setting.generated
                yield case, read_result(result, case, *arguments)
        except Failure:
            shutil.copy(server.log, setting.out)
            raise


def measure(args: argparse.Namespace, load: Load | None = None) -> int:
    """Measure on each side by turns, and print the table; return the exit code.

    Args:
        args: the program's.
        load: None for one that fits the device.

    Raises:
        Failure: there is no such installation, or nothing could be prepared.
        KeyboardInterrupt: before anything was measured.
    """
    work = work_beside(args.site)
    try:
        setting = Setting(
            Installations(args.site, work, args.python),
            args.python,
            work,
            args.out,
            args.model.resolve() if args.model else work / "model",
            cases=args.cases,
            generated=args.model is None,
            timeout=args.timeout,
        )
        run = Run(setting, args.site, args.rounds)
        complete = False
        try:
            prepare(setting, load, shlex.split(args.server))
            run.measure()
            complete = True
        except KeyboardInterrupt:
            if not any(run.results.values()):
                raise
        try:
            setting.installations.check_untouched()
        except Failure as error:
            run.errors.append(str(error))
        print()
        code = publish(run.write(complete), None)
        if not complete:
            print(f"\nbench: stopped; what was measured is in {args.out}", file=sys.stderr)
        return code if complete else 130
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table.

    Returns:
        0 if every side ran and returned the same as stock; 1 if not; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command_line.add_target(parser)
    fair = [fair_rounds(len(sides)) for sides in (SIDES, (*SIDES, MRV2))]
    parser.add_argument(
        "--rounds",
        type=command_line.rounds,
        help=f"measurements of each side ({fair[0]} for the {len(SIDES)} sides of a CPU, {fair[1]} "
        f"for the {len(SIDES) + 1} of a GPU). In a multiple of the number of sides, each is first "
        "equally often; ratios of fewer than three are marked",
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--server", default="", help="more arguments for `vllm serve`, quoted")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a start, and of a case")
    args = parser.parse_args(argv)
    command_line.resolve_target(parser, args)
    command_line.make_directory(parser, "--out", args.out)
    command_line.end_on_signals()
    command_line.leave_out()
    try:
        return measure(args)
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench: stopped; nothing was measured", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
