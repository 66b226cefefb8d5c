"""Serve on one side, and drive the server with stock's client, a slice on request.

    python -m bench.servers.child OUT SPEC

SPEC is a :class:`Spec` as JSON; an empty one has the model written, and OUT gets the device. Each
slice takes two equal requests (:mod:`bench.harness.kept`), case and seed, of which the first does
nothing: the client warms up by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from demo import model

from bench.harness import disturbance, kept, outputs
from bench.harness.kept import end_with_parent
from bench.models import memory
from bench.results.slices import DISTURBANCE
from bench.servers import load as loads
from bench.servers.load import CASES, LOADS, Load
from bench.servers.weights import write_weights

#: Seconds for a server to start, and to end by itself.
_START, _GRACE = 300.0, 30.0
TEXTS = "texts"
#: Figure to its key in a result of `vllm bench serve`. Times are in ms.
FIGURES: Mapping[str, str] = {
    "tokens/s": "output_throughput",
    "requests/s": "request_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
}


class Spec(NamedTuple):
    """Measurement of one server.

    Attributes:
        size: a name of :data:`~bench.servers.load.LOADS`.
        model: the model's directory.
        generated: whether the model is generated: a text then has one word for each token.
        flags: of the server.
        own: the user's arguments for the client; None for our cases.
        path: PYTHONPATH of the server.
        cores: the CPUs of server and client.
        memory: the share of the GPU's memory.
        compared: whether texts are compared.
        front_end: ``python`` or ``rust``.
    """

    size: str
    model: str
    generated: bool
    flags: Sequence[str]
    own: Sequence[str] | None
    path: str
    cores: Sequence[int]
    memory: float
    compared: bool
    front_end: str = "python"

    @property
    def tokenizer(self) -> str:
        """The tokenizer's directory."""
        return str(Path(self.model) / "tokenizer") if self.generated else self.model


def prepare(directory: Path, size: str) -> None:
    """Write a model, its weights and its tokenizer."""
    changes = {"tie_word_embeddings": False, "max_position_embeddings": 32768}
    config = {**model.CONFIG, **LOADS[size].model, **changes}
    model.write(directory, **config)
    model.write_tokenizer(directory / "tokenizer", config["vocab_size"])
    model.write_tokenizer(directory, config["vocab_size"])  # the Rust front end looks here alone
    write_weights(directory)


def main(out: Path, spec: Spec) -> None:
    """Start the server, and measure each slice."""
    os.sched_setaffinity(0, spec.cores)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with serving(spec) as (url, process):
        kept.ready(out)
        asked = kept.asked(out)
        for warmed_up, (case, seed) in asked:
            kept.answer(warmed_up, {})
            answer, _ = next(asked)
            kept.answer(answer, {"device": device, **measure(url, process, spec, case, seed)})


@contextlib.contextmanager
def serving(spec: Spec) -> Iterator[tuple[str, int]]:
    """Start a server, and end it; its processes are in this process's group.

    Yields:
        Its URL and process id.

    Raises:
        OSError: it ended, or does not answer in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    own = (f"--{name.replace('_', '-')}={value}" for name, value in memory(spec.memory).items())
    rust = spec.front_end == "rust"
    tokenizer = None if rust else spec.tokenizer
    line = loads.server_arguments(spec.model, tokenizer, port, [*own, *spec.flags])
    program = "bench.servers.command" if rust else "vllm.entrypoints.openai.api_server"
    process = subprocess.Popen(
        [sys.executable, "-m", program, *line],
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


def measure(url: str, server: int, spec: Spec, case: str, seed: int) -> dict[str, Any]:
    """Drive a server with a case; return its figures, outputs, counts and problems.

    Raises:
        OSError: the server has not outlived the case. To vLLM's client, a reply that the server's
            end has cut is a whole one.
    """
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as drive

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    own = loads.case_arguments(case, LOADS[spec.size]) if spec.own is None else spec.own
    line = loads.client_arguments(spec.model, spec.tokenizer, url, seed, own)
    before = disturbance.snapshot(server)
    client = drive(parser.parse_args(line))
    disturbed = disturbance.during(before, disturbance.snapshot(server))
    try:
        urllib.request.urlopen(f"{url}/health", timeout=60).close()
    except OSError as error:
        raise OSError(f"the server has not outlived {case!r}: {error}") from error
    single = None
    if spec.own is None:
        body = json.dumps(loads.single_request(case, LOADS[spec.size], seed)).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=240) as reply:
            single = json.load(reply)["choices"][0]
    return read(client, single, case, LOADS[spec.size], spec, disturbed)


def read(
    client: Mapping[str, Any],
    single: Mapping[str, Any] | None,
    case: str,
    load: Load,
    spec: Spec,
    disturbed: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the figures, outputs, counts and problems of a case.

    Args:
        client: the result of `vllm bench serve`.
        single: the reply to a request that was sent alone; None for the user's own traffic.
        case: its name.
        load: the requests.
        spec: says whether texts are compared, and have a word for each token.
        disturbed: of the server's processes.
    """
    texts = [text.strip(" ").split(" ") if text else [] for text in client["generated_texts"]]
    requests = len(client["errors"]) if single is None else load.requests
    counts = {"responses": (client["completed"], requests)}
    packed = {"lengths of the prompts": [[str(length)] for length in client["input_lens"]]}
    if spec.compared:
        packed[TEXTS] = texts
    if single is not None:
        expected = load.requests * load.output
        counts["tokens"] = (client["total_output_tokens"], expected)
        if spec.generated:
            counts["tokens in the texts"] = (sum(map(len, texts)), expected)
        packed["token ids of one request alone"] = [list(map(str, single["token_ids"]))]
        if (top := CASES[case].get("logprobs")) is not None:
            given = single["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
            lines = [
                f"{one!r} {sorted(more.items())!r}"
                for one, more in zip(given["token_logprobs"], given["top_logprobs"], strict=True)
                if one is not None and more and len(more) >= top
            ]
            counts["logprobs of one request"] = (len(lines), load.output)
            packed["logprobs of one request alone"] = [lines]
    problems = [
        f"request {n} failed: {error.strip().splitlines()[-1]}"
        for n, error in enumerate(client["errors"])
        if error
    ][:1]
    # The client or the server's front end had no core to run on. A reply that comes in one piece
    # has no interval, and no time per token.
    whole = client["total_output_tokens"] > client["completed"] and client["median_tpot_ms"] <= 0
    if whole or client["median_itl_ms"] < client["mean_itl_ms"] / 4:
        problems.append("most tokens came in bursts")
    return {
        "figures": {
            **{figure: float(client[key]) for figure, key in FIGURES.items()},
            DISTURBANCE: disturbed,
        },
        "outputs": {kind: outputs.pack(stream) for kind, stream in packed.items()},
        "counts": counts,
        "problems": problems,
    }


if __name__ == "__main__":
    out, argument = Path(sys.argv[1]), json.loads(sys.argv[2])
    if "cores" in argument:
        main(out, Spec(**argument))
    else:
        prepare(Path(argument["model"]), argument["size"])
        out.write_text("{}")
