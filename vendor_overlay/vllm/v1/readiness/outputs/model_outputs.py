"""Feature ``readback``: the outputs that the host is shown, brought there by readbacks.

Under synchronous scheduling upstream waits for the sampled ids and then makes three blocking
copies of the logprobs; with drafts it picks the accepted ones by a mask on the device, for
which it waits as well; and it ends a prompt's logprobs with a wait for the whole device. Here
each of these is one readback with one event.

This is the second door of the seams, beside :mod:`~vllm.v1.readiness.live`: it serves the
model runner itself, also for pooling models, and decoding depends on none of it.
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
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.inputs import uploads
from vllm.v1.readiness.outputs import readback
from vllm.v1.readiness.outputs.history import LAG
from vllm.v1.readiness.outputs.readback import Readbacks

if TYPE_CHECKING:
    from vllm.v1.outputs import PoolerOutput, SamplerOutput
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import (
        AsyncGPUModelRunnerOutput,
        AsyncGPUPoolingModelRunnerOutput,
    )

#: Default of vLLM's max_logprobs: how many logprobs a request may ask for.
_LOGPROBS = 20
#: Bytes of one position: the sampled id, the id and value of each logprob, and a rank.
_BYTES = 4 + (_LOGPROBS + 1) * (4 + 4) + 8
#: Async scheduling: one step is computed, one is handed out and one is settled.
_STEPS = 3
#: Limit of pinned memory for prompt logprobs, in bytes.
_MOST = 1 << 28


class Outputs(Feature):
    """The outputs of one model runner.

    Args:
        batch: the runner's; not used if the feature is off.
        num_spec_tokens: draft tokens a request and step.
        on: whether the feature is on.

    Attributes:
        readbacks: None if the feature is off, or the platform has no events or pinned
            memory. Upstream's copies are made then.
        pin_memory: whether uploads are to be pinned.
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

    pooling = True

    @classmethod
    def make(cls, live: "LiveBatch") -> "Outputs":
        """Make the outputs of a batch's runner."""
        return cls(live.batch, live.num_spec_tokens, True)

    def warm_up(self) -> None:
        """Pin memory and compile kernels, which would otherwise stall the first requests."""
        if self.readbacks is not None:
            self.readbacks.warm_up(_STEPS if self._drafts else _STEPS + LAG)

    def show(self, sampled: "SamplerOutput") -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Bring the samples of a synchronous step to the host.

        Waits for all work on the current stream: upstream has issued copies of its own by
        now, and relies on this wait to cover them.

        Returns:
            Sampled ids and logprobs; unchanged to fall back to upstream.
        """
        logprobs = sampled.logprobs_tensors
        if self.readbacks is None:
            return sampled.sampled_token_ids, logprobs
        started = self.readbacks.start([sampled.sampled_token_ids, *_parts(logprobs)])
        ids, *parts = started.wait(fences.OUTPUT)
        return ids, _joined(logprobs, parts)

    def start_async(self, output: "AsyncGPUModelRunnerOutput", stream: torch.cuda.Stream) -> bool:
        """Start the readback of an asynchronous step's samples.

        Args:
            output: is given the tensors on the host and the event to wait for.
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
        """Start the readback of a step's pooled outputs, for the requests that have finished.

        The copies are on the current stream, ahead of the next step: a pooled output may be a
        view of the model's output, which that step overwrites.

        Args:
            output: is given a tensor or None for each request, and the event to wait for.
            pooled: [requests, width], or a tensor or None for each request.
            finished: [requests].

        Returns:
            True if handled here; False to fall back to upstream, which also rejects outputs
            that do not match the mask.
        """
        if self.readbacks is None or len(pooled) != len(finished):
            return False
        rows: list[torch.Tensor | None] = [None] * len(finished)
        if isinstance(pooled, torch.Tensor):
            # Runs of neighbours are views; picking rows by index would wait for the index.
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
        """Allocate room on the host for a prompt's logprobs.

        Args:
            positions: number of the prompt's positions.
            width: logprobs a position.

        Returns:
            Pinned tensors, or pageable ones beyond the limit, to which upstream's code copies.
            They hold anything until a chunk is copied there, as upstream's do.
        """
        shape = (positions, width)
        tensors = self.readbacks and self.readbacks.reserve(
            ((shape, torch.int32), (shape, torch.float32), ((positions,), torch.int32))
        )
        return LogprobsTensors(*tensors) if tensors else LogprobsTensors.empty_cpu(*shape)

    def start_prompt_logprobs(
        self, tensors: LogprobsTensors, rows: slice, *sources: torch.Tensor
    ) -> bool:
        """Start the readback of one chunk of a prompt's logprobs.

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

        Under async scheduling nothing waits here: these copies were started before the
        step's output, and are complete when that is.

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
                fences.wait(event, fences.PROMPT_LOGPROBS)
        return True

    def pinned(self, values: Sequence[int]) -> torch.Tensor:
        """Make an int64 tensor [n] on the host, pinned where uploads are to be pinned."""
        return uploads.pinned(values, self.pin_memory)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy into pinned memory of upstream's, which records an event behind it."""
        if self.readbacks is None:
            target.copy_(source, non_blocking=True)
        else:
            self.readbacks.copy(target, source)

    def read_nan_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Bring NaN counts to the host and wait for them; unchanged to fall back to upstream."""
        if self.readbacks is None:
            return counts
        return self.readbacks.start([counts]).wait(fences.NAN_COUNTS)[0]


def wait(event: torch.Event) -> None:
    """Wait for the event behind an asynchronous output."""
    fences.wait(event, fences.OUTPUT)


def _parts(logprobs: LogprobsTensors | None) -> list[torch.Tensor]:
    """Return the tensors of logprobs that are on the device."""
    return [] if logprobs is None else list(logprobs[:3])


def _joined(
    logprobs: LogprobsTensors | None, parts: Sequence[torch.Tensor]
) -> LogprobsTensors | None:
    """Put logprobs together again from the parts that were read back."""
    if logprobs is None:
        return None
    return LogprobsTensors(*parts, logprobs.cu_num_generated_tokens)
