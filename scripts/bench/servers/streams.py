"""Windows of closed-loop streams: the figures of a server under them."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from bench.errors import Fatal
from bench.harness import disturbance
from bench.loops.rows import quantiles
from bench.results.slices import DISTURBANCE
from bench.servers import processes
from bench.servers.client import Clients, Window

#: Seconds for the clients to begin, and for aborted requests to leave the engine.
_BEGIN, _REST = 0.1, 0.3
#: A client process that uses more of a core limits its streams.
_BUSY = 0.9


def measure(
    clients: Clients, url: str, server: int, case: str, seed: int, ramp: float, seconds: float
) -> dict[str, Any]:
    """Measure a window; return its figures and problems.

    Args:
        clients: that send the requests.
        url: of the server.
        server: its process.
        case: a name of :data:`bench.servers.load.CASES`.
        seed: of the requests.
        ramp: seconds of traffic before the window.
        seconds: of the window.

    Raises:
        Fatal: a request, a client process or the server has failed.
    """
    began = time.monotonic() + _BEGIN + ramp
    ended = began + seconds
    running = clients.begin(case, seed, began, ended)
    clients.wait(running, began - time.monotonic())
    before, used, at = disturbance.snapshot(server), processes.sample(server), time.monotonic()
    clients.wait(running, ended - time.monotonic())
    after, then, spent = disturbance.snapshot(server), processes.sample(server), time.monotonic()
    window = clients.collect(running, began, ended)
    time.sleep(_REST)
    try:
        urllib.request.urlopen(f"{url}/health", timeout=60).close()
    except OSError as error:
        raise Fatal(f"the server has not outlived {case!r}: {error}") from error
    cores = processes.cores(used, then, server, spent - at)
    found = {"figures": {**figures(window, cores), DISTURBANCE: disturbance.during(before, after)}}
    busiest = max(window.cpu) / seconds
    busy = f"a client process used {busiest:.0%} of a core: name more --clients"
    return {**found, "problems": [busy] if busiest > _BUSY else []}


def figures(window: Window, cores: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of a window; times in ms, unless the name says us.

    Args:
        window: of all clients.
        cores: used by each kind of the server's processes.
    """
    seconds = window.ended - window.began
    chunks = len(window.firsts) + len(window.gaps)
    # Chunks of a model with its own weights do not say how many tokens they have.
    tokens = window.tokens * (window.used / window.counted if window.counted else 1.0)
    serving = sum(used for kind, used in cores.items() if kind.startswith("API server"))
    spent = {"API server us/chunk": serving} | {"client us/chunk": sum(window.cpu) / seconds}
    return {
        "tokens/s": tokens / seconds,
        "requests/s": window.requests / seconds,
        "chunks/s": chunks / seconds,
        **quantiles("TTFT", window.firsts),
        **quantiles("gap", window.gaps),
        **{f"{kind}, cores": used for kind, used in cores.items()},
        "clients, cores": sum(window.cpu) / seconds,
        **{name: 1e6 * used * seconds / chunks for name, used in spent.items() if chunks},
    }
