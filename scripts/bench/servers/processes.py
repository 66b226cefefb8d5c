"""vLLM's server on one side, and vLLM's client of the pristine side, as child processes."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.compare.installations import SIDES, Installations, end, log_tail
from bench.errors import Failure
from bench.servers import load as loads
from bench.servers.load import CASES, CPU, Load

if TYPE_CHECKING:
    from typing_extensions import Self

#: Pristine vLLM on Model Runner V2.
MRV2 = "mrv2"
#: The sampler that needs no compiler, and the overlay's log line.
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
#: Seconds that a process may take to end by itself.
GRACE = 30.0
#: Ignores the proxy that the environment may name: the server is on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Setting:
    """The part of a run that all its processes share.

    Attributes:
        installations: the sides.
        python: interpreter of the children.
        work: directory for the children's files.
        out: directory for the logs of those that fail.
        directory: the model.
        load: the requests.
        cases: the names of those in :data:`CASES` that are measured.
        generated: whether the model is ours, so that a text has one word for each token.
        timeout: seconds for a server to start, and for a case.
        device: "CPU", or torch's name of the GPU.
    """

    installations: Installations
    python: str
    work: Path
    out: Path
    directory: Path
    load: Load = CPU
    cases: Sequence[str] = tuple(CASES)
    generated: bool = True
    timeout: float = 300.0
    device: str = "CPU"

    @property
    def tokenizer(self) -> Path:
        """The directory of the model's tokenizer."""
        return self.directory / "tokenizer" if self.generated else self.directory

    def failure(self, text: str, log: Path) -> Failure:
        """Return what to raise about a process; its log is kept."""
        kept = shutil.copy(log, self.out)
        return Failure("\n".join([f"{text}; log: {kept}", *log_tail(log, 30)]))


class Process:
    """A child process with one side's vLLM, for as long as the context lasts.

    Attributes:
        log: gets its output.
    """

    def __init__(self, setting: Setting, kind: str, side: str, turn: int) -> None:
        self.setting = setting
        self.title = f"the {kind} of {side} round {turn}"
        stem = setting.work / f"{side}-round-{turn}-{kind}"
        self.log, self._package = stem.with_suffix(".log"), stem.with_suffix(".json")

    def command(self) -> tuple[str, list[str], Mapping[str, str]]:
        """Return the installation, the child's arguments behind OUT, and its variables."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Start it."""
        self._origin, (task, *arguments), environment = self.command()
        program = [self.setting.python, "-m", "bench.servers.child"]
        self._process = self.setting.installations.start(
            self._origin,
            [*program, task, str(self._package), *arguments],
            self.log,
            {**ENVIRONMENT, **environment},
            orphaned=signal.SIGTERM,  # a server that is killed leaves its engine behind
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End it and every process that it started, even if interrupted."""
        try:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        finally:
            end(self._process)

    def check_import(self) -> None:
        """Refuse another vLLM than the side's.

        Raises:
            Failure: it imported one.
        """
        package = json.loads(self._package.read_text())["package"]
        self.setting.installations.check_import(self._origin, package)

    def failure(self, text: str) -> Failure:
        """Return what to raise about this process."""
        return self.setting.failure(f"{self.title} {text}", self.log)


class Server(Process):
    """vLLM's server on one side.

    Attributes:
        url: where it listens.
    """

    def __init__(self, setting: Setting, side: str, turn: int) -> None:
        super().__init__(setting, "server", side, turn)
        self.side = side
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def command(self) -> tuple[str, list[str], Mapping[str, str]]:
        """Serve on the side's vLLM."""
        s = self.setting
        line = loads.server_arguments(s.load, str(s.directory), str(s.tokenizer), self._port)
        runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(self.side == MRV2))}
        return SIDES[0] if self.side == MRV2 else self.side, ["serve", *line], runner

    def wait(self) -> None:
        """Wait until it serves.

        Raises:
            Failure: it ended, took too long, or imported another vLLM than the side's.
        """
        deadline = time.monotonic() + self.setting.timeout
        while True:
            with contextlib.suppress(OSError):
                _DIRECT.open(f"{self.url}/health", timeout=5).close()
                return self.check_import()
            if (code := self._process.poll()) is not None:
                raise self.failure(f"did not start (exit code {code})")
            if time.monotonic() > deadline:
                raise self.failure(f"did not serve within {self.setting.timeout:g} s")
            time.sleep(0.2)


class Client(Process):
    """`vllm bench serve` of the pristine side; it imports vLLM while the server starts."""

    def __init__(self, setting: Setting, side: str, turn: int, url: str) -> None:
        super().__init__(setting, "client", side, turn)
        self.url = url
        self.files = {
            case: setting.work / f"{side}-{turn}-{n}.json" for n, case in enumerate(setting.cases)
        }

    def command(self) -> tuple[str, list[str], Mapping[str, str]]:
        """Drive the server with every case."""
        s = self.setting
        model, tokenizer = str(s.directory), str(s.tokenizer)
        cases = [
            {
                "arguments": loads.client_arguments(case, s.load, model, tokenizer, self.url),
                "single": loads.single_request(case, s.load),
                "file": str(file),
            }
            for case, file in self.files.items()
        ]
        # Requests must not go to the environment's proxy.
        direct = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        return SIDES[0], ["drive", self.url, str(s.timeout), json.dumps(cases)], direct

    def results(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each case and its results, as soon as they are there.

        Raises:
            Failure: the client ended, took too long, or imported another vLLM than stock's.
        """
        for case, file in self.files.items():
            deadline = time.monotonic() + self.setting.timeout
            while not file.exists():
                code = self._process.poll()
                if code is not None and not file.exists():
                    raise self.failure(f"ended at {case!r} (exit code {code})")
                if time.monotonic() > deadline:
                    raise self.failure(f"did not finish {case!r} in {self.setting.timeout:g} s")
                time.sleep(0.05)
            self.check_import()
            yield case, json.loads(file.read_text())
