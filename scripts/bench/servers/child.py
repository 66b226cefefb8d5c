"""Make the model, or drive a server with vLLM's client, in this process.

    python -m bench.servers.child OUT prepare MODEL SIZE
    python -m bench.servers.child OUT drive URL TIMEOUT SERVER CASES

``prepare`` writes the model and weights of a SIZE in :data:`bench.servers.load.LOADS`; if that is
empty, the model is there. OUT gets JSON: for ``prepare`` the device; for ``drive`` the results of
each case. CASES is JSON: case to the arguments of `vllm bench serve`, and the body of a request
that is then sent alone, or null. SERVER is the server's process id, and says whose cores are
looked at.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo import model

from bench.compare import disturbance
from bench.servers.load import LOADS
from bench.servers.weights import write_weights


def prepare(directory: Path, size: str) -> str:
    """Write a model, its weights and its tokenizer; return the device's name."""
    import torch

    if size:
        changes = {"tie_word_embeddings": False, "max_position_embeddings": 32768}
        config = {**model.CONFIG, **LOADS[size].model, **changes}
        model.write(directory, **config)
        model.write_tokenizer(directory / "tokenizer", config["vocab_size"])
        write_weights(directory)
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def drive(url: str, timeout: float, server: int, cases: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for the server, and run the cases one after the other.

    Raises:
        OSError: the server is not there in time, does not answer, or has not outlived a case. A
            reply that its end has cut is whole to vLLM's client.
    """
    from vllm.benchmarks.serve import add_cli_args, main  # takes seconds, as the server starts

    deadline = time.monotonic() + timeout
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    results = {}
    for name, case in cases.items():
        before = disturbance.snapshot(server)
        client = main(parser.parse_args(case["arguments"]))
        disturbed = disturbance.during((before, disturbance.snapshot(server)))
        disturbed["gpus"] = disturbance.gpus()
        try:
            urllib.request.urlopen(f"{url}/health", timeout=timeout).close()
        except OSError as error:
            raise OSError(f"the server has not outlived {name!r}: {error}") from error
        single = None if case["single"] is None else _send(url, case["single"], timeout)
        results[name] = {"client": client, "single": single, "disturbance": disturbed}
    return results


def _send(url: str, body: Mapping[str, Any], timeout: float) -> Any:
    """Return the answer to a request."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


if __name__ == "__main__":
    out, task, *rest = sys.argv[1:]
    if task == "prepare":
        result: dict[str, Any] = {"device": prepare(Path(rest[0]), rest[1])}
    else:
        result = drive(rest[0], float(rest[1]), int(rest[2]), json.loads(rest[3]))
    Path(out).write_text(json.dumps(result))
