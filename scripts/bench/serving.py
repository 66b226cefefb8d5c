"""Measure serving: vLLM's server on stock vLLM and on the overlay, driven by vLLM's client.

    PYTHONPATH=scripts python -m bench.serving [--site SITE] [--rounds N] [--out DIR]
        [--model DIR --server "ARGUMENTS" --client "ARGUMENTS"] [--keep]

SITE is an installation of vLLM, and stays as it is: views of it are measured. In each round each
side runs vLLM's server in a process of its own, by turns, and `vllm bench serve` of the pristine
view drives it, with our cases or with the requests that the arguments of --client make. Stock is
then measured twice: where it differs from itself, texts are not compared. With --keep each server
is started once, and is idle while the others take their turns. DIR gets run.json, run.md and
run.html. Ctrl-C ends the run and keeps what was measured.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import contextlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from overlay import output

from bench.compare import command_line, outputs
from bench.compare.installations import Installations
from bench.compare.run import SIDES, Job, Run, Table, measured_sides, origin, run
from bench.compare.summary import AGAIN, CaseResult, Child
from bench.errors import Failure
from bench.servers import load as loads
from bench.servers.load import CASES, LOADS
from bench.servers.results import TEXTS, read, read_own
from bench.servers.server import free_port, serving

NAME = "vllm serve"


@dataclass(frozen=True)
class Server:
    """A server that is running.

    Attributes:
        url: of its root.
        process: its process id.
        log: what it prints.
        check: raises Failure if it has ended.
    """

    url: str
    process: int
    log: Path
    check: Callable[[], None]


class ServingRun(Run):
    """A run of servers, and the model that they serve."""

    #: The sampler that needs no compiler, the overlay's log line, and no proxy for this machine.
    environment: Mapping[str, str] = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        """Make the model, unless there is one.

        Raises:
            Failure: the installation's Python cannot.
        """
        self.generated = args.model is None
        self.own: list[str] | None = args.client
        self._varying = ""
        args.aa = args.aa or self.own is not None
        load = LOADS[args.size]
        sides = measured_sides(SIDES, args)
        shared = loads.shared_device(len(sides)) if args.keep and args.gpu else []
        self.load = replace(load, server=(*load.server, *shared, *args.server))
        self._flags = loads.flags(self.load) if self.own is None else [*shared, *args.server]
        path = args.model.resolve() if args.model else installations.work / "model"
        self.model = str(path)
        self.tokenizer = str(path / "tokenizer" if self.generated else path)
        shape = (
            f"{load.requests} requests, {load.concurrency} at a time, {load.prompt} tokens in and "
            f"{load.output} out, greedy. Texts are compared whole; token ids and logprobs are "
            "those of one request alone. Where stock differs from itself, batches depend on "
            "arrivals: set VLLM_BATCH_INVARIANT=1"
        )
        cases = {case: {"temperature": 0, **CASES[case]} for case in args.cases}
        if self.own is not None:
            served = shlex.join(args.server) or "no flags"
            shape = f"`vllm bench serve {shlex.join(self.own)}`, served with `{served}`"
            cases = {loads.OWN: {}}
        name = "generated model" if self.generated else path.name
        about = {"title": "Driven by `vllm bench serve`.", "model": name, "shape": shape}
        if args.keep:
            about["shape"] += ". Each server was started once"
        table = Table(sides, about, cases, "server")
        super().__init__(args, installations, {NAME: table})
        self._kept: dict[str, Server] = {}
        self._running = contextlib.ExitStack()
        module = ["bench.servers.child", "prepare", self.model, args.size if self.generated else ""]
        self.device = self.child("prepare", SIDES[0], module, {}, args.timeout)["device"]

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Serve on one side, and return the results of each case.

        The server's log is kept if a request failed.

        Raises:
            Failure: the server or the client failed; their logs are kept.
        """
        if self.args.keep:
            if job.side not in self._kept:
                with self._limit.once(job.group):
                    self._kept[job.side] = self._serve(job, self._running)
            server = self._kept[job.side]
            driven, cases = self._drive(job, server)
        else:
            with contextlib.ExitStack() as running:
                server = self._serve(job, running)
                driven, cases = self._drive(job, server)
        results = {}
        for case in cases:
            if self.own is None:
                result = read(driven[case], case, self.load, self.generated)
                result.prompts = f"seed {loads.seed(case, job.round)}"
            else:
                result = read_own(driven[case])
                own = any(word.partition("=")[0] == "--seed" for word in self.own)
                result.prompts = "" if own else f"seed {job.round}"
            if any(driven[case]["client"]["errors"]):
                shutil.copy(server.log, self.args.out)
                result.problems = [*result.problems, f"server's log: {server.log.name}"]
            results[case] = result
        return {NAME: results}

    def _serve(self, job: Job, running: contextlib.ExitStack) -> Server:
        """Start a job's server, which ends with ``running``."""
        port = free_port()
        log = self.installations.work / f"server-{job.side}-round-{job.round}.log"
        line = loads.server_arguments(self.model, self.tokenizer, port, self._flags)
        second = job.side == SIDES[2]
        environment = {**self.environment, "VLLM_USE_V2_MODEL_RUNNER": str(int(second))}
        process, check = running.enter_context(
            serving(self.installations, origin(job.side), log, line, environment)
        )
        return Server(f"http://127.0.0.1:{port}", process, log, check)

    def _drive(self, job: Job, server: Server) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give a server a round of requests.

        Returns:
            What the client's process wrote, and the arguments of each case.

        Raises:
            Failure: the server or the client failed; their logs are kept.
        """
        timeout = self.args.timeout
        cases = self._cases(server.url, job.round)
        module = ["bench.servers.child", "drive", server.url, str(timeout), f"{server.process}"]
        module.append(json.dumps(cases))
        name, longest = f"client-{job.side}-round-{job.round}", timeout * (1 + len(cases))
        try:
            driven = self.child(name, SIDES[0], module, {}, longest, watch=server.check)
        except Failure as error:
            kept = shutil.copy(server.log, self.args.out)
            raise Failure(f"{job.name}: {error}\nserver's log: {kept}") from error
        return driven, cases

    def execute(self) -> int:
        """Measure, and end the servers that are kept; see :meth:`Run.execute`."""
        with self._running:
            return super().execute()

    def _cases(self, url: str, number: int) -> dict[str, dict[str, Any]]:
        """Return each case's arguments of the client, and the request that is sent alone."""
        if self.own is not None:
            arguments = loads.own_client_arguments(
                self.model, self.tokenizer, url, number, self.own
            )
            return {loads.OWN: {"arguments": arguments, "single": None}}
        return {
            case: {
                "arguments": loads.client_arguments(
                    case, self.load, self.model, self.tokenizer, url, number
                ),
                "single": loads.single_request(case, self.load, number),
            }
            for case in self.args.cases
        }

    def report(self, complete: bool) -> dict[str, Any]:
        """Return the JSON of the results so far; texts of stock that vary are not compared."""
        table = self.tables[NAME]
        if self.own is not None and not self._varying:
            self._varying = _varies(table.children)
            if self._varying:
                table.about["shape"] += f". Texts are not compared: stock differs, {self._varying}"
        if self._varying:
            for child in table.children:
                for result in child.cases.values():
                    result.outputs = {k: v for k, v in result.outputs.items() if k != TEXTS}
        return super().report(complete)


def _varies(children: Sequence[Child]) -> str:
    """Return where two texts of stock's in one round differ first; empty if none do."""
    for one, other in combinations(children, 2):
        if one.round == other.round and {one.side, other.side} == {SIDES[0], AGAIN}:
            for name, result in one.cases.items():
                ours, theirs = result.outputs.get(TEXTS), other.cases[name].outputs.get(TEXTS)
                if ours is not None and theirs is not None and ours != theirs:
                    return f"round {one.round}, {outputs.where(ours, theirs)}"
    return ""


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        message = f"{error}; quote its arguments as a shell would want them"
        raise argparse.ArgumentTypeError(message) from error


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.compare.run.run`."""
    gpu = Path("/dev/nvidiactl").exists()
    # Each side is first equally often.
    options = command_line.parser(__doc__ or "", rounds=6)
    command_line.add_again(options)
    command_line.add_limit(options)
    command_line.add_sides(options, SIDES if gpu else SIDES[:2])
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--model", type=Path, help="a model's directory (one is generated)")
    size = "full" if gpu else "small"
    options.add_argument("--size", choices=list(LOADS), default=size)
    text = "start each server once, and share the device's memory among the sides"
    options.add_argument("--keep", action="store_true", help=text)
    text = "more arguments for `vllm serve`, quoted"
    options.add_argument("--server", type=_words, default="", help=text)
    text = "arguments for `vllm bench serve`, quoted: your own dataset, rate and concurrency"
    options.add_argument("--client", type=_words, help=f"{text}, in place of the cases")
    options.add_argument("--timeout", type=float, default=300.0, help="of a start, and of a case")
    args = command_line.parse(options, argv)
    args.gpu = gpu
    return run(args, lambda installations: ServingRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
