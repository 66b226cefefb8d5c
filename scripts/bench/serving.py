"""Serving on stock vLLM beside serving on the overlaid one: vLLM's own server and client.

    PYTHON scripts/bench/serving.py --site SITE --out DIR [--rounds N] [--model PATH]

SITE is an installation of vLLM, and stays as it is: what is measured are views of it. In each
round each side runs `vllm serve` in a process of its own, by turns, and `vllm bench serve` of
the pristine view drives it.
DIR gets the table as serving.md and everything as serving.json, both after each case, so that
whatever ends the run leaves what was measured.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: nothing is there to clean up

import argparse
import contextlib
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ in ("__main__", "__mp_main__"):
    sys.path[0] = str(ROOT / "scripts")

from bench import outputs, report  # noqa: E402
from bench.machine import describe, settings  # noqa: E402
from bench.progress import progress  # noqa: E402
from bench.rows import HALF_B  # noqa: E402
from bench.sides import (  # noqa: E402
    PLUGIN,
    SIDES,
    Failure,
    Sides,
    end_on_signals,
    in_turn,
    leave_out,
    target,
    work_beside,
)
from demo import model  # noqa: E402
from overlay import output  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Self

CHILD = ROOT / "scripts" / "bench" / "serving_child.py"
NAME = "bench"

#: Case to the sampling parameters that make it.
CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "presence_penalty 1.5": {"presence_penalty": 1.5},
    "5 logprobs": {"logprobs": 5},
}

#: Figure to what `vllm bench serve` calls it. Times are in ms.
FIGURES: Mapping[str, str] = {
    "requests/s": "request_throughput",
    "output tokens/s": "output_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
}
#: Those that say nothing where tokens came in bursts.
LATENCIES = tuple(FIGURES)[2:]

#: The sampler that needs no compiler on the machine, and the log line of each side.
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}

#: Pristine vLLM on Model Runner V2.
MRV2 = "mrv2"

#: How long a server may take to end by itself, in seconds.
GRACE = 30.0

#: One of the problems of a run that was cut off.
UNFINISHED = "the run did not come to its end: this is what was measured until then"

#: Without the proxy that the environment may name: the server is on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Load:
    """What is served, and what is asked of it.

    Attributes:
        model: fields of config.json that differ from the demo's model; for a generated one.
        requests: in each case.
        concurrency: so many of them at a time.
        prompt: tokens in each prompt.
        output: tokens that each request generates, whatever they are.
        server: more arguments for the server.
    """

    model: Mapping[str, Any]
    requests: int
    concurrency: int
    prompt: int
    output: int
    server: Sequence[str] = ()

    @property
    def length(self) -> int:
        """The server's max_model_len; clients may count a few tokens more in a prompt."""
        return self.prompt + self.output + 64


#: Of a size at which one core takes longer for a step than the client for its tokens.
_SMALL: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CPU = Load(_SMALL, requests=16, concurrency=4, prompt=16, output=48, server=("--enforce-eager",))
GPU = Load(HALF_B.model, requests=256, concurrency=32, prompt=128, output=256)


@dataclass
class Found:
    """What one case gave, on one side, in one round.

    Attributes:
        side: which.
        turn: the round, from 1.
        figures: by the names of :data:`FIGURES`.
        counts: what was received and what was expected, by kind.
        streams: what was generated, by kind; see :mod:`bench.outputs`.
        errors: what the first request that failed said.
        bursts: whether most tokens came on the heels of the one before, because the client or
            the server's front end had no core to run on.
    """

    side: str
    turn: int
    figures: Mapping[str, float]
    counts: Mapping[str, tuple[int, int]]
    streams: Mapping[str, outputs.Stream]
    errors: Sequence[str] = ()
    bursts: bool = False

    @property
    def name(self) -> str:
        """Side and round."""
        return f"{self.side} round {self.turn}"


@dataclass
class Setting:
    """What stays the same through a run.

    Attributes:
        sides: the installations.
        python: what runs them.
        work: directory for what the children write.
        out: directory for the logs of those that fail.
        directory: the model.
        load: what is asked of it.
        cases: those of :data:`CASES` to measure.
        generated: whether the model is ours, so that a text says how many tokens it has.
        probe: directory for the probe's files, if the servers are to run with it.
        timeout: seconds for a server to start, and for a case.
    """

    sides: Sides
    python: str
    work: Path
    out: Path
    directory: Path
    load: Load = CPU
    cases: Sequence[str] = tuple(CASES)
    generated: bool = True
    probe: Path | None = None
    timeout: float = 300.0
    device: str = field(default="CPU", init=False)

    @property
    def tokenizer(self) -> Path:
        """Where the model's tokenizer is."""
        return self.directory / "tokenizer" if self.generated else self.directory


def measure(
    site: Path,
    out: Path,
    *,
    rounds: int | None = 1,
    model_path: Path | None = None,
    cases: Sequence[str] = tuple(CASES),
    python: str = sys.executable,
    sides: Sides | None = None,
    load: Load | None = None,
    server: Sequence[str] = (),
    probe: Path | None = None,
    timeout: float = 300.0,
    on_found: Callable[[dict[str, Any]], None] = lambda run: None,
) -> dict[str, Any]:
    """Serve on each side by turns, and drive each with vLLM's own client.

    Args:
        site: an installation.
        out: directory for the logs of servers and clients that failed.
        rounds: how often each side is measured; None for :func:`fair_rounds`.
        model_path: a model with weights and a tokenizer; None for a generated one.
        cases: those of :data:`CASES` to measure.
        python: what runs the children.
        sides: the installations, where they have been made already.
        load: None for one that fits the device.
        server: more arguments for `vllm serve`.
        probe: directory that gets SIDE-ROUND.probe of each server; None for no probe.
        timeout: seconds for a server to start, and for a case.
        on_found: given the run so far whenever a case was measured.

    Returns:
        The run, of kind "table". A side that failed is one of its problems, and so is an
        installation that is not what it was. "complete" is false where the run was
        interrupted; what was measured until then is there.

    Raises:
        Failure: there is no such installation, or nothing could be prepared.
        KeyboardInterrupt: the run was interrupted before anything was measured.
    """
    started = time.monotonic()
    work = work_beside(site)
    try:
        sides = sides or Sides(site, work, python)
        out.mkdir(parents=True, exist_ok=True)
        if probe:
            probe.mkdir(parents=True, exist_ok=True)
        directory = model_path.resolve() if model_path else work / "model"
        setting = Setting(sides, python, work, out, directory)
        setting.cases, setting.probe, setting.timeout = cases, probe, timeout
        setting.generated = model_path is None
        run = _Run(setting, site, started, on_found)
        complete = False
        try:
            _prepare(setting, load, server)
            run.measure(rounds)
            complete = True
        except KeyboardInterrupt:
            if not any(run.found.values()):
                raise
        try:
            sides.check_untouched()
        except Failure as error:
            run.errors.append(str(error))
        return run.result(complete)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Run:
    """What was measured so far.

    Attributes:
        found: case to what each side gave in each round.
        errors: what failed altogether.
    """

    def __init__(
        self,
        setting: Setting,
        site: Path,
        started: float,
        on_found: Callable[[dict[str, Any]], None],
    ) -> None:
        self.setting, self._site, self._started = setting, site, started
        self._on_found = on_found
        self.found: dict[str, list[Found]] = {case: [] for case in setting.cases}
        self.errors: list[str] = []

    def measure(self, rounds: int | None) -> None:
        """Every side in each round; one that fails leaves an error behind."""
        setting = self.setting
        order = [*SIDES, *([MRV2] if setting.device != "CPU" else [])]
        rounds = rounds or fair_rounds(len(order))
        if rounds % len(order):
            print(
                f"bench: {rounds} is no multiple of {len(order)} sides, so not each of them is "
                f"first equally often; --rounds {fair_rounds(len(order))} makes it so",
                file=sys.stderr,
            )
        with progress(rounds * len(order) * self._parts) as bar:
            bar.write(f"serving: the model is there; measuring on {setting.device}")
            for turn in range(1, rounds + 1):
                for side in in_turn(turn - 1, order):
                    bar.set_description(f"{side} round {turn}")
                    self._side(side, turn, bar)

    @property
    def _parts(self) -> int:
        """Of one side in one round: the server's start is one to wait for, each case another."""
        return 1 + len(self.setting.cases)

    def _side(self, side: str, turn: int, bar: Any) -> None:
        left = self._parts

        def done() -> None:
            nonlocal left
            left -= 1
            bar.update(1)

        try:
            with contextlib.closing(_served(self.setting, side, turn, done)) as served:
                for case, one in served:
                    self.found[case].append(one)
                    done()
                    speed = one.figures["output tokens/s"]
                    bar.write(f"serving: {one.name}, {case}: {speed:,.0f} tok/s")
                    self._on_found(self.result(False))
        except Failure as error:
            self.errors.append(str(error).partition("\n")[0])
            bar.update(left)
            bar.write(f"serving: {error}")

    def result(self, complete: bool) -> dict[str, Any]:
        """The run's JSON; where it is not ``complete``, this is one of its problems."""
        setting = self.setting
        errors = [*([] if complete else [UNFINISHED]), *self.errors]
        run = describe("table", self._started, setting.sides.digests, setting.device, self._site)
        found = self.found if complete else {case: g for case, g in self.found.items() if g}
        return run | {"complete": complete} | table(found, setting, errors)


def fair_rounds(sides: int) -> int:
    """The fewest rounds in which each side is first equally often, and that mark no ratio."""
    return -(-report.ENOUGH // sides) * sides


def table(
    found: Mapping[str, Sequence[Found]], setting: Setting, errors: Sequence[str] = ()
) -> dict[str, Any]:
    """The part of a run that says what was found; no ratio where it would mean nothing.

    Medians and ratios are those of the rounds that every side has which has any. Problems are
    those of all rounds.

    Args:
        found: case to what each side gave in each round.
        setting: of the run.
        errors: what failed altogether.
    """
    load = setting.load
    sides = [side for side in (*SIDES, MRV2) if _of(side, *found.values())]
    others = [side for side in sides if side != SIDES[0]]
    columns = ["case", "figure", *sides, *(f"{side} / {SIDES[0]}" for side in others)]
    rows: list[list[_Cell]] = []
    said = list(errors)
    details: dict[str, Any] = {}
    compared = {case: _common(given) for case, given in found.items()}
    for case, given in found.items():
        common = compared[case]
        if given and not common:
            said.append(f"{case}: no round has every side, so there is nothing to compare")
        spoilt = problems(given, sides)
        said += [f"{case}: {text}" for texts in spoilt.values() for text in texts]
        bursts = [one for one in given if one.bursts]
        said += [f"{case}: {one.name}: tokens came in bursts, no latency counts" for one in bursts]
        for figure in FIGURES:
            values = {
                side: [one.figures[figure] for one in _of(side, given) if one.turn in common]
                for side in sides
            }
            latency = figure in LATENCIES
            void = {one.side for one in bursts if latency}.union(s for s in sides if spoilt[s])
            ratios = [_ratio(values, side, void) for side in others]
            shown = [_cell(values[side], bool(_of(side, given))) for side in sides]
            rows.append([case, figure, *shown, *ratios])
        for kind in dict.fromkeys(kind for one in given for kind in one.counts):
            received = [_received(_of(side, given), kind) for side in sides]
            rows.append([case, kind, *received, *[""] * len(others)])
        details[case] = {
            "parameters": {"temperature": 0, **CASES[case]},
            "problems": spoilt,
            "rounds": {
                side: [
                    {"round": one.turn, **one.figures, "counts": one.counts}
                    for one in _of(side, given)
                ]
                for side in sides
            },
        }
    what = "generated model" if setting.generated else setting.directory.name
    # Cases have different rounds only where the run was cut off, or a server failed.
    rounds = " or ".join(map(str, sorted({len(common) for common in compared.values()} or {0})))
    return {
        "title": "`vllm serve`, driven by `vllm bench serve`",
        "note": f"{what}; {load.requests} requests, {load.concurrency} at a time, {load.prompt} "
        f"tokens in and {load.output} out, greedy; times in ms, medians of {rounds} round(s). "
        "Texts are compared whole; token ids and logprobs are those of one request alone.",
        "columns": columns,
        "align": ["l", "l", *["r"] * (len(columns) - 2)],
        "rows": rows,
        "problems": said,
        "environment": settings(ENVIRONMENT),
        "cases": details,
    }


def problems(given: Sequence[Found], sides: Iterable[str]) -> dict[str, list[str]]:
    """Why a side's figures must not be held against stock's, by side.

    What stock gave in its first round is what every round of every side must give.
    """
    said: dict[str, list[str]] = {side: [] for side in sides}
    reference = next((one for one in given if one.side == SIDES[0]), None)
    for side, texts in said.items():
        if not _of(side, given):
            texts.append(f"{side} was not measured")
    for one in given:
        for kind, (received, expected) in one.counts.items():
            if received != expected:
                said[one.side].append(f"{one.name}: {received} of {expected} {kind}")
        said[one.side] += [f"{one.name}: {error}" for error in one.errors]
        for kind, stream in one.streams.items():
            before = reference.streams[kind] if reference else stream
            if reference and (where := outputs.first_difference(before, stream)):
                text = f"{kind} of {reference.name} and {one.name} differ: {where}"
                if one.side == SIDES[0]:
                    text += "; batches hang on arrivals, VLLM_BATCH_INVARIANT=1 makes them alike"
                said[one.side].append(text)
    return said


def found_in(result: Mapping[str, Any], side: str, turn: int, load: Load, generated: bool) -> Found:
    """What a result of `vllm bench serve --save-detailed` says.

    Args:
        result: the file's contents.
        side: that was measured.
        turn: the round.
        load: what was asked for.
        generated: whether a text says how many tokens it has, one a word.
    """
    texts = [text.strip(" ").split(" ") if text else [] for text in result["generated_texts"]]
    wanted = load.requests * load.output
    counts = {
        "responses": (result["completed"], load.requests),
        "tokens": (result["total_output_tokens"], wanted),
    }
    if generated:
        counts["tokens in the texts"] = (sum(map(len, texts)), wanted)
    failed = [f"request {n} failed: {_last(e)}" for n, e in enumerate(result["errors"]) if e]
    return Found(
        side,
        turn,
        {figure: float(result[key]) for figure, key in FIGURES.items()},
        counts,
        {"texts": texts},
        failed[:1],
        bursts=result["median_itl_ms"] < result["mean_itl_ms"] / 4,
    )


class Child:
    """Commands of one side's `vllm`, in a session of their own, while the context lasts.

    Attributes:
        log: what they said.
    """

    def __init__(
        self, setting: Setting, what: str, name: str, origin: str, environment: Mapping[str, str]
    ) -> None:
        """Of ``name``, that is a side and a round; ``what`` it is, and whose vLLM it runs."""
        self.setting, self.what, self.name, self.origin = setting, what, name, origin
        stem = setting.work / f"{name} {what}".replace(" ", "-")
        self.log, self._package = stem.with_suffix(".log"), stem.with_suffix(".json")
        self._go = str(stem.with_suffix(".go"))
        paths = [*setting.sides.paths[origin], *([PLUGIN] if setting.probe else [])]
        path = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }

    def lines(self) -> list[str]:
        """The command lines."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Start it; it imports vLLM, and waits for :meth:`go`."""
        files = [str(self._package), self._go]
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                [self.setting.python, str(CHILD), "vllm", *files, *self.lines()],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Ask it to end, then end whatever it started and is still there, interrupted or not."""
        gone = False
        try:
            self._process.terminate()
            deadline = time.monotonic() + GRACE
            # The engine's processes outlast the front end's: the probe writes as they end.
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            gone = True
        finally:
            if not gone:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def go(self, number: int = 0) -> None:
        """Let it run one of its commands, counted from 0."""
        Path(f"{self._go}{number}").touch()

    def done(self, number: int) -> bool:
        """Whether a command has come to its end."""
        return Path(f"{self._go}{number}.done").exists()

    def check_import(self) -> None:
        """Refuse another vLLM than the side's.

        Raises:
            Failure: it imported one.
        """
        self.setting.sides.check_import(
            self.origin, json.loads(self._package.read_text())["package"]
        )

    def failure(self, text: str) -> Failure:
        """What to raise; the log is kept."""
        return _failure(f"the {self.what} of {self.name} {text}", self.log, self.setting.out)


class Server(Child):
    """`vllm serve` on one side.

    Attributes:
        url: where it listens.
    """

    def __init__(self, setting: Setting, side: str, turn: int) -> None:
        environment = {**ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": str(int(side == MRV2))}
        if setting.probe:
            environment["VLLM_READINESS_PROBE"] = str(setting.probe / f"{side}-{turn}.probe")
        origin = SIDES[0] if side == MRV2 else side
        super().__init__(setting, "server", f"{side} round {turn}", origin, environment)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def lines(self) -> list[str]:
        """Those of the server."""
        setting, load = self.setting, self.setting.load
        line = ["serve", str(setting.directory), "--served-model-name", NAME]
        line += ["--tokenizer", str(setting.tokenizer), "--seed", "0", "--no-enable-prefix-caching"]
        # Without it the front end kills the engine's processes before the probe has written.
        line += ["--shutdown-timeout", str(int(GRACE / 2))]
        line += ["--host", "127.0.0.1", "--port", str(self._port)]
        return [shlex.join([*line, "--max-model-len", str(load.length), *load.server])]

    def __enter__(self) -> Self:
        """Start it, and wait until it serves.

        Raises:
            Failure: it ended, took too long, or imported another vLLM than the side's.
        """
        super().__enter__()
        try:
            self.go()
            self._wait()
            self.check_import()
        except BaseException:
            self.__exit__()
            raise
        return self

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer to a request.

        Raises:
            Failure: there is none.
        """
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=self.setting.timeout) as answer:
                said: dict[str, Any] = json.load(answer)
                return said
        except OSError as error:
            raise self.failure(f"did not answer {path} ({error})") from error

    def _wait(self) -> None:
        deadline = time.monotonic() + self.setting.timeout
        while (code := self._process.poll()) is None:
            with contextlib.suppress(OSError):
                _DIRECT.open(f"{self.url}/health", timeout=5).close()
                return
            if time.monotonic() > deadline:
                raise self.failure(f"did not serve within {self.setting.timeout:g} s")
            time.sleep(0.2)
        raise self.failure(f"did not start (exit code {code})")


class Client(Child):
    """`vllm bench serve` of the pristine view, for each case when it is asked to.

    Attributes:
        results: case to the file that vLLM writes.
        url: of the server.
    """

    def __init__(self, setting: Setting, side: str, turn: int, url: str) -> None:
        # Its requests would go where the environment's proxy is, and not to the server.
        environment = {**ENVIRONMENT, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        super().__init__(setting, "client", f"{side} round {turn}", SIDES[0], environment)
        self.url = url
        numbered = enumerate(setting.cases)
        self.results = {case: setting.work / f"{side}-{turn}-{n}.json" for n, case in numbered}

    def lines(self) -> list[str]:
        """One a case."""
        return [self._line(case, file) for case, file in self.results.items()]

    def drive(self, case: str) -> dict[str, Any]:
        """What vLLM writes of one case, when it has driven the server, which is there.

        Raises:
            Failure: it failed, took too long, or imported another vLLM than the pristine one.
        """
        number = list(self.results).index(case)
        self.go(number)
        deadline = time.monotonic() + self.setting.timeout
        while True:
            code = self._process.poll()
            if self.done(number):
                break
            if code is not None:
                raise self.failure(f"ended at {case!r} (exit code {code})")
            if time.monotonic() > deadline:
                raise self.failure(f"had no end of {case!r} after {self.setting.timeout:g} s")
            time.sleep(0.05)
        self.check_import()
        result: dict[str, Any] = json.loads(self.results[case].read_text())
        return result

    def _line(self, case: str, file: Path) -> str:
        load = self.setting.load
        parameters = dict(CASES[case])
        logprobs = parameters.pop("logprobs", None)
        line = ["bench", "serve", "--backend", "openai", "--base-url", self.url]
        line += ["--model", str(self.setting.directory), "--served-model-name", NAME]
        line += ["--tokenizer", str(self.setting.tokenizer), "--disable-tqdm"]
        line += ["--dataset-name", "random", "--seed", "0", "--ignore-eos", "--temperature", "0"]
        line += ["--random-input-len", str(load.prompt), "--random-output-len", str(load.output)]
        line += ["--num-prompts", str(load.requests), "--request-rate", "inf"]
        line += ["--max-concurrency", str(load.concurrency), "--num-warmups", str(load.concurrency)]
        line += ["--extra-body", json.dumps(parameters)] if parameters else []
        line += ["--logprobs", str(logprobs)] if logprobs is not None else []
        line += ["--save-result", "--save-detailed"]
        line += ["--result-dir", str(file.parent), "--result-filename", file.name]
        return shlex.join(line)


def _prepare(setting: Setting, load: Load | None, server: Sequence[str]) -> None:
    """Make the model, and settle the device and the load.

    Raises:
        Failure: the side's Python cannot.
    """
    for gpu in (False, True):  # what it must be for is not known before torch was asked
        size = load or (GPU if gpu else CPU)
        options: list[str] = []
        if setting.generated:
            changes = {"tie_word_embeddings": False, "max_position_embeddings": 32768}
            config = {**size.model, **changes}
            model.write(setting.directory, **config)
            vocabulary = config.get("vocab_size", model.CONFIG["vocab_size"])
            model.write_tokenizer(setting.tokenizer, vocabulary)
            options = ["--weights"]
        found = setting.work / "prepared.json"
        log = setting.work / "prepare.log"
        arguments = ["prepare", str(found), str(setting.directory), *options]
        command = [setting.python, str(CHILD), *arguments]
        if (code := setting.sides.run("stock", command, log, setting.timeout, {})) != 0:
            raise _failure(f"preparing the model failed ({code})", log, setting.out)
        said = json.loads(found.read_text())
        setting.sides.check_import("stock", said["package"])
        setting.device = said["device"]
        if load or not setting.generated or (setting.device == "CPU") != gpu:
            break
    size = load or (CPU if setting.device == "CPU" else GPU)
    setting.load = Load(**{**vars(size), "server": (*size.server, *server)})


def _served(
    setting: Setting, side: str, turn: int, started: Callable[[], None]
) -> Generator[tuple[str, Found], None, None]:
    """Each case and what it gave, on one server; ``started`` is called when that serves.

    Raises:
        Failure: the server or the client failed.
    """
    server = Server(setting, side, turn)
    # The client's imports take as long as the server's, one after the other, each on one core.
    with Client(setting, side, turn, server.url) as client, server:
        started()
        for case in setting.cases:
            try:
                result = client.drive(case)
            except Failure:
                shutil.copy(server.log, setting.out)
                raise
            found = found_in(result, side, turn, setting.load, setting.generated)
            yield case, _with_one_alone(found, server, CASES[case], setting.load)


def _with_one_alone(
    found: Found, server: Server, parameters: Mapping[str, Any], load: Load
) -> Found:
    """The same with what the client does not keep: a request's token ids and logprobs.

    The request is alone on the server, so that no batch hangs on arrivals.
    """
    body = {
        "model": NAME,
        "prompt": [3 + 7 * k % 1000 for k in range(load.prompt)],
        "max_tokens": load.output,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        **parameters,
    }
    choice = server.post("/v1/completions", body)["choices"][0]
    top = parameters.get("logprobs")
    given = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    lines = [
        f"{one!r} {sorted(more.items())!r}"
        for one, more in zip(given["token_logprobs"], given["top_logprobs"], strict=True)
        if one is not None and more and len(more) >= (top or 0)
    ]
    counts = dict(found.counts)
    if top is not None:
        counts["logprobs of one request"] = (len(lines), load.output)
    found.counts = counts
    found.streams = {
        **found.streams,
        "token ids of one request alone": [list(map(str, choice["token_ids"]))],
        "logprobs of one request alone": [lines],
    }
    return found


def _of(side: str, *given: Sequence[Found]) -> list[Found]:
    return [one for found in given for one in found if one.side == side]


def _common(given: Sequence[Found]) -> set[int]:
    """The rounds that every side has which has any."""
    turns: dict[str, set[int]] = {}
    for one in given:
        turns.setdefault(one.side, set()).add(one.turn)
    return set.intersection(*turns.values()) if turns else set()


#: What a cell of the table is: text, a number, or a ratio and its mark.
_Cell = str | float | list[float | str]


def _cell(values: Sequence[float], measured: bool) -> _Cell:
    """The median of a side's rounds; or why there is none."""
    if values:
        return round(statistics.median(values), 3)
    return "not compared" if measured else "not measured"


def _ratio(values: Mapping[str, Sequence[float]], side: str, void: Container[str]) -> _Cell:
    """The ratio of the medians of a side and stock, with its mark if it has one."""
    ours, stocks = values[side], values.get(SIDES[0])
    if not ours or not stocks or side in void or SIDES[0] in void:
        return report.REFUSED
    one, other = statistics.median(ours), statistics.median(stocks)
    if not one or not other:
        return report.REFUSED
    return report.marked(round(one / other, 3), stocks, ours)


def _received(found: Sequence[Found], kind: str) -> str:
    """The round that lacks most."""
    counts = [one.counts[kind] for one in found if kind in one.counts]
    if not counts:
        return "not measured"
    received, expected = min(counts)
    return f"{received:,} of {expected:,}"


def _failure(what: str, log: Path, out: Path) -> Failure:
    kept = shutil.copy(log, out)
    tail = [line[:300] for line in log.read_text(errors="replace").splitlines()[-30:]]
    return Failure("\n".join([f"{what}; log: {kept}", *tail]))


def _last(text: str) -> str:
    return text.strip().splitlines()[-1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", help="the installation: a virtual environment's directory,")
    parser.add_argument("--site", help="or a site-packages directory")
    parser.add_argument("--out", type=Path, help="directory for the results (build/bench/TIME)")
    fair = [fair_rounds(len(sides)) for sides in (SIDES, (*SIDES, MRV2))]
    parser.add_argument(
        "--rounds",
        type=_rounds,
        help=f"how often each side is measured ({fair[0]} for the {len(SIDES)} sides of a CPU, "
        f"{fair[1]} for the {len(SIDES) + 1} of a GPU). A multiple of the number of sides, "
        f"{report.ENOUGH} or more, lets each be first equally often, and gives ratios without a "
        "mark where rounds do not overlap. On a CPU with 2 cores a round takes about two minutes",
    )
    parser.add_argument("--model", type=Path, help="with weights and a tokenizer; else one is made")
    parser.add_argument("--python", help="what runs server and client, if not the environment's")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--server", default="", help="more arguments for `vllm serve`, quoted")
    parser.add_argument("--probe", type=Path, help="directory for the probe's files")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a start, and of a case")
    return parser


def _rounds(text: str) -> int:
    """A number of rounds.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        rounds = int(text)
    except ValueError:
        rounds = 0
    if rounds < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds; give 1 or more")
    return rounds


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program if there is no such model, or nowhere to write to."""
    if args.model and not (args.model / "config.json").is_file():
        parser.error(
            f"--model {args.model}: no directory with a config.json; name one that holds a model, "
            "a downloaded one if need be"
        )
    for option, directory in (("--out", args.out), ("--probe", args.probe)):
        if not directory:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            parser.error(
                f"{option} {directory}: {error.strerror}; name a directory that can be written to"
            )


def main(argv: Sequence[str]) -> int:
    """Measure, print the table; 0 if every side ran, and gave what stock gave."""
    parser = _parser()
    args = parser.parse_args(argv)
    target(parser, args)
    _check(parser, args)
    end_on_signals()
    leave_out()
    kept = False

    def write(run: Mapping[str, Any]) -> None:
        nonlocal kept
        report.replace(args.out / "serving.json", json.dumps(run, indent=1) + "\n")
        report.replace(args.out / "serving.md", report.markdown(run))
        kept = True

    try:
        run = measure(
            args.site,
            args.out,
            rounds=args.rounds,
            model_path=args.model,
            cases=args.cases,
            python=args.python,
            server=shlex.split(args.server),
            probe=args.probe,
            timeout=args.timeout,
            on_found=write,
        )
        write(run)
        print()
        code = report.publish(run, None)
        interrupted = not run["complete"]
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        what = f"what was measured is in {args.out}" if kept else "nothing was measured"
        print(f"\nbench: stopped; {what}", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
