"""Run vLLM's server or client in this process, with the vLLM of one side.

    python -m bench.servers.child prepare OUT MODEL [--weights]
    python -m bench.servers.child serve OUT ARGUMENTS...
    python -m bench.servers.child drive OUT URL TIMEOUT CASES

OUT gets JSON: the directory that vllm was imported from, and for ``prepare`` the device. CASES is
a JSON list of cases: the arguments of `vllm bench serve`, the body of a request that is then sent
alone, and the file that gets both results.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.reports.run_file import replace


def prepare(out: Path, directory: Path, weights: bool) -> None:
    """Write the weights if asked to, and the device of the measurement."""
    import torch

    if weights:
        from bench.servers.weights import write_weights

        write_weights(directory)
    gpu = torch.cuda.is_available() and torch.version.cuda is not None
    _write(out, device=torch.cuda.get_device_name() if gpu else "CPU")


def serve(out: Path, arguments: list[str]) -> None:
    """Run vLLM's server until this process is ended."""
    _write(out)
    sys.argv = ["vllm", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def drive(out: Path, url: str, timeout: float, cases: list[dict[str, Any]]) -> None:
    """Wait for the server, and run the cases one after the other.

    Raises:
        OSError: the server is not there in time, or does not answer.
    """
    from vllm.benchmarks.serve import add_cli_args, main  # takes seconds, as the server starts

    _write(out)
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
    for case in cases:
        result = main(parser.parse_args(case["arguments"]))
        request = urllib.request.Request(
            f"{url}/v1/completions",
            data=json.dumps(case["single"]).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            single = json.load(answer)
        replace(Path(case["file"]), json.dumps({"client": result, "single": single}))


def _write(out: Path, **fields: str) -> None:
    import vllm

    out.write_text(json.dumps({"package": str(Path(vllm.__file__).parent), **fields}))


if __name__ == "__main__":
    task, file, *rest = sys.argv[1:]
    if task == "prepare":
        prepare(Path(file), Path(rest[0]), "--weights" in rest[1:])
    elif task == "serve":
        serve(Path(file), rest)
    else:
        drive(Path(file), rest[0], float(rest[1]), json.loads(rest[2]))
