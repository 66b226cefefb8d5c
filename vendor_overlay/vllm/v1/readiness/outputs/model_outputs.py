"""Feature ``readback``: a step's outputs reach the host by readbacks.

Under synchronous scheduling upstream waits for the sampled token ids, then makes three blocking
copies of the logprobs. With drafts it selects the accepted ids by a mask on the device, and waits
again. After prompt logprobs it waits for the whole device. Here a readback with one event replaces
each of these waits, also for pooling models.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.__init__
# mirrors: vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.get_output
# mirrors: vllm.v1.worker.gpu_model_runner:_copy_pooler_output_to_cpu
# mirrors: vllm.v1.worker.gpu_model_runner:AsyncGPUPoolingModelRunnerOutput.__init__
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_nans_in_logits
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._to_list
# mirrors: vllm.v1.outputs:LogprobsTensors.tolists
# mirrors: vllm.v1.outputs:LogprobsTensors.to_cpu_nonblocking
# mirrors: vllm.v1.outputs:LogprobsTensors.filter
# mirrors: vllm.v1.outputs:RoutedExpertsTensors
# mirrors: vllm.v1.sample.rejection_sampler:RejectionSampler.parse_output

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import LogprobsTensors, RoutedExpertsTensors
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.inputs import uploads
from vllm.v1.readiness.outputs import readback
from vllm.v1.readiness.outputs.history import LAG
from vllm.v1.readiness.outputs.readback import Readbacks

if TYPE_CHECKING:
    from vllm.v1.outputs import PoolerOutput, SamplerOutput
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import (
        AsyncGPUModelRunnerOutput,
        AsyncGPUPoolingModelRunnerOutput,
    )

#: Default of vLLM's max_logprobs.
_LOGPROBS = 20
#: Bytes per position: the sampled token id, the id and value of each logprob, and the rank.
_BYTES = 4 + (_LOGPROBS + 1) * (4 + 4) + 8
#: Buffers under async scheduling, for the steps being computed, returned and settled.
_STEPS = 3
#: Most bytes of an output that share a buffer with its token ids, which :class:`History` keeps.
SMALL = 1 << 16
#: Limit of pinned memory for prompt logprobs, in bytes.
_MOST = 1 << 28


class Outputs:
    """Outputs of one model runner.

    Attributes:
        readbacks: None to use upstream's copies, if the feature is off or the device lacks events.
        pin_memory: whether to pin the sources of uploads.
    """

    def __init__(self, batch: "InputBatch", num_spec_tokens: int, on: bool) -> None:
        self._drafts = num_spec_tokens > 0
        self.readbacks: Readbacks | None = None
        if on and readback.has_events(batch.device):
            self.readbacks = Readbacks(batch.device, most=_MOST)
            if not batch.is_pooling_model:
                positions = batch.max_num_reqs * (1 + num_spec_tokens)
                self.readbacks.least = positions * _BYTES
        self.pin_memory: bool = self.readbacks is not None and batch.pin_memory

    def warm_up(self) -> None:
        """Pin the buffers and compile the kernel."""
        if self.readbacks is not None:
            self.readbacks.warm_up(_STEPS if self._drafts else _STEPS + LAG)

    def show(self, sampled: "SamplerOutput") -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Read back a synchronous step's sampled token ids and logprobs.

        Waits for all work on the current stream, including copies that upstream has started and
        does not wait for. Returns the tensors on the device to fall back to upstream.
        """
        logprobs = sampled.logprobs_tensors
        if self.readbacks is None:
            return sampled.sampled_token_ids, logprobs
        started = self.readbacks.start([sampled.sampled_token_ids, *(logprobs or ())[:3]])
        ids, *parts = started.wait(fences.OUTPUT)
        return ids, _joined(logprobs, parts)

    def start_async(self, output: "AsyncGPUModelRunnerOutput", stream: torch.cuda.Stream) -> bool:
        """Start the readback of an asynchronous ``output``; False to fall back to upstream.

        Tensors on the host, and the event, are assigned to ``output``.
        """
        if self.readbacks is None:
            return False
        logprobs, routed = output._logprobs_tensors, output._routed_experts
        parts = (logprobs or ())[:3]
        others = [*parts, *(routed or ())]
        if sum(tensor.nbytes for tensor in others) > SMALL:
            (ids,), _ = self.readbacks.start([output._sampled_token_ids], stream)
            rest, event = self.readbacks.start(others, stream)
        else:
            (ids, *rest), event = self.readbacks.start([output._sampled_token_ids, *others], stream)
        output.sampled_token_ids_cpu = ids
        output._logprobs_tensors_cpu = _joined(logprobs, rest[: len(parts)])
        output._routed_experts_cpu = routed and RoutedExpertsTensors(*rest[len(parts) :])
        output.async_copy_ready_event = event
        return True

    def start_pooler(
        self,
        output: "AsyncGPUPoolingModelRunnerOutput",
        pooled: "PoolerOutput",
        finished: Sequence[bool],
    ) -> bool:
        """Start the readback of finished requests' pooled outputs; False to fall back to upstream.

        ``pooled`` is [requests, width], or a tensor or None per request. A tensor or None per
        request and the event are assigned to ``output``. The copies run on the current stream,
        because the next step may overwrite the memory of the pooled outputs.
        """
        if self.readbacks is None or len(pooled) != len(finished):
            return False
        rows: list[torch.Tensor | None] = [None] * len(finished)
        if isinstance(pooled, torch.Tensor):
            # Slices are views; indexing by a list of rows would sync.
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

    def empty_prompt_logprobs(self, positions: int, width: int) -> LogprobsTensors:
        """Allocate uninitialised host tensors for a prompt's logprobs, ``width`` per position.

        Beyond the limit of pinned memory, they are pageable, and upstream copies into them.
        """
        shape = (positions, width)
        tensors = self.readbacks and self.readbacks.reserve(
            ((shape, torch.int32), (shape, torch.float32), ((positions,), torch.int32))
        )
        return LogprobsTensors(*tensors) if tensors else LogprobsTensors.empty_cpu(*shape)

    def start_prompt_logprobs(
        self, tensors: LogprobsTensors, rows: slice, *sources: torch.Tensor
    ) -> bool:
        """Start to read back ids, logprobs and ranks into ``rows``; False to fall back."""
        return self.readbacks is not None and self.readbacks.fill(tensors[:3], rows, sources)

    def finish_prompt_logprobs(
        self, finished: Sequence[LogprobsTensors], asynchronous: bool
    ) -> bool:
        """Wait for the logprobs of prompts that end in this step; False to fall back to upstream.

        No wait is needed if ``asynchronous``: these copies complete before those of the outputs.
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
                fences.wait(event, fences.PROMPT_LOGPROBS)
        return True

    def pinned(self, values: Sequence[int]) -> torch.Tensor:
        """Create an int64 host tensor [n], pinned if :attr:`pin_memory`."""
        return uploads.pinned(values, self.pin_memory)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy into upstream's pinned memory; upstream records the event."""
        if self.readbacks is None:
            target.copy_(source, non_blocking=True)
        else:
            self.readbacks.copy(target, source)

    def read_nan_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Read back NaN counts and wait; return ``counts`` to fall back to upstream."""
        if self.readbacks is None:
            return counts
        return self.readbacks.start([counts]).wait(fences.NAN_COUNTS)[0]


def wait(event: torch.Event) -> None:
    """Wait for the event of an asynchronous output."""
    fences.wait(event, fences.OUTPUT)


def _joined(
    logprobs: LogprobsTensors | None, parts: Sequence[torch.Tensor]
) -> LogprobsTensors | None:
    """Return the logprobs with their parts on the host."""
    if logprobs is None:
        return None
    return LogprobsTensors(*parts, logprobs.cu_num_generated_tokens)
