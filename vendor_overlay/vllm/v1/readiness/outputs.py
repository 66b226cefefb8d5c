"""Outputs: what the host is shown of a step, brought there by readback.

Under synchronous scheduling upstream waits for the sampled ids and then copies the logprobs
in three blocking copies; with drafts it picks the accepted ones by a mask on the device,
for which it waits as well; and it ends a prompt's logprobs with a wait for the whole device.
Here each of these is one readback, and one event.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import LogprobsTensors, RoutedExpertsTensors
from vllm.v1.readiness import fences, readback
from vllm.v1.readiness.readback import Readbacks

if TYPE_CHECKING:
    from vllm.v1.outputs import PoolerOutput, SamplerOutput
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import (
        AsyncGPUModelRunnerOutput,
        AsyncGPUPoolingModelRunnerOutput,
    )

#: How many logprobs a request may ask for unless vLLM is told otherwise (max_logprobs).
_LOGPROBS = 20
#: Of one position: the sampled id, each logprob's id and value, the sampled one's rank.
_BYTES = 4 + (_LOGPROBS + 1) * (4 + 4) + 8
#: Under asynchronous scheduling one step computes, one is handed out and one is settled.
_STEPS = 3
#: No more than this much pinned memory for prompt logprobs, in bytes.
_MOST = 1 << 28


class Outputs:
    """What one runner shows the host; None for ``readbacks`` leaves it to upstream.

    Args:
        batch: the runner's; not used unless the feature is on.
        num_spec_tokens: draft tokens a request and step.
        on: whether the feature is.
    """

    def __init__(self, batch: "InputBatch", num_spec_tokens: int, on: bool) -> None:
        self.on = on
        self.readbacks: Readbacks | None = None
        self.pin_memory: bool = on and batch.pin_memory
        if on and readback.has_events(batch.device):
            self.readbacks = Readbacks(batch.device, most=_MOST)
            if not batch.is_pooling_model:
                positions = batch.max_num_reqs * (1 + num_spec_tokens)
                self.readbacks.least = positions * _BYTES

    def warm_up(self) -> None:
        """Pin memory and compile, which would otherwise stall the first requests."""
        if self.readbacks is not None:
            self.readbacks.warm_up(_STEPS)

    def show(self, sampled: "SamplerOutput") -> tuple[torch.Tensor, LogprobsTensors | None]:
        """What a synchronous step has sampled, on the host.

        Waits for all that the current stream has been given: upstream has issued copies of
        its own by now, and counts on this wait to cover them.

        Returns:
            Sampled ids and logprobs; as they are, if upstream is to read them.
        """
        logprobs = sampled.logprobs_tensors
        if self.readbacks is None:
            return sampled.sampled_token_ids, logprobs
        started = self.readbacks.start([sampled.sampled_token_ids, *_parts(logprobs)])
        started.wait("output")
        ids, *parts = started.tensors
        return ids, _joined(logprobs, parts)

    def start_async(self, output: "AsyncGPUModelRunnerOutput", stream: torch.cuda.Stream) -> bool:
        """Start on what an asynchronous step has sampled.

        Args:
            output: gets the host's tensors and the event to wait for.
            stream: for copies that the device's next step need not wait for.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.readbacks is None:
            return False
        logprobs, routed = output._logprobs_tensors, output._routed_experts
        parts = _parts(logprobs)
        tensors = [output._sampled_token_ids, *parts, *(routed or ())]
        started = self.readbacks.start(tensors, stream)
        ids, *rest = started.tensors
        output.sampled_token_ids_cpu = ids
        output._logprobs_tensors_cpu = _joined(logprobs, rest[: len(parts)])
        output._routed_experts_cpu = routed and RoutedExpertsTensors(*rest[len(parts) :])
        output.async_copy_ready_event = started.event
        return True

    def start_pooler(
        self,
        output: "AsyncGPUPoolingModelRunnerOutput",
        pooled: "PoolerOutput",
        finished: Sequence[bool],
    ) -> bool:
        """Start on what a step has pooled, for the requests that have finished.

        The copies lie on the current stream, before the next step: what was pooled may be a
        view of the model's output, which that step overwrites.

        Args:
            output: gets a tensor or None for each request, and the event to wait for.
            pooled: [requests, width], or a tensor or None for each request.
            finished: [requests].

        Returns:
            True if handled here; False to fall back to upstream, which also refuses what does
            not fit.
        """
        if self.readbacks is None or len(pooled) != len(finished):
            return False
        rows: list[torch.Tensor | None] = [None] * len(finished)
        if isinstance(pooled, torch.Tensor):
            # Neighbours travel together; picked by index they would have to wait for it.
            runs = [
                list(run) for done, run in groupby(range(len(rows)), finished.__getitem__) if done
            ]
            started = self.readbacks.start([pooled[run[0] : run[-1] + 1] for run in runs])
            for run, tensor in zip(runs, started.tensors, strict=True):
                rows[run[0] : run[-1] + 1] = tensor
        else:
            wanted = [row for row, done in enumerate(finished) if done and pooled[row] is not None]
            started = self.readbacks.start([pooled[row] for row in wanted])
            for row, tensor in zip(wanted, started.tensors, strict=True):
                rows[row] = tensor
        output._model_runner_output.pooler_output = rows
        output.async_copy_ready_event = started.event
        return True

    def pinned(self, token_ids: list[int]) -> torch.Tensor:
        """A prompt's tokens, int64 on the host, whose upload does not wait for the device."""
        pinned = self.readbacks is not None and self.pin_memory
        return torch.tensor(token_ids, pin_memory=pinned)

    def empty_prompt_logprobs(self, positions: int, width: int) -> LogprobsTensors:
        """Room on the host for a prompt's logprobs.

        Args:
            positions: of the prompt.
            width: logprobs a position.

        Returns:
            Pinned, unless that would be too much; then upstream copies to it. Zeros, with a
            rank that no token has, until a chunk is copied there: positions that came from a
            prefix cache or a KV connector are never computed, and hold nobody else's logprobs.
        """
        shape = (positions, width)
        tensors = self.readbacks and self.readbacks.reserve(
            ((shape, torch.int32), (shape, torch.float32), ((positions,), torch.int32))
        )
        room = LogprobsTensors(*tensors) if tensors else LogprobsTensors.empty_cpu(*shape)
        for tensor in room[:3] if self.on else ():
            tensor.zero_()
        return room

    def start_prompt_logprobs(
        self, tensors: LogprobsTensors, rows: slice, *sources: torch.Tensor
    ) -> bool:
        """Start on the logprobs of one chunk of a prompt.

        Args:
            tensors: of :meth:`empty_prompt_logprobs`.
            rows: the chunk's positions.
            sources: on the device, the chunk's ids, logprobs and ranks.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        return self.readbacks is not None and self.readbacks.fill(tensors[:3], rows, sources)

    def finish_prompt_logprobs(
        self, finished: Sequence[LogprobsTensors], asynchronous: bool
    ) -> bool:
        """Wait for the logprobs of the prompts that end with this step.

        Under asynchronous scheduling nothing waits here: they were started before the
        step's output, and are there when that is.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.readbacks is None:
            return False
        for tensors in finished:
            if not len(tensors.logprobs):
                continue
            event = self.readbacks.event_of(tensors)
            if event is None:
                return False
            if not asynchronous:
                fences.wait(event, "prompt logprobs")
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start one copy into pinned memory of upstream's, which has an event behind it."""
        if self.readbacks is None:
            target.copy_(source, non_blocking=True)
        else:
            self.readbacks.copy(target, source)

    def read(self, tensor: torch.Tensor, owner: str) -> torch.Tensor:
        """One tensor on the host, waited for in the name of ``owner``."""
        if self.readbacks is None:
            return tensor
        started = self.readbacks.start([tensor])
        started.wait(owner)
        return started.tensors[0]


def _parts(logprobs: LogprobsTensors | None) -> list[torch.Tensor]:
    """What has to travel of some logprobs."""
    return [] if logprobs is None else list(logprobs[:3])


def _joined(
    logprobs: LogprobsTensors | None, parts: Sequence[torch.Tensor]
) -> LogprobsTensors | None:
    """The logprobs again, of parts that have travelled."""
    if logprobs is None:
        return None
    return LogprobsTensors(*parts, logprobs.cu_num_generated_tokens)
