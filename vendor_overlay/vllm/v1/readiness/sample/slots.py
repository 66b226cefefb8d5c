"""Slots: device state of a feature for each request that uses it.

A request has a slot by its id while it is in the batch, whichever row it has. A step is served from
slots only if each holds its request's whole history.

**The path of a slot**, of a penalty. Upstream's functions, in brackets, call the live batch.

1. :meth:`Slots.add_request` (``InputBatch.add_request``) takes back the slot that a request has
   kept (6), or marks it as missing.
2. :meth:`Slots.begin_sampling` (``_sample``) builds missing slots from the history on the host
   (:meth:`Penalties.build`). If a slot was built, or the batch has changed, it sends the addresses
   in order of rows (:meth:`Slots.send_addresses`): a row that moves needs no more. A step that
   slots cannot serve is left to upstream: all slots are missing (:meth:`Slots.leave_step`), and
   :meth:`Penalties.restore` fills in what upstream reads.
3. :meth:`Slots.take` (the samplers) returns the slots if they serve these logits, for
   :meth:`Penalties.apply`. If not, upstream's code runs; slots that serve the step stay valid.
4. :meth:`Slots.observe_sampled` (``sample_tokens``) adds the sampled tokens on the device, without
   a wait on the host (:meth:`Penalties.update`).
5. :meth:`Slots.cut` (``_update_states``) marks a truncated request's slot as missing, if it may
   include a token that is lost.
6. :meth:`Slots.remove_request` (``InputBatch.remove_request``) keeps the slot with the request's
   state, unless a step is half done, or drafts are in flight that the host does not know. A request
   that was preempted, or left out of steps, takes it back if it is unchanged, and others have not
   needed the room. With the state of one that has ended it is freed (:meth:`SlotMemory.allocate`).
"""

# mirrors: vllm.v1.sample.metadata:SamplingMetadata

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.readiness.engine import gauges, subclasses, switch
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.inputs import records
from vllm.v1.readiness.inputs.uploads import upload
from vllm.v1.readiness.outputs.history import OutputLists

if TYPE_CHECKING:
    from typing_extensions import Self
    from vllm.sampling_params import SamplingParams
    from vllm.v1.readiness.outputs.history import History
    from vllm.v1.readiness.sample.slot_memory import SlotMemory
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

logger = init_logger(__name__)


@dataclass(eq=False)
class Slot(subclasses.Uncopied):
    """Slot of one request, and if it has left the batch, the state of the request at that time."""

    tensor: torch.Tensor | None  # None once released
    address: int
    params: "SamplingParams | None" = None  # a new object in each turn of a streaming session
    length: tuple[int, int] = (0, 0)  # number of prompt tokens, and of prompt and output tokens


class Slots(Feature, ABC):
    """Slots of one batch for one feature, which derives from this class."""

    name: ClassVar[str]  #: The feature's name, which is also the owner of its fences.
    #: Fields of the sampling metadata with the feature's values.
    fields: ClassVar[tuple[str, ...]]
    #: Field of the sampling metadata, and its value in a batch that does not use the feature.
    unused: ClassVar[tuple[str, Any]]

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        super().__init__(batch)
        self.history = history
        self.vocab_size: int = batch.vocab_size
        self.device: torch.device = batch.device
        limit = switch.slots()
        #: Most requests with a slot.
        self.capacity = batch.max_num_reqs if limit is None else min(limit, batch.max_num_reqs)
        self.memory: SlotMemory | None = None  #: None to allocate each slot alone.
        #: Whether Triton kernels serve the device. PyTorch serves others (CPU, ROCm, XPU).
        self.kernels = HAS_TRITON and current_platform.is_cuda()
        #: Request id to slot; None if the slot must be built before the next step.
        self._slots: dict[str, Slot | None] = {}
        #: Slots of requests that have left the batch, oldest first; their states own them.
        self._kept: WeakValueDictionary[str, Slot] = WeakValueDictionary()
        self._exhausted = False
        #: Whether slots serve the step, from the beginning of its sampling until its end.
        self.serving = False
        #: Why not, for the count of fallbacks; a runner's class may not begin the sampling.
        self._reason = gauges.OTHER_CLASS
        self.values: list[Any] = []  #: The step's values of :attr:`fields`.
        self.width = self.vocab_size  #: Number of columns of the step's logits.
        self.drafts: SpecDecodeMetadata | None = None
        #: Address of each row's slot, int64 [requests], 0 if it has none. For kernels.
        self.addresses = torch.empty(0, dtype=torch.int64)
        self._metadata: SamplingMetadata | None = None
        gauges.watch(self)

    def warm_up(self) -> None:
        """Compile and load the kernels of a step, which has one request without a slot."""
        if not self.kernels:
            return
        zeros = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        logits = zeros.new_zeros((1, self.vocab_size), dtype=torch.float32)
        drafts = SimpleNamespace(draft_token_ids=zeros, cu_num_draft_tokens=zeros, max_spec_len=1)
        self.serving, self.drafts, self.addresses = True, drafts, zeros[0].long()
        self.values = [zeros[0].float()] * len(self.fields)
        self.apply(logits, None, per_draft=False)
        self.apply(logits, drafts, per_draft=False)
        self.apply(logits, drafts, per_draft=True)
        self.observe_sampled(zeros, zeros[0].bool())
        self._forget_step()

    # A request is added

    @abstractmethod
    def wanted(self, request: "CachedRequestState") -> bool:
        """Return whether a request uses the feature, and may have a slot."""

    def add_request(self, request: "CachedRequestState") -> None:
        """Take back the request's kept slot, or mark it as missing, if the feature is wanted."""
        req_id, slot = request.req_id, None
        kept = (of_request := records.of(request).kept).get(self.name)
        # A slot of this batch? A copy of a request shares its record, and may join another batch.
        if kept is not None and self._kept.get(req_id) is kept:
            del of_request[self.name], self._kept[req_id]
            length = (request.num_prompt_tokens, request.num_tokens)
            if kept.params is request.sampling_params and kept.length == length:
                slot = kept
        if self.wanted(request):
            self._slots[req_id] = slot
            self._trim_kept(self.capacity - len(self._slots))

    # A step is sampled

    @abstractmethod
    def supports(self, metadata: "SamplingMetadata", width: int) -> bool:
        """Return whether a step uses the feature, with ``width`` columns that slots support."""

    @abstractmethod
    def build(self, rows: list[int]) -> list[torch.Tensor]:
        """Build the int32 slots of rows. May raise torch.OutOfMemoryError."""

    def begin_sampling(
        self, metadata: "SamplingMetadata", width: int, drafts: "SpecDecodeMetadata | None"
    ) -> None:
        """Build the missing slots, and serve the step from slots, or leave it to upstream.

        ``metadata`` belongs to the live batch. ``width`` is the number of columns of the logits.
        """
        if self.serving:
            logger.warning_once(
                "Readiness overlay: this model runner overrides sample_tokens. The state of %s is "
                "rebuilt on every step, and the host waits for the device each time.",
                self.name,
            )
            self.leave_step(gauges.OTHER_CLASS)
        reason = self._build_missing() if self.supports(metadata, width) else gauges.OTHER_INPUT
        if reason:
            self.leave_step(reason)
            return
        self.serving, self._reason = True, gauges.OTHER_CLASS
        self.drafts = drafts
        self.values = [getattr(metadata, field) for field in self.fields]
        if metadata is not self._metadata or width != self.width:  # rows or slots have changed
            self._metadata, self.width = metadata, width
            self.send_addresses()

    def send_addresses(self) -> None:
        """Send the address of each row's slot to the device."""
        if self.kernels:
            slots = map(self._slots.get, self.batch.req_ids)
            addresses = [0 if slot is None else slot.address for slot in slots]
            self.addresses = self.send(np.array(addresses, np.int64))

    def _build_missing(self) -> str:
        """Build the missing slots; return the reason for a failure, else an empty string."""
        missing = [req_id for req_id, slot in self._slots.items() if slot is None]
        if not missing:
            return ""
        if len(self._slots) > self.capacity:
            logger.warning_once(
                "Readiness overlay: more than %d requests use %s (limited by %s). Falling back to "
                "vLLM: the host waits on every step.",
                *(self.capacity, self.name, switch.SLOTS),
            )
            return gauges.NO_SLOT
        if self._exhausted:
            return gauges.NO_ROOM
        self._forget_step()  # and with it the metadata: addresses change
        rows = [self.batch.req_id_to_index[req_id] for req_id in missing]
        self.history.settle_rows(rows, self.name)
        while True:
            try:
                for req_id, tensor in zip(missing, self.build(rows), strict=True):
                    self._slots[req_id] = Slot(tensor, tensor.data_ptr())
                return ""
            except torch.OutOfMemoryError:
                if not self._kept:
                    break
            self._trim_kept(0)
        # Do not retry until a request that may have a slot has left.
        self._exhausted = True
        self.warn_no_room()
        return gauges.NO_ROOM

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the tensor of each row's slot."""
        slots = map(self._slots.get, self.batch.req_ids)
        return [None if slot is None else slot.tensor for slot in slots]

    @classmethod
    def take(
        cls,
        metadata: "SamplingMetadata",
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None" = None,
    ) -> "tuple[Self | None, SamplingMetadata]":
        """Take over the feature from upstream's sampler if slots serve this step.

        ``logits`` is [positions, vocab], with one position per draft, or per request if ``drafts``
        is None. Returns the slots to apply, and a copy of the metadata without the feature. To fall
        back, settles the output lists, which upstream's code reads, and returns None and
        ``metadata``.
        """
        lists = metadata.output_token_ids
        live = lists.live if isinstance(lists, OutputLists) else None
        field, unused = cls.unused
        if live is None or bool(getattr(metadata, field)) == bool(unused):
            return None, metadata
        slots = next((slots for slots in live.slots if isinstance(slots, cls)), None)
        if slots is not None:
            positions = live.batch.num_reqs if drafts is None else len(drafts.draft_token_ids)
            values = [getattr(metadata, field) for field in cls.fields]
            if (
                slots.serving
                and all(map(is_, values, slots.values))
                and logits.shape == (positions, slots.width)
                and logits.device.type == slots.device.type
            ):
                stripped = copy.copy(metadata)
                setattr(stripped, field, copy.copy(unused))
                return slots, stripped
            gauges.fall_back(cls.name, gauges.OTHER_INPUT if slots.serving else slots._reason)
            slots.restore(metadata)
        live.settle_all(cls.name)
        return None, metadata

    def restore(self, metadata: "SamplingMetadata") -> None:
        """Fill in the fields of the live batch's metadata that only upstream's code reads."""

    @abstractmethod
    def apply(
        self, logits: torch.Tensor, drafts: "SpecDecodeMetadata | None", per_draft: bool
    ) -> None:
        """Apply the feature in place to the logits of each draft, or behind all of a request's."""

    @abstractmethod
    def update(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Update the slots with a step's samples; see :meth:`LiveBatch.observe_sampled`."""

    def observe_sampled(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Update the slots, or mark them as missing if they did not serve the step."""
        if self.serving:
            self.serving = False
            self.update(sampled, discarded)
        else:
            self.leave_step(gauges.OTHER_CLASS)

    def leave_step(self, reason: str) -> None:
        """Leave the step to upstream, and mark all slots as missing."""
        self._forget_step()
        self._slots = dict.fromkeys(self._slots)
        if self._exhausted:
            self.idle()
        self._reason = reason

    def _forget_step(self) -> None:
        self.serving = False
        self.values = []
        self.drafts = self._metadata = None

    # A request is cut or leaves the batch

    def cut(self, req_id: str, length: int) -> None:
        """Mark the slot as missing if the truncation may lose a token. May wait for tokens."""
        if self._slots.get(req_id) is not None and self.history.loses_tokens(
            req_id, length, self.name
        ):
            self._slots[req_id] = None

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Keep the request's slot, unless a step is half done or drafts are in flight."""
        req_id = request.req_id
        if req_id not in self._slots:
            return
        self._exhausted = False  # there may be room now
        slot = self._slots.pop(req_id)
        if slot is not None and not self.serving and not self.history.drafted:
            batch = self.batch
            length = (int(batch.num_prompt_tokens[row]), int(batch.num_tokens_no_spec[row]))
            slot.params, slot.length = request.sampling_params, length
            records.of(request).kept[self.name] = self._kept[req_id] = slot
            self._trim_kept(self.capacity - len(self._slots))

    def _trim_kept(self, most: int) -> None:
        """Release the oldest kept slots beyond ``most``."""
        while len(self._kept) > max(0, most):
            self._kept.pop(next(iter(self._kept))).tensor = None

    def idle(self) -> None:
        """Release the device memory, unless a request that may return keeps a slot."""
        self._forget_step()
        if self.memory is not None:
            self.memory.release()

    def held(self) -> Iterator[gauges.Value]:
        """Yield the number of built slots and the device memory allocated for slots."""
        slots = [slot.tensor for slot in list(self._slots.values()) if slot is not None]
        nbytes = sum(tensor.nbytes for tensor in slots if tensor is not None)
        if self.memory is not None:
            nbytes = self.memory.nbytes * self.memory.allocated
        yield gauges.Value(gauges.SLOTS, (self.name,), len(slots))
        yield gauges.Value(gauges.SLOT_BYTES, (self.name,), nbytes)

    def warn_no_room(self) -> None:
        """Warn once that slots do not fit in the device's memory."""
        logger.warning_once(
            "Readiness overlay: the device has no memory left for the %s of %d requests. Falling "
            "back to vLLM: the host waits on every step. Lower gpu_memory_utilization or "
            "max_num_seqs.",
            *(self.name, len(self._slots) or self.capacity),
        )

    def send(self, values: "np.ndarray", dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Send an array to the device without a wait."""
        return upload(values, dtype, self.device, pin_memory=self.batch.pin_memory)
