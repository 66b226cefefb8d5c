"""vLLM's server on one side, and the measurement of its windows."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from bench.errors import Failure
from bench.harness.installations import end_with_parent
from bench.harness.processes import cores, disturbances, snapshot
from bench.loops.rows import quantiles
from bench.models import memory
from bench.servers.client import NAME, Clients, Window

#: Seconds for a server to start, and to end by itself.
_START, _GRACE = 300.0, 30.0
#: Seconds for the clients to begin, and for aborted requests to leave the engine.
_BEGIN, _REST = 0.1, 0.3
#: A client process that uses more of a core limits its streams.
_BUSY = 0.9
#: Figure to its key in a result of `vllm bench serve`. Times are in ms.
OWN_FIGURES: Mapping[str, str] = {
    "tokens/s": "output_throughput",
    "requests/s": "request_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
}


class Server:
    """A server and its clients.

    Args:
        spec: of :mod:`bench.child`: "engine", a name of :data:`bench.loops.rows.ENGINES`;
            "streams" at a time; "clients", the number of client processes; "ramp", seconds of
            traffic before a window, and its "seconds"; "model" and "tokenizer", directories;
            "flags" of the server; "own", the user's arguments for `vllm bench serve`, or None for
            streams; "front_end", ``python`` or ``rust``; and the PYTHONPATH and share of "memory"
            of the server.

    Raises:
        Failure: it ended, or does not answer in time; or uvicorn would parse HTTP in Python.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec, rust = spec, spec["front_end"] == "rust"
        if not rust and importlib.util.find_spec("httptools") is None:
            raise Failure("there is no httptools, which vLLM's dependencies include; install it")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        # The Rust front end takes no tokenizer's name.
        model = named(spec["model"], None if rust else spec["tokenizer"])
        address = ["--host", "127.0.0.1", "--port", str(port)]
        line = [*model, *flags(memory(spec["memory"])), *spec["flags"], *address]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.servers.command", *line],
            env={**os.environ, "PYTHONPATH": spec["path"], "VLLM_USE_RUST_FRONTEND": f"{rust:d}"},
            # A server that is killed leaves its engine behind.
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # noqa: PLW1509 (one thread)
        )
        self._url = f"http://127.0.0.1:{port}"
        try:
            self._wait(time.monotonic() + _START)
        except Failure:
            self.shutdown()
            raise
        self._clients = Clients(self._url, spec["engine"], spec["streams"], spec["clients"])

    def warm_up(self, case: str, seed: int) -> None:
        """Send a short request from each stream; raises as :meth:`measure`."""
        if self._spec["own"] is None:
            self._clients.warm_up(case, seed)

    def measure(self, case: str, seed: int) -> dict[str, Any]:
        """Measure a window; return its "figures", "noise" and "limits".

        Raises:
            Failure: a request or the server has failed.
        """
        streams = self._spec["own"] is None
        measured = self._streams(case, seed) if streams else self._own(seed)
        # A reply that the server's end has cut is a whole one to vLLM's client.
        if not self._is_well(60):
            raise Failure(f"the server has not outlived {case!r}")
        return measured

    def shutdown(self) -> None:
        """End the server; its processes are in this process's group."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)

    def _wait(self, deadline: float) -> None:
        while not self._is_well(5):
            if (code := self._process.poll()) is not None:
                raise Failure(f"the server ended (exit code {code})")
            if time.monotonic() > deadline:
                raise Failure(f"the server does not answer after {_START:g} s")
            time.sleep(0.2)

    def _is_well(self, timeout: float) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self._url}/health", timeout=timeout).close()
            return True
        return False

    def _streams(self, case: str, seed: int) -> dict[str, Any]:
        seconds = self._spec["seconds"]
        began = time.monotonic() + _BEGIN + self._spec["ramp"]
        window = Window(began, began + seconds)
        running = self._clients.begin(case, seed, window)
        self._clients.wait(running, began - time.monotonic())
        before = snapshot(self._process.pid)
        self._clients.wait(running, window.ended - time.monotonic())
        after = snapshot(self._process.pid)
        for one in running:
            window.add(one.result())
        time.sleep(_REST)
        busiest = max(window.cpu) / seconds
        busy = f"a client process used {busiest:.0%} of a core: name more --clients"
        return {
            "figures": figures(window, cores(before, after)),
            "noise": disturbances(before, after),
            "limits": [busy] if busiest > _BUSY else [],
        }

    def _own(self, seed: int) -> dict[str, Any]:
        """Drive the server with `vllm bench serve`."""
        from vllm.benchmarks.serve import add_cli_args
        from vllm.benchmarks.serve import main as drive

        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        line = client_arguments(self._spec, self._url, seed)
        before = snapshot(self._process.pid)
        result = drive(parser.parse_args(line))
        return {**read_own(result), "noise": disturbances(before, snapshot(self._process.pid))}


def named(model: str, tokenizer: str | None) -> list[str]:
    """Return the flags of a model; its tokenizer is beside it if None."""
    return ["--model", model, "--served-model-name", NAME, *flags({"tokenizer": tokenizer})]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments of an engine as flags of a server; None is left out."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def client_arguments(spec: Mapping[str, Any], url: str, seed: int) -> list[str]:
    """Return the arguments of `vllm bench serve`; the user's may name another seed."""
    return [
        *("--backend", "openai", "--seed", str(seed), *spec["own"], "--base-url", url),
        *("--disable-tqdm", "--save-detailed", *named(spec["model"], spec["tokenizer"])),
    ]


def read_own(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures and limits of a result of `vllm bench serve`.

    Raises:
        Failure: a request has failed.
    """
    for n, error in enumerate(result["errors"]):
        if error:
            raise Failure(f"request {n} failed: {error.strip().splitlines()[-1]}")
    # The client or the server's front end had no core to run on. A reply that comes in one piece
    # has no interval, and no time per token.
    whole = result["total_output_tokens"] > result["completed"] and result["median_tpot_ms"] <= 0
    bursts = whole or result["median_itl_ms"] < result["mean_itl_ms"] / 4
    return {
        "figures": {figure: float(result[key]) for figure, key in OWN_FIGURES.items()},
        "limits": ["most tokens came in bursts"] if bursts else [],
    }


def figures(window: Window, cores: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a window; times in ms, unless the name says us.

    Args:
        window: of all clients.
        cores: used by each kind of the server's processes.
    """
    seconds = window.ended - window.began
    chunks = len(window.firsts) + len(window.gaps)
    serving = sum(used for kind, used in cores.items() if kind.startswith("API server"))
    clients = sum(window.cpu) / seconds
    spent = {"API server us/chunk": serving, "client us/chunk": clients}
    return {
        "tokens/s": window.tokens / seconds,
        "requests/s": window.requests / seconds,
        "chunks/s": chunks / seconds,
        **quantiles("TTFT", window.firsts),
        **quantiles("gap", window.gaps),
        **{f"{kind}, cores": used for kind, used in cores.items()},
        "clients, cores": clients,
        **{name: 1e6 * used * seconds / chunks for name, used in spent.items() if chunks},
    }
