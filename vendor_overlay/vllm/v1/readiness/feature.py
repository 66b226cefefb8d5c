"""Base class of features and fixes that keep state of a batch's rows."""

# mirrors: nothing

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class Feature:
    """Follows the rows of one InputBatch, as ``History`` and ``Slots`` do. Methods are no-ops."""

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch

    def add_request(self, request: "CachedRequestState") -> None:
        """Start tracking a request that was given a row."""

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Stop tracking a request that leaves its row. The request may come back later.

        The row still holds the request's token ids and counts.
        """

    def move_row(self, source: int, target: int) -> None:
        """Move the state of row ``source`` to the empty row ``target``. Called by ``condense``."""

    def swap_rows(self, one: int, other: int) -> None:
        """Swap the states of two rows. Called by ``swap_states``."""

    def cut(self, req_id: str, length: int) -> None:
        """Prepare for truncating a request to ``length`` output tokens, placeholders included."""

    def idle(self) -> None:
        """Release state held for requests. Called when the batch is empty."""
