"""History: each request's sampled tokens on the host, with ``token_ids_cpu`` as authority.

Under async scheduling the runner writes a placeholder for a token that it has sampled and
not read. Upstream repairs the placeholders in the lists only, only for batches that need
them, and waits for the copy each time; ``token_ids_cpu`` keeps its placeholders for good.
Here every step but the newest is settled as the next one begins: its tokens are written into
``token_ids_cpu`` and the lists, whoever may need them. By then the scheduler has mostly seen
them, so that they are there; a rank that lags waits. The newest step is settled only for a consumer
that needs its tokens on the host, and waits for them by name. What can be read is therefore a
matter of the schedule alone, never of when a copy arrives.

A request that leaves the batch takes its tokens in flight with it, as with upstream: if it
comes back, the scheduler sends its output along.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.readiness import fences

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

#: Stands for a token that was sampled and not read back.
PLACEHOLDER = -1


class Step:
    """What one step sampled, on its way to the host.

    Attributes:
        tokens: [rows, 1 + drafts] int32 on the host, valid once ``event`` has completed;
            a row ends at its first placeholder.
        event: recorded behind the copy.
        rows: request id to row in ``tokens``, of the requests that have stayed since.
        metadata: the batch's sampling metadata, which is replaced when a row moves.
        drafted: whether the batch assumes more than one token for a request: drafts were
            scheduled for it, though the runner may have dropped them.
        columns: [rows] where in ``token_ids_cpu`` each request's placeholder is; None
            where that depends on how many drafts are accepted, in this step or before.
    """

    __slots__ = ("columns", "drafted", "event", "metadata", "rows", "tokens")

    def __init__(
        self,
        tokens: torch.Tensor,
        event: torch.Event,
        batch: "InputBatch",
        drafted: bool,
        guessed: bool,
    ) -> None:
        self.tokens = tokens
        self.event = event
        self.rows = dict(batch.prev_req_id_to_index or {})
        self.metadata: SamplingMetadata = batch.sampling_metadata
        self.drafted = drafted
        self.columns: np.ndarray | None = None
        if not (drafted or guessed):
            self.columns = batch.num_tokens_no_spec[: len(tokens)] - 1


class History:
    """The steps in flight of one batch, oldest first."""

    def __init__(self, batch: "InputBatch", num_spec_tokens: int) -> None:
        self.batch = batch
        self.num_spec_tokens = num_spec_tokens
        self.in_flight: deque[Step] = deque()
        #: Those in the batch, by id.
        self._requests: dict[str, CachedRequestState] = {}
        #: Told of each step that is written: the rows that have got tokens, and the one
        #: token of each; None where they may be more.
        self.arrived: Callable[[list[int], list[int] | None], None] | None = None
        #: Whether the batch is updated for the step after the newest in flight.
        self._updated = False
        #: Whether :meth:`begin_step` was called since a step was recorded.
        self._begun = False
        #: Whether outputs may have been cut without a call of :meth:`cut`.
        self._cuts_may_be_missed = False

    def add_request(self, request: "CachedRequestState") -> None:
        """Take note of a request that joins the batch."""
        self._requests[request.req_id] = request

    def place(self, max_model_len: int) -> None:
        """Write a placeholder for each token that has been sampled.

        Args:
            max_model_len: how many tokens a request may have.
        """
        batch = self.batch
        rows = batch.prev_req_id_to_index or {}
        at = np.fromiter(rows.values(), np.intp, len(rows))
        columns = batch.num_tokens_no_spec[at]
        assert not len(rows) or columns.max() < max_model_len, (
            f"A sampled token would be number {columns.max() + 1} of its request, which may "
            f"have {max_model_len}."
        )
        if self.num_spec_tokens:
            # Upstream corrects a guess twice where the scheduler has done so (ngram_gpu):
            # the column may then be that of a token that is known.
            ends = batch.num_prompt_tokens[at] + list(map(self.known, rows.values()))
            guessed = columns >= ends
            batch.token_ids_cpu[at[guessed], columns[guessed]] = PLACEHOLDER
        else:
            batch.token_ids_cpu[at, columns] = PLACEHOLDER
        batch.is_token_ids[at, columns] = True
        batch.num_tokens_no_spec[at] = columns + 1
        outputs = batch.req_output_token_ids
        for row in rows.values():
            outputs[row].append(PLACEHOLDER)

    def record(self, tokens: torch.Tensor, event: torch.Event) -> None:
        """Take note of a step whose tokens are on their way; see :class:`Step`."""
        drafted = self.num_spec_tokens > 0 and any(
            self._requests[req_id].prev_num_draft_len for req_id in self.batch.req_ids
        )
        self.in_flight.append(Step(tokens, event, self.batch, drafted, guessed=self.drafted))
        if not self._begun:
            # A runner that updates its batch by code of its own: nobody else bounds what is
            # in flight, and its next update must find the older tokens in place.
            self._cuts_may_be_missed = True
            self.settle_older("history")
        self._begun = self._updated = False

    def remove_request(self, req_id: str) -> "CachedRequestState | None":
        """Drop the tokens in flight of a request that leaves the batch; the request."""
        for step in self.in_flight:
            step.rows.pop(req_id, None)
        return self._requests.pop(req_id, None)

    def cut(self, req_id: str, length: int) -> None:
        """Drop the tokens in flight that a request's cut leaves no place for.

        Args:
            req_id: a request in the batch.
            length: how many of its output tokens and placeholders are kept.
        """
        row = self.batch.req_id_to_index[req_id]
        end = int(self.batch.num_prompt_tokens[row]) + length
        for step in self.in_flight:
            # Where drafts count, what is in flight is measured when it is written.
            columns, at = step.columns, step.rows.get(req_id)
            if columns is not None and at is not None and columns[at] >= end:
                del step.rows[req_id]

    def loses_tokens(self, req_id: str, length: int, owner: str) -> bool:
        """Whether a cut may lose a token that was sampled; else only placeholders are lost.

        Those are of drafts that the scheduler already knows to be rejected, so that the step
        in flight is there, or nearly, on a rank that lags.

        Args:
            req_id: a request in the batch that was just cut.
            length: how many of its output tokens and placeholders are kept.
            owner: in whose name the step in flight is waited for.
        """
        row = self.batch.req_id_to_index[req_id]
        (*older, newest) = self.in_flight or (None,)
        if newest is None or older or not newest.drafted or req_id not in newest.rows:
            return True
        fences.wait(newest.event, owner)
        sampled = int((newest.tokens[newest.rows[req_id]] != PLACEHOLDER).sum())
        return length < self.known(row) + sampled

    def begin_step(self) -> None:
        """Write all steps but the newest, before the batch changes for a step.

        The scheduler mostly asks for a step when it has seen the tokens of the one before the
        last. Only ranks that hand out no tokens, and pipelines of three stages and more whose
        requests run in every step, may have to wait.
        """
        self.settle_older("history")
        self._begun = True

    def batch_updated(self) -> None:
        """Take note that the batch is updated for the step that is about to be sampled."""
        self._updated = True

    def settle_now(self, owner: str) -> None:
        """Write everything, waiting for it in the name of ``owner``.

        To be called once the batch is updated for a step, before it is sampled. Earlier
        than that, the newest step is left alone if it had drafts: its requests lack the
        placeholders of their drafts.
        """
        self._settle_to(self._held(), owner)

    def settle_older(self, owner: str) -> None:
        """Write all steps but the newest, waiting for them in the name of ``owner``."""
        self._settle_to(1, owner)

    def _settle_to(self, left: int, owner: str) -> None:
        """Write steps, oldest first, until as many are left, waiting for each."""
        while len(self.in_flight) > left:
            step = self.in_flight.popleft()
            if step.rows:
                fences.wait(step.event, owner)
                self._write(step)

    @property
    def idle(self) -> bool:
        """Whether no request is in the batch."""
        return not self._requests

    @property
    def drafted(self) -> bool:
        """Whether a step in flight had drafts."""
        return any(step.drafted for step in self.in_flight)

    def unsettled(self, row: int) -> bool:
        """Whether the request in this row has tokens in flight."""
        output = self.batch.req_output_token_ids[row]
        return bool(output) and output[-1] == PLACEHOLDER

    def settle_rows(self, rows: Iterable[int], owner: str) -> None:
        """As :meth:`settle_now`, if a request in one of these rows has tokens in flight."""
        if any(map(self.unsettled, rows)):
            self.settle_now(owner)

    def _held(self) -> int:
        """How many of the steps in flight cannot be written yet."""
        return int(bool(self.in_flight) and self.in_flight[-1].drafted and not self._updated)

    def _write(self, step: Step) -> None:
        if step.columns is None:
            self._write_guessed(step)
            return
        batch = self.batch
        if self._cuts_may_be_missed:
            self._drop_cut(step, step.columns)
        sources = np.fromiter(step.rows.values(), np.intp, len(step.rows))
        rows = sources
        if step.metadata is not batch.sampling_metadata:
            rows = np.fromiter(
                map(batch.req_id_to_index.__getitem__, step.rows), np.intp, len(step.rows)
            )
        columns = step.columns[sources]
        tokens = step.tokens.numpy()[sources, 0]
        batch.token_ids_cpu[rows, columns] = tokens
        outputs = batch.req_output_token_ids
        positions = (columns - batch.num_prompt_tokens[rows]).tolist()
        written, ids = rows.tolist(), tokens.tolist()
        for row, position, token in zip(written, positions, ids, strict=True):
            outputs[row][position] = token
        if self.arrived is not None:
            self.arrived(written, ids)

    def _drop_cut(self, step: Step, columns: np.ndarray) -> None:
        """Drop the tokens whose placeholders are gone, because an output was cut back."""
        for req_id, source in list(step.rows.items()):
            row = self.batch.req_id_to_index[req_id]
            output = self.batch.req_output_token_ids[row]
            newer = sum(req_id in other.rows for other in self.in_flight)
            end = self.batch.num_prompt_tokens[row] + len(output) - newer
            if columns[source] >= end:
                del step.rows[req_id]

    def known(self, row: int) -> int:
        """How much of an output is known: all before its trailing placeholders."""
        output = self.batch.req_output_token_ids[row]
        end = len(output)
        while end and output[end - 1] == PLACEHOLDER:
            end -= 1
        return end

    def _write_guessed(self, step: Step) -> None:
        """Write a step in which a request may have got fewer tokens than placeholders.

        The placeholders that newer steps do not hold are this step's, as many as it has
        hoped for.
        """
        batch = self.batch
        tokens = step.tokens.tolist()
        for req_id, source in step.rows.items():
            row = batch.req_id_to_index[req_id]
            output = batch.req_output_token_ids[row]
            start = self.known(row)
            newer = sum(req_id in other.rows for other in self.in_flight)
            room = len(output) - start - newer
            if room <= 0:
                continue
            new = tokens[source]
            if new[-1] == PLACEHOLDER:
                del new[new.index(PLACEHOLDER) :]
            # Fewer than was hoped for, or more than a cut has left room for.
            output[start : start + room] = new[:room]
            column = int(batch.num_prompt_tokens[row]) + start
            end = column + len(output) - start
            batch.token_ids_cpu[row, column:end] = output[start:]
            batch.is_token_ids[row, column:end] = True
            batch.num_tokens_no_spec[row] = end
        if self.arrived is not None:
            self.arrived([batch.req_id_to_index[req_id] for req_id in step.rows], None)
