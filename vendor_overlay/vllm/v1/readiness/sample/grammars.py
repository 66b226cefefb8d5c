"""Feature ``grammars``: a step sends only masks of rows with a grammar, without a wait.

The scheduler sends the runner a bitmask per position with a grammar, 19 KB for a vocabulary of
151,936. Upstream builds a bitmask for every row of the batch, although most may allow every token,
and copies all of them from pageable memory. CUDA then blocks the host until the device has finished
all earlier work, including the forward pass, which delays the preparation of the next step.

Here only the scheduler's bitmasks and their row indices are written to pinned memory, and one
non-blocking copy sends them. The device scatters the bitmasks to their rows unless every row has
one. xgrammar's kernel is called for the same rows as in upstream.
"""

# mirrors: vllm.v1.structured_output.utils:apply_grammar_bitmask

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.utils.math_utils import round_up
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.outputs import readback

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

#: Initial number of buffers: the number of steps that may be in flight. More are added on demand.
_BUFFERS = 2
#: Minimum size of a buffer in bytes, unless the batch can never need as much.
_LEAST = 4 << 20
#: Alignment of a buffer's parts in words, as Triton's kernels assume.
_ALIGNMENT = 4


class Grammars(Feature):
    """Grammar bitmasks of one batch."""

    def __init__(self, batch: "InputBatch", num_spec_tokens: int) -> None:
        super().__init__(batch)
        self._positions = 1 + num_spec_tokens
        #: Requests of the batch that have a grammar.
        self._names: set[str] = set()
        #: Capacity of a buffer in masks, and its size in words.
        self._room = self._size = 0
        self._buffers: list[readback.Buffer] = []
        gauges.watch(self)

    def held(self) -> Iterator[gauges.Value]:
        """Yield the pinned memory of the buffers."""
        pinned = sum(buffer.memory.nbytes for buffer in list(self._buffers))
        yield gauges.Value(gauges.PINNED_BYTES, (registry.GRAMMARS,), pinned)

    def add_request(self, request: "CachedRequestState") -> None:
        """Replace the buffers by larger ones if the masks of all requests no longer fit."""
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return
        self._names.add(request.req_id)
        masks = len(self._names) * self._positions
        if masks > self._room:
            words = -(-self.batch.vocab_size // 32)
            most = self.batch.max_num_reqs * self._positions
            self._room = min(max(masks, 2 * self._room, _LEAST // (4 * words)), most)
            self._size = sum(_sections(self._room, words))
            # torch keeps the memory of smaller buffers until copies from it have completed.
            self._buffers = [readback.Buffer(4 * self._size) for _ in range(_BUFFERS)]

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Stop tracking the request."""
        del row
        self._names.discard(request.req_id)

    def apply_grammars(
        self, scheduled: "SchedulerOutput", grammars: "GrammarOutput", logits: torch.Tensor
    ) -> bool:
        """Mask the logits like ``apply_grammar_bitmask``; return False to fall back to it."""
        masks = grammars.grammar_bitmask
        if (
            logits.device.type != self.batch.device.type
            or not isinstance(masks, np.ndarray)
            or masks.dtype != np.int32
            or masks.ndim != 2
        ):
            return False
        sources, targets = _match(
            self.batch,
            grammars.structured_output_request_ids,
            scheduled.scheduled_spec_decode_tokens,
        )
        if not len(targets):
            return True
        positions = len(logits)
        if targets.max() >= positions or sources.max() >= len(masks):
            return False  # upstream raises the error
        # Imported from upstream's module, in case that module's library has been replaced.
        from vllm.v1.structured_output.utils import xgr

        if len(targets) == positions:
            sources = sources[np.argsort(targets)]
            bitmask = self._send(masks, sources).masks
            xgr.apply_token_bitmask_inplace(logits, bitmask, indices=None)
            return True
        sent = self._send(masks, sources, targets)
        bitmask = sent.masks.new_empty(positions, masks.shape[1])
        bitmask.index_copy_(0, sent.rows, sent.masks)
        xgr.apply_token_bitmask_inplace(logits, bitmask, indices=sent.indices)
        return True

    def _send(
        self, masks: np.ndarray, sources: np.ndarray, targets: np.ndarray | None = None
    ) -> "_Parts":
        """Send the masks with indices ``sources`` [n], and their rows ``targets`` [n] if given."""
        sections = _sections(len(sources), masks.shape[1])
        size = sum(sections)
        begin = size - sections[-1] if targets is None else 0
        buffer = self._take(size)
        host = buffer.memory.view(torch.int32)[:size]
        parts = _split(host, sections, len(sources))
        if targets is not None:
            parts.rows.numpy()[:] = targets
            parts.indices.numpy()[:] = targets
        np.take(masks, sources, axis=0, out=parts.masks.numpy(), mode="clip")
        sent = torch.empty(size, dtype=torch.int32, device=self.batch.device)
        sent[begin:].copy_(host[begin:], non_blocking=True)
        buffer.mark_copied()
        return _split(sent, sections, len(sources))

    def _take(self, size: int) -> readback.Buffer:
        """Return a buffer of at least ``size`` words, without a copy in flight."""
        for buffer in self._buffers:
            if len(buffer.memory) >= 4 * size and buffer.arrived():
                return buffer
        buffer = readback.Buffer(4 * max(size, self._size))
        self._buffers.append(buffer)
        return buffer


class _Parts(NamedTuple):
    """Bitmasks of n rows of the logits, and the indices of these rows."""

    rows: torch.Tensor  # int64 [n]
    indices: torch.Tensor  # int32 [n], equal to ``rows``; xgrammar needs int32
    masks: torch.Tensor  # int32 [n, words]


def _sections(count: int, words: int) -> list[int]:
    """Return the padded size of each part of ``_Parts``, in words of 4 bytes."""
    return [round_up(2 * count, _ALIGNMENT), round_up(count, _ALIGNMENT), count * words]


def _split(memory: torch.Tensor, sections: list[int], count: int) -> _Parts:
    rows, indices, masks = memory.split(sections)
    return _Parts(rows[: 2 * count].view(torch.int64), indices[:count], masks.view(count, -1))


def _match(
    batch: "InputBatch", names: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Match masks with rows of the logits; return the mask indices and the row of each.

    A request has 1 + drafts rows and, if it is in ``names``, as many masks. Masks of requests that
    have left the batch are skipped.
    """
    rows = np.fromiter(map(batch.req_id_to_index.get, names, repeat(-1)), np.int64, len(names))
    if not drafts:
        sources = np.flatnonzero(rows >= 0)
        return sources, rows[sources]
    lengths = np.array([1 + len(drafts.get(name, ())) for name in batch.req_ids])
    counts = np.array([1 + len(drafts.get(name, ())) for name in names], np.int64)
    ends = counts.cumsum()
    # Difference between a request's first row of the logits and its first mask.
    shifts = lengths.cumsum()[rows] - lengths[rows] - (ends - counts)
    sources = np.flatnonzero(np.repeat(rows >= 0, counts))
    return sources, sources + np.repeat(shifts, counts)[sources]
