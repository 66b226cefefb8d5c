"""Serve on one side, and drive the server, a slice on request.

    python -m bench.servers.child OUT SPEC

SPEC is a :class:`Spec` as JSON. Each slice takes two equal requests (:mod:`bench.harness.kept`),
case and seed, for the warm-up and for the slice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.errors import Fatal
from bench.harness import kept
from bench.harness.kept import end_with_parent
from bench.models import memory
from bench.servers import load as loads
from bench.servers import own, streams
from bench.servers.client import Clients
from bench.servers.load import Load

#: Seconds for a server to start, and to end by itself.
_START, _GRACE = 300.0, 30.0


class Spec(NamedTuple):
    """Measurement of one server.

    Attributes:
        load: fields of a :class:`~bench.servers.load.Load`.
        clients: number of client processes.
        ramp: seconds of traffic before a window.
        seconds: of a window.
        model: the model's directory.
        flags: of the server.
        own: the user's arguments for `vllm bench serve`; None for closed-loop streams.
        compared: whether texts of the user's traffic are compared.
        front_end: ``python`` or ``rust``.
        path: PYTHONPATH of the server.
        cores: the CPUs of server and clients.
        memory: the share of the GPU's memory.
    """

    load: Sequence[Any]
    clients: int
    ramp: float
    seconds: float
    model: str
    flags: Sequence[str]
    own: Sequence[str] | None
    compared: bool
    front_end: str
    path: str
    cores: Sequence[int]
    memory: float

    @property
    def tokenizer(self) -> str:
        """The tokenizer's directory."""
        return str(Path(self.model) / "tokenizer") if Load(*self.load).generated else self.model


def main(out: Path, spec: Spec) -> None:
    """Start the server, and measure each slice.

    Raises:
        OSError: the server does not start, or ends.
    """
    os.sched_setaffinity(0, spec.cores)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with serving(spec) as (url, server):
        clients = Clients(url, Load(*spec.load), spec.clients)
        kept.ready(out)
        asked = kept.asked(out)
        for answer, (case, seed) in asked:
            try:
                if spec.own is None:
                    clients.warm_up(case, seed)
                kept.answer(answer, {})
                answer, _ = next(asked)  # noqa: PLW2901 (of the slice)
                measured = measure(clients, url, server, spec, case, seed)
                kept.answer(answer, {"device": device, **measured})
            except Fatal as error:
                kept.answer(answer, {"error": str(error)})
                raise


def measure(
    clients: Clients, url: str, server: int, spec: Spec, case: str, seed: int
) -> dict[str, Any]:
    """Measure a slice; return its figures, outputs, counts and problems."""
    if spec.own is None:
        return streams.measure(clients, url, server, case, seed, spec.ramp, spec.seconds)
    named = (spec.model, spec.tokenizer, spec.own)
    return own.measure(url, server, *named, seed, spec.compared)


@contextlib.contextmanager
def serving(spec: Spec) -> Iterator[tuple[str, int]]:
    """Start a server, and end it; its processes are in this process's group.

    Yields:
        Its URL and process id.

    Raises:
        OSError: it ended, or does not answer in time; or uvicorn would parse HTTP in Python.
    """
    rust = spec.front_end == "rust"
    if not rust and importlib.util.find_spec("httptools") is None:
        raise OSError("there is no httptools, which vLLM's dependencies include; install it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    share = (f"--{name.replace('_', '-')}={value}" for name, value in memory(spec.memory).items())
    tokenizer = None if rust else spec.tokenizer
    line = loads.server_arguments(spec.model, tokenizer, port, [*share, *spec.flags])
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.servers.command", *line],
        env={**os.environ, "PYTHONPATH": spec.path, "VLLM_USE_RUST_FRONTEND": str(int(rust))},
        # A server that is killed leaves its engine behind.
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # noqa: PLW1509 (one thread)
    )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if (code := process.poll()) is not None:
                    raise OSError(f"the server ended (exit code {code})") from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Spec(**json.loads(sys.argv[2])))
