"""The host's work for logprobs, from the runner's tensors to the client's outputs, in this process.

    python -m bench.logprob_work OUT LOAD

LOAD is a :class:`Load` as JSON. OUT gets JSON: for each case and side the times of each part, the
pauses of the garbage collector, and a digest of what clients were given.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from demo import model

from bench.compare.installations import in_turn

#: Side to its value of VLLM_READINESS. The first two are alike, and differ by noise alone.
SIDES: Mapping[str, str] = {"off": "-logprobs", "off again": "-logprobs", "on": "on"}
#: The parts of a step. The core slices and writes; the front end reads and processes.
PARTS = ("slice", "write", "read", "process")
TOGETHER = "together"
VOCABULARY = 32000
WARMUP = 16


class Case(NamedTuple):
    """Requests that are alike.

    Attributes:
        logprobs: that each asks for.
        stream: whether clients are given each token as it comes.
        text: whether there is a tokenizer.
    """

    logprobs: int
    stream: bool
    text: bool

    @property
    def name(self) -> str:
        """What a table calls it."""
        kind = "streaming" if self.stream else "at the end"
        return f"{self.logprobs} logprobs, {kind}, {'text' if self.text else 'token ids'}"


class Load(NamedTuple):
    """The size of the measurement.

    Attributes:
        batch: requests at a time.
        steps: that are measured of each case and side.
        output: tokens of a request, after which another takes its place.
        logprobs: numbers of them.
        turn: which side comes first.
    """

    batch: int
    steps: int
    output: int
    logprobs: Sequence[int]
    turn: int = 0

    @property
    def cases(self) -> list[Case]:
        """What is measured."""
        flags = (True, False)
        return [Case(n, stream, text) for n in self.logprobs for stream in flags for text in flags]


class Pauses:
    """Milliseconds of each collection of the oldest generation, and of all collections."""

    def __init__(self) -> None:
        self.oldest: list[float] = []
        self.all = 0.0
        self._start = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Take note; see ``gc.callbacks``."""
        if phase == "start":
            self._start = time.perf_counter()
            return
        spent = (time.perf_counter() - self._start) * 1e3
        self.all += spent
        if info["generation"] == 2:
            self.oldest.append(spent)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count collections within, from a heap without anything of before."""
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self)
        try:
            yield
        finally:
            gc.callbacks.remove(self)
            gc.unfreeze()


class Way:
    """The way of logprobs: an output processor and its requests, an encoder and a decoder."""

    def __init__(self, load: Load, case: Case, tokenizer: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.readiness.frontend import logprob_messages
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.load, self.case = load, case
        self.processor = OutputProcessor(tokenizer if case.text else None, log_stats=False)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._messages = logprob_messages
        logprob_messages.quicken(self.decoder)
        # Requests end one after the other.
        self._left = [1 + (row + 1) * load.output // load.batch for row in range(load.batch)]
        self._digest = hashlib.sha256()
        for row in range(load.batch):
            self._add(row)

    def _add(self, row: int) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        kinds = RequestOutputKind
        params = SamplingParams(
            logprobs=self.case.logprobs,
            detokenize=self.case.text,
            output_kind=kinds.DELTA if self.case.stream else kinds.FINAL_ONLY,
        )
        self.processor.add_request(make_request(str(row), params), "prompt")

    def step(self, number: int) -> list[int]:
        """Take a step; return the nanoseconds of each part."""
        import numpy as np
        import torch
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.outputs import LogprobsTensors

        load, random = self.load, np.random.default_rng(number)
        shape = (load.batch, 1 + self.case.logprobs)
        tensors = LogprobsTensors(
            torch.from_numpy(random.integers(0, VOCABULARY, shape, np.int32)),
            torch.from_numpy(random.standard_normal(shape, np.float32)),
            torch.from_numpy(random.integers(1, 99, load.batch, np.int32)),
        )
        sampled = tensors.logprob_token_ids[:, 0].tolist()
        self._left = [left - 1 for left in self._left]
        ended = [row for row, left in enumerate(self._left) if not left]
        times = [time.perf_counter_ns()]
        lists = tensors.tolists()
        slices = [lists.slice_request(row, 1) for row in range(load.batch)]
        times.append(time.perf_counter_ns())
        outputs = EngineCoreOutputs(
            outputs=[
                EngineCoreOutput(
                    str(row),
                    [sampled[row]],
                    new_logprobs=slices[row],
                    finish_reason=None if self._left[row] else FinishReason.LENGTH,
                )
                for row in range(load.batch)
            ],
            timestamp=1.0,
        )
        start = time.perf_counter_ns()
        message = self.encoder.encode(self._messages.packed(outputs, self.encoder))
        times.append(time.perf_counter_ns())
        written = times[-1] - start
        received = self.decoder.decode(message)
        times.append(time.perf_counter_ns())
        shown = self.processor.process_outputs(received.outputs).request_outputs
        times.append(time.perf_counter_ns())
        if number < WARMUP or ended:
            self._digest.update(repr([one.outputs[0] for one in shown]).encode())
        for row in ended:
            self._left[row] = load.output
            self._add(row)
        sliced, _, read, processed = (b - a for a, b in pairwise(times))
        return [sliced, written, read, processed]

    @property
    def digest(self) -> str:
        """Of some of what clients were given."""
        return self._digest.hexdigest()


def make_request(name: str, params: Any) -> Any:
    """Return an engine core's request, of three prompt tokens and these sampling parameters."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def measure(load: Load, home: Path) -> dict[str, Any]:
    """Measure each case; its sides come by turns."""
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(model.write_tokenizer(home, VOCABULARY)))
    cases = {}
    for number, case in enumerate(load.cases):
        sides = in_turn(load.turn + number, tuple(SIDES))
        measured = {side: _measure(side, load, case, tokenizer) for side in sides}
        cases[case.name] = {side: measured[side] for side in SIDES}
    return {"cases": cases}


def _measure(side: str, load: Load, case: Case, tokenizer: Any) -> dict[str, Any]:
    os.environ["VLLM_READINESS"] = SIDES[side]
    path = Way(load, case, tokenizer)
    for number in range(WARMUP):
        path.step(number)
    pauses = Pauses()
    with pauses.counted():
        laps = [path.step(number) for number in range(WARMUP, WARMUP + load.steps)]
    processor = path.processor.request_states["0"].logprobs_processor
    columns = zip(*((*lap, sum(lap)) for lap in laps), strict=True)
    times = dict(zip((*PARTS, TOGETHER), columns, strict=True))
    return {
        "processor": type(processor).__name__,
        "digest": path.digest,
        "parts": {part: figures(values) for part, values in times.items()},
        "pauses": {
            "count": len(pauses.oldest),
            "longest": max(pauses.oldest, default=0.0),
            "a step": pauses.all / load.steps,
        },
    }


def figures(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Return the median, the 99th percentile and the mean in milliseconds."""
    hundredths = statistics.quantiles(nanoseconds, n=100, method="inclusive")
    mean = statistics.fmean(nanoseconds)
    return {"p50": hundredths[49] / 1e6, "p99": hundredths[98] / 1e6, "mean": mean / 1e6}


if __name__ == "__main__":
    out, load_json = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Load(**json.loads(load_json)), Path(scratch))
    Path(out).write_text(json.dumps(result))
