"""Slots: device state of a feature for each request that uses it.

A request's slot is built from ``token_ids_cpu`` before the first step that samples a token for the
request. Each sampled token then updates the slot on the device, without a wait on the host.

A step is served from slots only if every slot holds its request's whole history. A slot that may
differ from the history is rebuilt: after a truncation, and after a step that fell back to upstream
or was not observed. A request that leaves the batch unfinished (preempted, or in another
micro-batch of a pipeline) keeps its slot, which is reused if the request returns unchanged.
"""

# mirrors: vllm.v1.sample.metadata:SamplingMetadata

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.readiness.engine import gauges, subclasses, switch
from vllm.v1.readiness.feature import Feature, record
from vllm.v1.readiness.inputs.uploads import upload
from vllm.v1.readiness.outputs.history import LiveRows

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.readiness.outputs.history import History
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

logger = init_logger(__name__)


class _KeptSlot(subclasses.Uncopied):
    """Slot of a request that left the batch, and the state of the request at that time."""

    __slots__ = ("__weakref__", "length", "params", "slot")

    def __init__(
        self, slot: torch.Tensor, params: "SamplingParams | None", length: tuple[int, int]
    ) -> None:
        self.slot: torch.Tensor | None = slot  # None once released
        self.params = params  # a new object in each turn of a streaming session
        self.length = length  # number of prompt tokens, and of prompt and output tokens

    def matches(self, request: "CachedRequestState") -> bool:
        """Return whether the request is unchanged since it left."""
        length = (request.num_prompt_tokens, request.num_tokens)
        return self.params is request.sampling_params and self.length == length


class Slots(Feature, ABC):
    """Slots of one batch for one feature.

    Attributes:
        serving: whether slots serve the current step; set by :meth:`prepare` until the step's
            samples are observed.
        capacity: maximum number of requests with a slot.
        kernels: the feature's Triton kernels, which take slots by address; None to use PyTorch.
    """

    name: ClassVar[str]  #: The feature's name, which is also the owner of its fences.

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        self.batch = batch
        limit = switch.slots()
        self.capacity = batch.max_num_reqs if limit is None else min(limit, batch.max_num_reqs)
        self.history = history
        self.vocab_size: int = batch.vocab_size
        self.device: torch.device = batch.device
        self.serving = False
        self.kernels: ModuleType | None = None
        #: Request id to slot; None if the slot must be built before the next step.
        self._slots: dict[str, torch.Tensor | None] = {}
        #: Slots of requests that have left the batch, oldest first. Each is owned by its request's
        #: state object, and is freed when the runner drops that object.
        self._kept: WeakValueDictionary[str, _KeptSlot] = WeakValueDictionary()
        self._exhausted = False
        #: Reason why the newest step fell back to upstream; empty if slots serve it.
        self._left = ""
        gauges.watch(self)
        #: Address of each row's slot; 0 if it has none.
        self._row_addresses = np.zeros(batch.max_num_reqs, np.int64)
        # State of the current step, with the rows of its metadata.
        self._metadata: SamplingMetadata | None = None
        self._count = 0
        self._cached_rows: list[torch.Tensor | None] | None = None
        self._addresses: torch.Tensor | None = None
        self._drafts: SpecDecodeMetadata | None = None
        self._width = self.vocab_size

    @abstractmethod
    def _wants(self, request: "CachedRequestState") -> bool:
        """Return whether a request uses the feature in a supported way."""

    @abstractmethod
    def _can_serve(self, metadata: "SamplingMetadata", width: int) -> bool:
        """Return whether slots support a step with these arguments of :meth:`prepare`."""

    @abstractmethod
    def _build_slot(self, row: int) -> torch.Tensor:
        """Build an int32 slot from a row of ``token_ids_cpu``; may raise OutOfMemoryError."""

    def _build_slots(self, rows: list[int]) -> Iterator[torch.Tensor]:
        """Build the slots of several rows, in order; see :meth:`_build_slot`."""
        return map(self._build_slot, rows)

    @abstractmethod
    def _update_slots(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Update the slots with a step's samples; see :meth:`observe_sampled`."""

    @abstractmethod
    def _describes_rows(self, metadata: "SamplingMetadata") -> bool:
        """Return whether the metadata holds the live batch's values for this feature."""

    @staticmethod
    @abstractmethod
    def _of(live: "LiveBatch") -> "Slots | None":
        """Return the live batch's slots of this class; None if the feature is off."""

    @staticmethod
    @abstractmethod
    def _used(metadata: "SamplingMetadata") -> bool:
        """Return whether any request in the metadata uses the feature."""

    def restore(self, metadata: "SamplingMetadata") -> None:
        """Fill in the fields of the live batch's metadata that only upstream's code reads."""

    @staticmethod
    @abstractmethod
    def _strip(metadata: "SamplingMetadata") -> None:
        """Remove the feature from the metadata, to keep upstream from applying it."""

    @abstractmethod
    def _apply(
        self, logits: torch.Tensor, drafts: "SpecDecodeMetadata | None", per_draft: bool
    ) -> None:
        """Implement :meth:`apply_to_targets` if ``per_draft``, else :meth:`apply`."""

    def apply(self, logits: torch.Tensor, after_drafts: bool) -> None:
        """Apply the feature in place to [requests, vocab]; ``after_drafts`` for bonus logits."""
        self._apply(logits, self._drafts if after_drafts else None, per_draft=False)

    def apply_to_targets(self, logits: torch.Tensor, drafts: "SpecDecodeMetadata") -> None:
        """Apply the feature in place to target logits [drafts of all requests, vocab].

        The tokens before a draft's position include the request's earlier drafts.
        """
        self._apply(logits, drafts, per_draft=True)

    def _kernel_drafts(
        self, drafts: "SpecDecodeMetadata | None", per_draft: bool
    ) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Return a kernel's draft arguments: ids, ends, MODE and positions per request."""
        assert self.kernels is not None
        if drafts is None:
            assert self._addresses is not None
            return self._addresses, self._addresses, self.kernels.NO_DRAFTS, 1  # ids are not read
        ids, ends = drafts.draft_token_ids, drafts.cu_num_draft_tokens
        if per_draft:
            return ids, ends, self.kernels.TARGET, drafts.max_spec_len
        return ids, ends, self.kernels.BONUS, 1

    def warm_up(self) -> None:
        """Compile and load the kernels."""
        if self.kernels is None:
            return
        zeros = torch.zeros(1, dtype=torch.float32, device=self.device)
        logits = zeros.new_zeros((1, self.vocab_size))
        ids = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        drafts = SimpleNamespace(draft_token_ids=ids, cu_num_draft_tokens=ids, max_spec_len=1)
        self._addresses = zeros.long()
        self._apply(logits, None, per_draft=False)
        self._apply(logits, drafts, per_draft=True)
        self._apply(logits, drafts, per_draft=False)
        self._update_slots(ids, zeros.bool())
        self._forget_rows()

    @classmethod
    def take(
        cls,
        metadata: "SamplingMetadata",
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None" = None,
    ) -> "tuple[Slots | None, SamplingMetadata]":
        """Take over the feature from upstream's sampler if slots serve this step.

        Otherwise settle the output lists, because upstream's code reads them. ``logits`` is
        [positions, vocab], with one position per draft, or per request if ``drafts`` is None.

        Returns:
            The slots to apply and a copy of the metadata without the feature; None and ``metadata``
            to fall back to upstream.
        """
        rows = metadata.output_token_ids
        live = rows.live if isinstance(rows, LiveRows) else None
        if live is None or not cls._used(metadata):
            return None, metadata
        slots = cls._of(live)
        if slots is None or not slots.recognises(metadata, logits, drafts):
            if slots is not None:
                gauges.fall_back(cls.name, slots._left or gauges.OTHER_INPUT)
                slots.restore(metadata)
            live.settle_all(cls.name)
            return None, metadata
        stripped = copy.copy(metadata)
        cls._strip(stripped)
        return slots, stripped

    def recognises(
        self,
        metadata: "SamplingMetadata",
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None",
    ) -> bool:
        """Return whether the slots serve these arguments of :meth:`take`."""
        positions = self._count if drafts is None else len(drafts.draft_token_ids)
        return (
            self.serving
            and self._describes_rows(metadata)
            and logits.shape == (positions, self._width)
            and logits.device.type == self.device.type
        )

    def add_request(self, request: "CachedRequestState") -> None:
        """Reuse the request's kept slot, or mark the request to get a new one."""
        kept = record(request).kept.pop(self.name, None)
        slot = None
        if self._wants(request):
            mine = kept is not None and self._kept.pop(request.req_id, None) is kept
            slot = kept.slot if mine and kept is not None and kept.matches(request) else None
            del kept
            self._slots[request.req_id] = slot
            self._trim_kept()
        self._set_address(request.req_id, slot)

    def move_row(self, source: int, target: int) -> None:
        """Move the address of a row's slot to another row."""
        self._row_addresses[target] = self._row_addresses[source]

    def swap_rows(self, one: int, other: int) -> None:
        """Swap the addresses of two rows' slots."""
        self._row_addresses[[one, other]] = self._row_addresses[[other, one]]

    @property
    def _rows(self) -> list[torch.Tensor | None]:
        """Slot of each row, for PyTorch."""
        if self._cached_rows is None:
            self._cached_rows = [self._slots.get(req_id) for req_id in self.batch.req_ids]
        return self._cached_rows

    def _set_address(self, req_id: str, slot: torch.Tensor | None) -> None:
        row = self.batch.req_id_to_index[req_id]
        self._row_addresses[row] = 0 if slot is None else slot.data_ptr()

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Keep the request's slot for its return, unless drafts are in flight.

        With drafts in flight, the host does not know which tokens the slot includes.
        """
        req_id = request.req_id
        if req_id not in self._slots:
            return
        self._exhausted = False  # there may be room now
        slot = self._slots.pop(req_id)
        if slot is not None and not self.serving and not self.history.drafted:
            batch = self.batch
            length = (int(batch.num_prompt_tokens[row]), int(batch.num_tokens_no_spec[row]))
            kept = _KeptSlot(slot, request.sampling_params, length)
            record(request).kept[self.name] = self._kept[req_id] = kept
            self._trim_kept()

    def idle(self) -> None:
        """Release all device memory."""
        self._forget_rows()
        self._release()

    def held(self) -> Iterator[gauges.Value]:
        """Yield the number of built slots and the device memory allocated for slots."""
        filled = sum(slot is not None for slot in list(self._slots.values()))
        yield gauges.Value(gauges.SLOTS, (self.name,), filled)
        yield gauges.Value(gauges.SLOT_BYTES, (self.name,), self._allocated())

    def _allocated(self) -> int:
        """Return the bytes of device memory allocated for slots, in use or not."""
        return sum(slot.nbytes for slot in list(self._slots.values()) if slot is not None)

    def _trim_kept(self, most: int | None = None) -> None:
        """Release the oldest kept slots beyond ``most`` (default: the unused capacity)."""
        most = self.capacity - len(self._slots) if most is None else most
        while len(self._kept) > max(0, most):
            self._kept.pop(next(iter(self._kept))).slot = None

    def _release(self) -> None:
        """Free device memory that no slot uses."""

    @property
    def complete(self) -> bool:
        """True if every request that needs a slot has one."""
        return all(slot is not None for slot in self._slots.values())

    def cut(self, req_id: str, length: int) -> None:
        """Mark the slot for rebuilding if the truncation may lose a sampled token."""
        if self._slots.get(req_id) is not None and self.history.loses_tokens(
            req_id, length, self.name
        ):
            self._slots[req_id] = None

    def prepare(
        self, metadata: "SamplingMetadata", width: int, drafts: "SpecDecodeMetadata | None"
    ) -> None:
        """Prepare the slots for a step, or fall back to upstream; set :attr:`serving`.

        ``metadata`` is the live batch's; it is replaced whenever a row moves. The logits have
        ``width`` columns.
        """
        if self.serving:
            logger.warning_once(
                "Readiness overlay: this model runner overrides sample_tokens. The state of %s is "
                "rebuilt on every step, and the host waits for the device each time.",
                self.name,
            )
            self.leave_step()
        served = self._can_serve(metadata, width)
        self._left = self._fill_slots() if served else gauges.OTHER_INPUT
        if self._left:
            self.leave_step()
            return
        self.serving = True
        self._drafts = drafts
        if metadata is not self._metadata or width != self._width:
            self._width = width
            self._look_up(metadata)

    def observe_sampled(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Update the slots with the sampled tokens."""
        if not self.serving:
            self.leave_step()
            return
        self.serving = False
        self._update_slots(sampled, discarded)

    def leave_step(self) -> None:
        """Leave the step to upstream, and mark all slots for rebuilding."""
        if not (self._slots or self._count or self.serving):
            return
        self._forget_rows()
        self._slots = dict.fromkeys(self._slots)
        if self._exhausted:
            self._release()

    def _look_up(self, metadata: "SamplingMetadata") -> None:
        self._count = self.batch.num_reqs
        self._cached_rows = None
        if self.kernels is not None:
            self._addresses = self._staged(self._row_addresses[: self._count], torch.int64)
        self._metadata = metadata

    def _forget_rows(self) -> None:
        """Reset the state of the current step."""
        self.serving = False
        self._metadata = None
        self._count = 0
        self._cached_rows = None
        self._addresses = None
        self._drafts = None

    def _fill_slots(self) -> str:
        """Build the missing slots; return the reason for a failure, else an empty string."""
        if self.complete:
            return ""
        waiting = [req_id for req_id, slot in self._slots.items() if slot is None]
        if len(self._slots) > self.capacity:
            logger.warning_once(
                "Readiness overlay: more than %d requests use %s (limited by %s). Falling back to "
                "vLLM: the host waits on every step.",
                *(self.capacity, self.name, switch.SLOTS),
            )
            return gauges.NO_SLOT
        if self._exhausted:
            return gauges.NO_ROOM
        self._forget_rows()
        rows = [self.batch.req_id_to_index[req_id] for req_id in waiting]
        self.history.settle_rows(rows, self.name)
        try:
            for req_id, row, slot in zip(waiting, rows, self._build_slots(rows), strict=True):
                self._slots[req_id] = slot
                self._row_addresses[row] = slot.data_ptr()
        except torch.OutOfMemoryError:
            if self._kept:
                self._trim_kept(0)
                return self._fill_slots()
            # Do not retry until a request with a slot has left.
            self._exhausted = True
            self._warn_no_room()
            return gauges.NO_ROOM
        return ""

    def _warn_no_room(self) -> None:
        logger.warning_once(
            "Readiness overlay: the device has no memory left for the %s of %d requests. Falling "
            "back to vLLM: the host waits on every step. Lower gpu_memory_utilization or "
            "max_num_seqs.",
            *(self.name, len(self._slots) or self.capacity),
        )

    def _staged(self, values: "np.ndarray", dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return upload(values, dtype, self.device, pin_memory=self.batch.pin_memory)


def row_stride(logits: torch.Tensor) -> int:
    """Return the row stride of logits [rows, vocab] for a kernel.

    The stride of a single row is arbitrary, and could make Triton compile another variant.
    """
    stride: int = logits.stride(0) if len(logits) > 1 else logits.shape[1]
    return stride
