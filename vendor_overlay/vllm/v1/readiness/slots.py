"""Slots: what a feature keeps on the device for each request that asks for it.

A request holds a slot from the first step that it is sampled in until it leaves the batch.
A slot begins with the history that ``token_ids_cpu`` holds and is carried on with what is
sampled, on the device, so that nothing waits and nothing grows with the output.
"""

from abc import ABC, abstractmethod
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

if TYPE_CHECKING:
    from vllm.v1.readiness.history import History
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class Slots(ABC):
    """The slots of one batch and feature, and what they are to the step at hand.

    Attributes:
        owner: in whose name a history is waited for.
        serving: whether this step is served from the slots.
        kernels: the feature's Triton kernels, which find slots by their addresses; None
            where torch's operations do the work.
    """

    owner: ClassVar[str]

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        self.batch = batch
        self.history = history
        self.vocab_size: int = batch.vocab_size
        self.device: torch.device = batch.device
        self.serving = False
        self.kernels: ModuleType | None = None
        #: Request id to slot; None: its history is counted at the next step.
        self._slots: dict[str, torch.Tensor | None] = {}
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
    def add_request(self, request: "CachedRequestState") -> None:
        """Take note of a request that joins the batch."""

    @abstractmethod
    def prepare(
        self,
        metadata: "SamplingMetadata",
        width: int,
        drafts: "SpecDecodeMetadata | None",
    ) -> None:
        """Make the slots ready for a step; :attr:`serving` says whether they are.

        Args:
            metadata: the live batch's.
            width: of the step's logits.
            drafts: the step's drafts, if it has any.
        """

    @abstractmethod
    def record(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Carry the slots on with what was sampled.

        Args:
            sampled: [requests, 1 + drafts] token ids on the device; -1 stands for a
                rejected draft, and none that was accepted is behind one.
            discarded: [at least requests] bool on the device: rows sampled for nothing.
        """

    @abstractmethod
    def _count_history(self, row: int) -> torch.Tensor:
        """A slot, int32, with the history that token_ids_cpu holds in this row.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """

    @abstractmethod
    def _say_no_room(self) -> None:
        """Log, once, that upstream's path serves for want of room on the device."""

    def remove_request(self, req_id: str) -> None:
        """Give back the slot of a request that leaves the batch."""
        if req_id in self._slots:
            del self._slots[req_id]
            self._exhausted = False  # there may be room now

    def recount(self, req_id: str) -> None:
        """Count a request's history anew at the next step, because it was cut back."""
        if req_id in self._slots:
            self._slots[req_id] = None

    def _serve(self, metadata: "SamplingMetadata", drafts: "SpecDecodeMetadata | None") -> None:
        """Serve a step from the slots, if there is room for them.

        Args:
            metadata: the live batch's, which is replaced when a row moves.
            drafts: the step's drafts, if it has any.
        """
        if not self._fill_slots():
            self._forget_rows()
            return
        self.serving = True
        self._drafts = drafts
        if metadata is not self._metadata:
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
        waiting = [req_id for req_id, slot in self._slots.items() if slot is None]
        if not waiting:
            return True
        if self._exhausted:
            return False
        self._forget_rows()
        rows = [self.batch.req_id_to_index[req_id] for req_id in waiting]
        self.history.settle_rows(rows, self.owner)
        try:
            for req_id, row in zip(waiting, rows, strict=True):
                self._slots[req_id] = self._count_history(row)
        except torch.OutOfMemoryError:
            # Until a request with a slot leaves: the next step would fail again.
            self._exhausted = True
            self._slots = dict.fromkeys(self._slots)
            self._say_no_room()
            return False
        return True

    def _staged(self, values: "np.ndarray", dtype: torch.dtype) -> torch.Tensor:
        """[values] on the device, by way of memory that the host need not wait for."""
        staged = torch.empty(values.size, dtype=dtype, pin_memory=self.batch.pin_memory)
        staged.numpy()[:] = values
        return staged.to(self.device, non_blocking=True)
