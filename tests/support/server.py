"""vLLM's own server, as a process, and requests to it over HTTP."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.engine import PATIENCE, Engine
from support.launcher import Job
from support.sites import REPO

PROGRAM = REPO / "tests" / "engine" / "serve.py"
#: Without the proxy that the environment may name: the server is on this machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A server, and the process that it runs in.

    Args:
        engine: starts its process.
        log: the file that it prints into.
        model: the directory of its model.
        arguments: further ones of the command.
        paths: directories that its Python searches, such as those of plugins.
        environment: variables to set.
        program: starts the server with these arguments.
    """

    def __init__(
        self,
        engine: Engine,
        log: Path,
        model: Path,
        arguments: Sequence[str],
        paths: Sequence[Path],
        environment: Mapping[str, str],
        program: Path = PROGRAM,
    ) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = ["--model", str(model), "--max-model-len", "256"]
        words += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **environment,
        }
        searched, code = [*map(str, paths)], str(log.with_suffix(".code"))
        job = Job(str(program), words, searched, variables, str(log), code)
        self.process = engine.launch(job)

    @contextlib.contextmanager
    def running(self) -> Iterator["Server"]:
        """Wait until the server serves, and stop it at the end; print its log on an error."""
        try:
            self.wait()
            yield self
        except BaseException:
            print(self.log.read_text()[-8000:])  # pytest shows it
            raise
        finally:
            self.stop()

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
