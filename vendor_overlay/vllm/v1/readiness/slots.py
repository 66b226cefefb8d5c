"""Slots: what a feature keeps on the device for each request that asks for it.

A request holds a slot from the first step that it is sampled in. A slot begins with the history
that ``token_ids_cpu`` holds and is carried on with what is sampled, on the device, so that
nothing waits and nothing grows with the output.

A slot is served only while it is known to hold the whole history. Wherever a step may have been
sampled that it does not know of, it is made anew from the history: after a step that was left to
upstream, after one that was not recorded, and after a cut.

A request that leaves the batch and is still running (preempted, or in another micro-batch of a
pipeline) has its slot kept, and gets it back if it returns as it left.
"""

from abc import ABC, abstractmethod
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.readiness import switch

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.readiness.history import History
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

logger = init_logger(__name__)


class _Kept:
    """The slot of a request that has left the batch, and the request as it was then.

    Attributes:
        slot: of the request; None: given back.
        params: the request's, which a streaming session replaces.
        length: tokens of the prompt, and of prompt and output.
    """

    __slots__ = ("__weakref__", "length", "params", "slot")

    def __init__(
        self, slot: torch.Tensor, params: "SamplingParams | None", length: tuple[int, int]
    ) -> None:
        self.slot: torch.Tensor | None = slot
        self.params = params
        self.length = length

    def is_of(self, request: "CachedRequestState") -> bool:
        """Whether the request is as it was."""
        length = (request.num_prompt_tokens, request.num_tokens)
        return self.params is request.sampling_params and self.length == length


class Slots(ABC):
    """The slots of one batch and feature, and what they are to the step at hand.

    Attributes:
        owner: in whose name a history is waited for.
        serving: whether a step is served from the slots that is not recorded yet.
        capacity: how many requests may have a slot.
        kernels: the feature's Triton kernels, which find slots by their addresses; None
            where torch's operations do the work.
    """

    owner: ClassVar[str]

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        self.batch = batch
        asked = switch.slots()
        self.capacity = batch.max_num_reqs if asked is None else min(asked, batch.max_num_reqs)
        self.history = history
        self.vocab_size: int = batch.vocab_size
        self.device: torch.device = batch.device
        self.serving = False
        self.kernels: ModuleType | None = None
        #: Request id to slot; None: its history is counted at the next step.
        self._slots: dict[str, torch.Tensor | None] = {}
        #: Of requests that have left the batch, the oldest first. Each belongs to its
        #: request's state, and goes when the runner drops that.
        self._kept: WeakValueDictionary[str, _Kept] = WeakValueDictionary()
        self._exhausted = False
        # The step at hand: the sampling metadata that the rows below are those of.
        self._metadata: SamplingMetadata | None = None
        self._rows: list[torch.Tensor | None] = []
        self._addresses: torch.Tensor | None = None
        self._drafts: SpecDecodeMetadata | None = None

    @abstractmethod
    def warm_up(self) -> None:
        """Compile and load the kernels, which would otherwise stall the first request."""

    @abstractmethod
    def _wants(self, request: "CachedRequestState") -> bool:
        """Whether a request that joins the batch is to have a slot."""

    @abstractmethod
    def _can_serve(self, metadata: "SamplingMetadata", width: int) -> bool:
        """Whether a step may be served from slots.

        Args:
            metadata: the live batch's.
            width: of the step's logits.
        """

    @abstractmethod
    def _carry_on(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Bring the slots up to date; see :meth:`record`."""

    @abstractmethod
    def _count_history(self, row: int) -> torch.Tensor:
        """A slot, int32, with the history that token_ids_cpu holds in this row.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """

    def add_request(self, request: "CachedRequestState") -> None:
        """Give a slot to a request that joins the batch, if it wants one."""
        kept: _Kept | None = vars(request).pop(self._attribute, None)
        if self._wants(request):
            slot = kept.slot if kept is not None and kept.is_of(request) else None
            del kept
            self._slots[request.req_id] = slot
            self._trim_kept()

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Keep the slot of a request that leaves its row, as long as the runner knows it.

        With drafts in flight the host does not know how much of the history the slot holds.
        """
        req_id = request.req_id
        if req_id not in self._slots:
            return
        self._exhausted = False  # there may be room now
        slot = self._slots.pop(req_id)
        if slot is not None and not self.serving and not self.history.drafted:
            batch = self.batch
            length = (int(batch.num_prompt_tokens[row]), int(batch.num_tokens_no_spec[row]))
            kept = _Kept(slot, request.sampling_params, length)
            vars(request)[self._attribute] = self._kept[req_id] = kept
            self._trim_kept()

    def idle(self) -> None:
        """No request is left in the batch: nothing runs that giving memory back would hold up."""
        self._forget_rows()
        self._release()

    def _trim_kept(self) -> None:
        """Give up kept slots, the oldest first, until no more than the capacity are held."""
        while self._kept and len(self._slots) + len(self._kept) > self.capacity:
            self._kept.pop(next(iter(self._kept))).slot = None

    def _release(self) -> None:  # noqa: B027  (a feature need not hold memory of its own)
        """Give memory that no slot needs back to the device."""

    @property
    def _attribute(self) -> str:
        """The attribute of a request's state under which its slot is kept."""
        return f"readiness {self.owner}"

    @property
    def complete(self) -> bool:
        """Whether every request that wants a slot has one that holds its history."""
        return all(slot is not None for slot in self._slots.values())

    def cut(self, req_id: str, length: int) -> None:
        """Count a request's history anew at the next step if a cut may have lost a token.

        Args:
            req_id: a request in the batch.
            length: how many of its output tokens and placeholders are kept.
        """
        if self._slots.get(req_id) is not None and self.history.loses_tokens(
            req_id, length, self.owner
        ):
            self._slots[req_id] = None

    def prepare(
        self,
        metadata: "SamplingMetadata",
        width: int,
        drafts: "SpecDecodeMetadata | None",
    ) -> None:
        """Make the slots ready for a step; :attr:`serving` says whether they are.

        Args:
            metadata: the live batch's, which is replaced when a row moves.
            width: of the step's logits.
            drafts: the step's drafts, if it has any.
        """
        if self.serving:
            logger.warning_once(
                "Readiness overlay: this model runner replaces vLLM's sample_tokens. The history "
                "of its %s is read again on every step, and the host waits for it.",
                self.owner,
            )
            self.leave_step()
        if not self._can_serve(metadata, width) or not self._fill_slots():
            self.leave_step()
            return
        self.serving = True
        self._drafts = drafts
        if metadata is not self._metadata:
            self._look_up(metadata)

    def record(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Carry the slots on with what was sampled.

        Args:
            sampled: [requests, 1 + drafts] token ids on the device; -1 stands for a
                rejected draft, and none that was accepted is behind one.
            discarded: [at least requests] bool on the device: rows sampled for nothing.
        """
        if not self.serving:
            self.leave_step()
            return
        self.serving = False
        self._carry_on(sampled, discarded)

    def leave_step(self) -> None:
        """Leave a step to upstream, so that the slots miss what is sampled in it."""
        self._forget_rows()
        self._slots = dict.fromkeys(self._slots)
        if self._exhausted:
            self._release()

    def _look_up(self, metadata: "SamplingMetadata") -> None:
        """Find the slots of the batch's rows."""
        self._rows = [self._slots.get(req_id) for req_id in self.batch.req_ids]
        if self.kernels is not None:
            addresses = [0 if slot is None else slot.data_ptr() for slot in self._rows]
            self._addresses = async_tensor_h2d(
                addresses, torch.int64, self.device, pin_memory=self.batch.pin_memory
            )
        self._metadata = metadata

    def _forget_rows(self) -> None:
        """Serve no step until the rows are looked up again."""
        self.serving = False
        self._metadata = None
        self._rows = []
        self._addresses = None
        self._drafts = None

    def _fill_slots(self) -> bool:
        """Count the history of every request that has none; False: there is no room."""
        if self.complete:
            return True
        waiting = [req_id for req_id, slot in self._slots.items() if slot is None]
        if len(self._slots) > self.capacity:
            logger.warning_once(
                "Readiness overlay: more than %d requests use %s (%s). Meanwhile vLLM's own path "
                "serves them, which waits on every step.",
                *(self.capacity, self.owner, switch.SLOTS),
            )
            return False
        if self._exhausted:
            return False
        self._forget_rows()
        rows = [self.batch.req_id_to_index[req_id] for req_id in waiting]
        self.history.settle_rows(rows, self.owner)
        try:
            for req_id, row in zip(waiting, rows, strict=True):
                self._slots[req_id] = self._count_history(row)
        except torch.OutOfMemoryError:
            if self._kept:
                for kept in self._kept.values():
                    kept.slot = None
                self._kept.clear()
                return self._fill_slots()
            # Until a request with a slot leaves: the next step would fail again.
            self._exhausted = True
            self._say_no_room()
            return False
        return True

    def _say_no_room(self) -> None:
        logger.warning_once(
            "Readiness overlay: the device has no memory left for the %s of %d requests. Where "
            "it has none, vLLM's own path serves them, which waits on every step. Lower "
            "gpu_memory_utilization or max_num_seqs.",
            *(self.owner, len(self._slots) or self.capacity),
        )

    def _staged(self, values: "np.ndarray", dtype: torch.dtype) -> torch.Tensor:
        """[values] on the device, by way of memory that the host need not wait for."""
        staged = torch.empty(values.size, dtype=dtype, pin_memory=self.batch.pin_memory)
        staged.numpy()[:] = values
        return staged.to(self.device, non_blocking=True)
