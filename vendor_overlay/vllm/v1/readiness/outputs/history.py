"""Feature ``history``: sampled tokens on the host, with ``token_ids_cpu`` as the source of truth.

Under async scheduling the runner writes a placeholder for each token that it has sampled and not
read back. Upstream replaces placeholders only in the Python lists, and only for batches that need
the lists. It waits for the copy each time, and ``token_ids_cpu`` keeps its placeholders.

Here all steps but the newest are settled when the next one begins: their tokens are written into
``token_ids_cpu`` and the lists. The scheduler has usually seen those tokens by then, so that the
copies are complete; a lagging rank waits. The newest step is settled only for a reader, which owns
the wait. The tokens that the host sees thus depend only on the schedule, never on the time at which
a copy arrives. While the batch has no reader, several steps are settled at once.

A request that leaves the batch loses its tokens in flight, as in upstream: if it comes back, the
scheduler sends its output along.

Of the tokens sampled since a request joined the batch, only the newest is on the device. Upstream
would embed a placeholder for an older one, and fail. Here the older token may have arrived although
the scheduler has discarded it. An error prevents its use: see :meth:`History.check_inputs`.
"""

# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.update_async_output_token_ids
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import ref

import numpy as np
import torch
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.feature import Feature, Live
from vllm.v1.readiness.inputs import input_ids

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

#: Token id of a token that has been sampled and not read back.
PLACEHOLDER = -1
#: Number of steps in flight beyond which those of an unchanged batch are settled.
LAG = 16
#: Maximum size of a step's output on the host, in bytes, for several to be kept.
SMALL = 1 << 16


class LiveRows(list["list[int] | None"]):
    """Output lists of the live batch's rows.

    Sampling metadata describes the live batch if it holds this very object, not an equal list.
    """

    def __init__(self, live: "Live") -> None:
        super().__init__()
        self._live = ref(live)

    @property
    def live(self) -> "Live | None":
        """The live batch; None once it has been deleted."""
        return self._live()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[list[Any]], tuple[list[Any]]]:
        """Pickle and copy as a plain list, without a batch."""
        if (live := self.live) is not None:
            live.settle_older()
        return list, (list(self),)


class Step:
    """Sampled tokens of one step, on their way to the host.

    Attributes:
        tokens: int32 [rows, 1 + drafts] on the host, valid once ``event`` has completed; a row ends
            at its first placeholder.
        event: recorded after the copy.
        rows: request id to row in ``tokens``, of requests still in the batch.
        metadata: the batch's sampling metadata, which is replaced when a row moves.
        drafted: whether drafts were scheduled for any request, so that the batch may assume several
            tokens for it. The runner may have dropped the drafts.
        columns: [rows], column of each request's placeholder in ``token_ids_cpu``; None if it
            depends on the number of drafts accepted in this step or an earlier one.
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


class History(Feature):
    """Steps in flight of one batch, oldest first.

    Attributes:
        in_flight: steps that have been sampled and not settled.
        arrived: callback per settled step, with the rows that got tokens and each row's token
            (None if a row may have several tokens). None for no callback.
    """

    def __init__(
        self,
        batch: "InputBatch",
        num_spec_tokens: int,
        requests: "Mapping[str, CachedRequestState]",
    ) -> None:
        self.batch = batch
        self.num_spec_tokens = num_spec_tokens
        self.in_flight: deque[Step] = deque()
        self.arrived: Callable[[list[int], list[int] | None], None] | None = None
        self._requests = requests  # updated by the live batch
        #: Number of tokens of each request when it joined the batch; none was a placeholder.
        self._joined: dict[str, int] = {}
        self._all_rows = np.arange(batch.max_num_reqs)
        #: Range of columns that is settled, by row.
        self._first, self._end = np.zeros((2, batch.max_num_reqs), np.int64)
        self._lists: list[list[int]] = []
        self._lists_of: SamplingMetadata | None = None
        #: Whether the batch is updated for the step after the newest in flight.
        self._updated = False
        #: Whether :meth:`begin_step` was called for the step that is not prepared yet, and
        #: for the step that is prepared and not expected yet.
        self._begun = self._prepared = False
        #: Whether outputs may have been truncated without calling :meth:`cut`.
        self._cuts_may_be_missed = False

    @classmethod
    def make(cls, live: "Live") -> "History":
        """Create the history; its rows become the batch's output lists."""
        history = cls(live.batch, live.num_spec_tokens, live.requests)
        live.batch.req_output_token_ids = live.rows
        return history

    def begin_step(self) -> None:
        """Settle all steps but the newest, unless this may be done for several steps at once.

        The scheduler usually requests a step once it has the tokens of the step before last. Waits
        are possible on ranks that return no tokens, and in pipelines of three or more stages if
        requests run in every step.
        """
        while len(self.in_flight) > 1 and not self.in_flight[0].rows:
            self.in_flight.popleft()  # all its requests have left
        if len(self.in_flight) > LAG or not self._may_lag():
            self.settle_older(fences.HISTORY)
        self._begun = True

    def _may_lag(self) -> bool:
        """Return whether no reader exists and steps in flight take little memory."""
        return not self.in_flight or not (
            self.num_spec_tokens
            or self.arrived is not None
            or self._cuts_may_be_missed
            or self.batch.logitsprocs_need_output_token_ids
            or self.in_flight[-1].tokens.untyped_storage().nbytes() > SMALL
        )

    def prepare(self) -> bool:
        """Prepare for sampling a step; return whether :meth:`begin_step` was called for it.

        A runner that overrides ``_update_states`` may have truncated outputs without that call.
        """
        self.batch_updated()
        self._prepared, self._begun = self._begun, False
        return self._prepared

    def batch_updated(self) -> None:
        """Mark the batch as updated for the next step."""
        self._updated = True

    def place(self, max_model_len: int) -> None:
        """Write a placeholder for each sampled token."""
        batch = self.batch
        indices = batch.prev_req_id_to_index or {}
        rows = self._rows(indices, batch.num_reqs)
        columns = batch.num_tokens_no_spec[rows]
        assert not len(rows) or columns.max() < max_model_len, (
            f"Request would get {columns.max() + 1} tokens; max_model_len is {max_model_len}."
        )
        if self.num_spec_tokens:
            # With ngram_gpu, upstream corrects a length that the scheduler has already corrected,
            # so that a column may hold a known token.
            ends = batch.num_prompt_tokens[rows] + list(map(self.known, indices.values()))
            guessed = columns >= ends
            batch.token_ids_cpu[rows[guessed], columns[guessed]] = PLACEHOLDER
        else:
            batch.token_ids_cpu[rows, columns] = PLACEHOLDER
        batch.is_token_ids[rows, columns] = True
        batch.num_tokens_no_spec[rows] = columns + 1
        some = map(batch.req_output_token_ids.__getitem__, indices.values())
        for output in self._whole() if len(indices) == batch.num_reqs else some:
            output.append(PLACEHOLDER)

    def expect(self, tokens: torch.Tensor, event: torch.Event) -> None:
        """Enqueue a step whose tokens are being copied to the host; see :class:`Step`."""
        drafted = self.num_spec_tokens > 0 and any(
            self._requests[req_id].prev_num_draft_len for req_id in self.batch.req_ids
        )
        self.in_flight.append(Step(tokens, event, self.batch, drafted, guessed=self.drafted))
        if not (self._begun or self._prepared):
            # The runner overrides _update_states: nothing else bounds the steps in flight, and
            # its next update reads the older tokens.
            self._cuts_may_be_missed = True
            self.settle_older(fences.HISTORY)
        self._begun = self._prepared = self._updated = False

    def add_request(self, request: "CachedRequestState") -> None:
        """Store the request's number of tokens."""
        self._joined[request.req_id] = request.num_tokens

    def check_inputs(self, counts: np.ndarray, drafts: Mapping[str, Sequence[int]]) -> None:
        """Raise if upstream would embed a placeholder.

        Called under async scheduling, before a step's tokens are gathered on the host. ``counts``
        [rows] is the number of tokens computed per row, drafts included.

        Raises:
            IndexError: an input would be a token that was sampled since its request joined the
                batch, other than the newest. The scheduler has discarded such a token.
        """
        if counts.max() == 1:
            return
        batch, rows = self.batch, len(counts)
        computed = batch.num_computed_tokens_cpu[:rows]
        newest = computed + counts - 1
        if drafts:
            newest -= input_ids.count(batch, drafts, rows)
        suspects = (computed < newest) & (newest > batch.num_prompt_tokens[:rows])
        for row in np.flatnonzero(suspects).tolist():
            req_id = batch.req_ids[row]
            # A derived batch may have added the request without calling add_request.
            first = max(int(computed[row]), self._joined.get(req_id, int(newest[row])))
            if first < newest[row]:
                raise IndexError(
                    f"index out of range: request {req_id} needs its token {first}, which is a "
                    "placeholder (-1): the scheduler truncated the request while this token was in "
                    "flight. The fix failed-loads prevents this if a KV connector failed to load "
                    "blocks."
                )

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Drop the request's tokens in flight."""
        self._joined.pop(request.req_id, None)
        for step in self.in_flight:
            step.rows.pop(request.req_id, None)

    def cut(self, req_id: str, length: int) -> None:
        """Drop tokens in flight that do not fit into the truncated output."""
        self.settle_older(fences.HISTORY)
        row = self.batch.req_id_to_index[req_id]
        end = int(self.batch.num_prompt_tokens[row]) + length
        for step in self.in_flight:
            # With drafts, _write_guessed computes the room.
            columns, source = step.columns, step.rows.get(req_id)
            if columns is not None and source is not None and columns[source] >= end:
                del step.rows[req_id]

    def loses_tokens(self, req_id: str, length: int, owner: str) -> bool:
        """Return whether truncating an output to ``length`` may lose a sampled token.

        ``length`` includes placeholders. A truncation for rejected drafts loses only placeholders.
        The step in flight has then arrived, except on a lagging rank: this waits for the step, and
        ``owner`` names the fence.
        """
        row = self.batch.req_id_to_index[req_id]
        (*older, newest) = self.in_flight or (None,)
        if newest is None or older or not newest.drafted or req_id not in newest.rows:
            return True
        fences.wait(newest.event, owner)
        sampled = int((newest.tokens[newest.rows[req_id]] != PLACEHOLDER).sum())
        return length < self.known(row) + sampled

    def settle_now(self, owner: str) -> None:
        """Settle every step; ``owner`` names the fence.

        If called before the batch is updated for a step, skip the newest step if it has drafts: its
        requests do not have their draft placeholders yet.
        """
        held = bool(self.in_flight) and self.in_flight[-1].drafted and not self._updated
        self._settle_to(int(held), owner)

    def settle_older(self, owner: str) -> None:
        """Settle all steps but the newest; ``owner`` names the fence."""
        self._settle_to(1, owner)

    def _settle_to(self, left: int, owner: str) -> None:
        """Settle steps, oldest first, until ``left`` remain."""
        steps = []
        while len(self.in_flight) > left:
            step = self.in_flight.popleft()
            if step.rows:
                fences.wait(step.event, owner)
                steps.append(step)
        if self.arrived is None and all(step.columns is not None for step in steps):
            self._write_together(steps)
        else:
            for step in steps:
                self._write(step)

    @property
    def drafted(self) -> bool:
        """Whether any step in flight had drafts."""
        return any(step.drafted for step in self.in_flight)

    def unsettled(self, row: int) -> bool:
        """Return whether the request in this row has tokens in flight."""
        output = self.batch.req_output_token_ids[row]
        return bool(output) and output[-1] == PLACEHOLDER

    def settle_rows(self, rows: Iterable[int], owner: str) -> None:
        """Settle every step if a request in one of these rows has tokens in flight."""
        if any(map(self.unsettled, rows)):
            self.settle_now(owner)

    def _write(self, step: Step) -> None:
        if step.columns is None:
            self._write_guessed(step)
            return
        batch = self.batch
        if self._cuts_may_be_missed:
            self._drop_cut(step, step.columns)
        rows, sources = self._rows_of(step)
        columns = step.columns[sources]
        tokens = step.tokens.numpy()[sources, 0]
        batch.token_ids_cpu[rows, columns] = tokens
        positions = (columns - batch.num_prompt_tokens[rows]).tolist()
        written, ids = rows.tolist(), tokens.tolist()
        for row, position, token in zip(written, positions, ids, strict=True):
            batch.req_output_token_ids[row][position] = token
        if self.arrived is not None:
            self.arrived(written, ids)

    def _write_together(self, steps: list[Step]) -> None:
        """Settle steps without drafts, oldest first. Rows may have moved since."""
        if not steps:
            return
        batch, first, end = self.batch, self._first, self._end
        first.fill(-1)
        places = []
        for step in steps:
            assert step.columns is not None
            rows, sources = self._rows_of(step)
            columns = step.columns[sources]
            batch.token_ids_cpu[rows, columns] = step.tokens.numpy()[sources, 0]
            end[rows] = columns + 1
            places.append((rows, columns))
        for rows, columns in reversed(places):
            first[rows] = columns
        rows = np.flatnonzero(first >= 0)
        starts, ends = first[rows], end[rows]
        columns = starts[:, None] + np.arange((ends - starts).max())
        np.minimum(columns, batch.token_ids_cpu.shape[1] - 1, out=columns)
        tokens = batch.token_ids_cpu[rows[:, None], columns].tolist()
        prompts = batch.num_prompt_tokens[rows]
        starts, ends = (starts - prompts).tolist(), (ends - prompts).tolist()
        for output, new, start, stop in zip(
            map(batch.req_output_token_ids.__getitem__, rows.tolist()),
            tokens,
            starts,
            ends,
            strict=True,
        ):
            output[start:stop] = new[: stop - start]

    def _rows_of(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a step's requests in the batch, and in the step."""
        sources = self._rows(step.rows, len(step.tokens))
        if step.metadata is self.batch.sampling_metadata:
            return sources, sources
        rows = map(self.batch.req_id_to_index.__getitem__, step.rows)
        return np.fromiter(rows, np.intp, len(step.rows)), sources

    def _whole(self) -> list[list[int]]:
        """Return the output list of each row, cached until a row gets another request."""
        metadata = self.batch.sampling_metadata
        if metadata is not self._lists_of:
            self._lists_of = metadata
            self._lists = self.batch.req_output_token_ids[: self.batch.num_reqs]
        return self._lists

    def _rows(self, named: Mapping[str, int], count: int) -> np.ndarray:
        """Return the rows of the named requests; ``count`` is the number of all rows."""
        if len(named) == count:
            return self._all_rows[:count]
        return np.fromiter(named.values(), np.intp, len(named))

    def _drop_cut(self, step: Step, columns: np.ndarray) -> None:
        """Drop tokens without placeholders, because their outputs were truncated."""
        for req_id, source in list(step.rows.items()):
            row = self.batch.req_id_to_index[req_id]
            output = self.batch.req_output_token_ids[row]
            newer = sum(req_id in other.rows for other in self.in_flight)
            end = self.batch.num_prompt_tokens[row] + len(output) - newer
            if columns[source] >= end:
                del step.rows[req_id]

    def known(self, row: int) -> int:
        """Return the length of a row's output without trailing placeholders."""
        output = self.batch.req_output_token_ids[row]
        end = len(output)
        while end and output[end - 1] == PLACEHOLDER:
            end -= 1
        return end

    def _write_guessed(self, step: Step) -> None:
        """Settle a step in which a request may have got fewer tokens than placeholders.

        Placeholders that newer steps do not account for belong to this step: one for the request's
        token and one per draft.
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
            # There may be fewer tokens than placeholders, or more than fit after a truncation.
            output[start : start + room] = new[:room]
            column = int(batch.num_prompt_tokens[row]) + start
            end = column + len(output) - start
            batch.token_ids_cpu[row, column:end] = output[start:]
            batch.is_token_ids[row, column:end] = True
            batch.num_tokens_no_spec[row] = end
        if self.arrived is not None:
            self.arrived([batch.req_id_to_index[req_id] for req_id in step.rows], None)
