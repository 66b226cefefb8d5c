"""vLLM's server on one side, as a child process."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.compare.installations import Installations, end, log_tail
from bench.errors import Failure

#: Seconds that a server may take to end by itself.
GRACE = 30.0


@contextlib.contextmanager
def serving(
    installations: Installations,
    side: str,
    log: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Start a server, and end it and every process that it started, even if interrupted.

    Args:
        installations: of the comparison.
        side: the installation that serves.
        log: gets the server's output.
        arguments: of vLLM's server.
        environment: variables to set.

    Yields:
        The server's process id, and a function that raises Failure if it has ended.
    """
    process = installations.start(
        side,
        ["-m", "vllm.entrypoints.openai.api_server", *arguments],
        log,
        environment,
        orphaned=signal.SIGTERM,  # a server that is killed leaves its engine behind
    )

    def check() -> None:
        if (code := process.poll()) is not None:
            raise Failure(f"the server ended (exit code {code}):\n{log_tail(log)}")

    try:
        yield process.pid, check
    finally:
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            end(process)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
