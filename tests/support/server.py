"""vLLM's own server, as a process, and requests to it over HTTP."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.engine import PATIENCE

#: Without the proxy that the environment may name: the server is on this machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A server, and the process that it runs in.

    Args:
        log: the file that it prints into.
        model: the directory of its model.
        environment: all its variables.
        arguments: further ones of the command.
    """

    def __init__(
        self, log: Path, model: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--max-model-len", "256"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                cwd=log.parent,
            )

    def ask(self, path: str, body: Any = None, patience: float = PATIENCE) -> str:
        """Return the answer to a request, which may take ``patience`` seconds.

        Raises:
            urllib.error.HTTPError: the server refused it.
            urllib.error.URLError: there is no server any more.
            TimeoutError: it has not answered.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with DIRECT.open(request, timeout=patience) as answer:
            return str(answer.read(), "utf-8")

    def generate(self, tokens: list[int], **params: Any) -> Any:
        """Return the reply to a prompt of tokens, as parsed JSON; see :meth:`ask`."""
        body = {"token_ids": tokens, "sampling_params": params}
        return json.loads(self.ask("/inference/v1/generate", body))

    def wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + PATIENCE
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.ask("/health")
                return
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop the server, and all processes that it has started."""
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, end)
                self.process.wait(30)
