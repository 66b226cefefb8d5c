"""Feature ``history``: sampled tokens on the host, with ``token_ids_cpu`` as the source of truth.

Under async scheduling the runner writes a placeholder for each sampled token until it reads the
token back. Upstream replaces placeholders only in the Python lists, and only if the batch needs the
lists. It waits for the copy each time, and ``token_ids_cpu`` keeps its placeholders.

Here a step is settled by writing its tokens into ``token_ids_cpu`` and the lists. When a step
begins, all earlier steps but the newest are settled. The scheduler has usually seen their tokens,
so the copies have completed; only a lagging rank waits. The newest step is settled only for a
reader, which owns the wait. The tokens that the host sees thus depend only on the schedule, never
on when a copy completes. While the batch has no reader, several steps are settled at once.

A request that leaves the batch loses its tokens in flight, as in upstream: if the request returns,
the scheduler sends its output.

Of the tokens sampled since a request joined the batch, only the newest is on the device. For an
older token, upstream would embed a placeholder and fail. Here such a token may be on the host,
although the scheduler has discarded it; :meth:`History.check_inputs` raises an error.
"""

# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.update_async_output_token_ids
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import ref

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import fences, gauges, subclasses
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.inputs import input_ids

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

#: Token id that stands for a sampled token that has not been read back.
PLACEHOLDER = -1
#: Number of steps in flight beyond which older steps are settled even without a reader.
LAG = 16


class OutputLists(list["list[int] | None"]):
    """Output lists of the live batch's rows; its identity marks the live batch's metadata."""

    def __init__(self, live: "LiveBatch") -> None:
        super().__init__()
        self._live = ref(live)

    @property
    def live(self) -> "LiveBatch | None":
        """The live batch; None once it has been deleted."""
        return self._live()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[list[Any]], tuple[list[Any]]]:
        """Pickle and copy as a plain list, without the batch."""
        if (live := self.live) is not None:
            live.settle_older()
        return list, (list(self),)


@dataclass(slots=True, eq=False)
class SampledStep:
    """Sampled tokens of one step, on their way to the host."""

    #: int32 [rows, 1 + drafts] on the host, valid once ``event`` has completed. A row ends at its
    #: first placeholder.
    tokens: torch.Tensor
    event: torch.Event  #: Recorded after the copy.
    rows: dict[str, int]  #: Request id to row of ``tokens``, for requests still in the batch.
    #: The batch's sampling metadata, which is replaced when a row moves.
    metadata: "SamplingMetadata"
    #: Whether drafts were scheduled for any request, even if the runner dropped them.
    drafted: bool
    #: [rows], the column of each request's placeholder in ``token_ids_cpu``; None if it depends on
    #: how many drafts of this or an earlier step are accepted.
    columns: np.ndarray | None


class History(Feature):
    """Steps in flight of one batch, oldest first.

    Attributes:
        in_flight: steps that have been sampled and not settled.
        arrived: optional callback per settled step, called with the step's rows and the token of
            each row (None instead of tokens if a row may have several).
    """

    def __init__(
        self,
        batch: "InputBatch",
        num_spec_tokens: int,
        requests: "Mapping[str, CachedRequestState]",
    ) -> None:
        self.batch = batch
        self.num_spec_tokens = num_spec_tokens
        self.in_flight: deque[SampledStep] = deque()
        self.arrived: Callable[[list[int], list[int] | None], None] | None = None
        self._requests = requests  # updated by the live batch
        #: Number of tokens of each request when it joined the batch, all of them known.
        self._joined: dict[str, int] = {}
        self._all_rows = np.arange(batch.max_num_reqs)
        #: Columns that are being settled, from first to end, by row.
        self._first, self._end = np.zeros((2, batch.max_num_reqs), np.int64)
        self._lists: list[list[int]] = []
        self._lists_of: SamplingMetadata | None = None
        #: Whether the batch has been updated for the step after the newest step in flight.
        self._updated = False
        #: Whether :meth:`begin_step` was called for the next step to prepare, and for the
        #: prepared step.
        self._begun = self._prepared = False
        #: Whether outputs may have been truncated without calling :meth:`cut`.
        self._cuts_may_be_missed = False

    def begin_step(self) -> None:
        """Settle all steps but the newest, unless several steps may be settled at once later.

        The scheduler usually requests a step once it has the tokens of the step before last. Waits
        may occur on ranks that return no tokens, and in pipelines of three or more stages.
        """
        while len(self.in_flight) > 1 and not self.in_flight[0].rows:
            self.in_flight.popleft()  # all requests of the step have left
        if len(self.in_flight) > LAG or not self._may_lag():
            self.settle_older(fences.HISTORY)
        self._begun = True

    def _may_lag(self) -> bool:
        """Return whether no step in flight has to be settled alone."""
        return not self.in_flight or not (
            self.num_spec_tokens
            or self.arrived is not None
            or self._cuts_may_be_missed
            or self.batch.logitsprocs_need_output_token_ids
        )

    def begin_sampling(self, runner: "GPUModelRunner | None") -> bool:
        """Begin to sample a step; return whether :meth:`begin_step` was called for it.

        If not, the runner may truncate outputs without calling :meth:`cut`.
        """
        self.batch_updated()
        self._prepared, self._begun = self._begun, False
        if not self._prepared:
            gauges.fall_back(registry.HISTORY, gauges.OTHER_CLASS)
            logger.warning_once(
                "Readiness overlay: %s does not call GPUModelRunner._update_states. Falling back "
                "to vLLM for penalties, bad words and thinking budgets, for which the host waits "
                "on every step.",
                "the runner" if runner is None else subclasses.full_name(type(runner)),
            )
        return self._prepared

    def batch_updated(self) -> None:
        """Mark the batch as updated for the next step."""
        self._updated = True

    def place(self, max_model_len: int) -> None:
        """Write a placeholder for each token that is being sampled."""
        batch = self.batch
        indices = batch.prev_req_id_to_index or {}
        rows = self._rows(indices, batch.num_reqs)
        columns = batch.num_tokens_no_spec[rows]
        assert not len(rows) or columns.max() < max_model_len, (
            f"Request would get {columns.max() + 1} tokens; max_model_len is {max_model_len}."
        )
        if self.num_spec_tokens:
            # With ngram_gpu, upstream corrects a length twice, and a column may hold a known token.
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
        """Enqueue a step whose tokens are being copied to the host; see :class:`SampledStep`."""
        batch = self.batch
        drafted = self.num_spec_tokens > 0 and any(
            self._requests[req_id].prev_num_draft_len for req_id in batch.req_ids
        )
        columns = None
        if not (drafted or self.drafted):
            columns = batch.num_tokens_no_spec[: len(tokens)] - 1
        rows, metadata = dict(batch.prev_req_id_to_index or {}), batch.sampling_metadata
        self.in_flight.append(SampledStep(tokens, event, rows, metadata, drafted, columns))
        if not (self._begun or self._prepared):
            # The runner overrides _update_states: its next update reads the older tokens, and no
            # other code bounds the number of steps in flight.
            self._cuts_may_be_missed = True
            self.settle_older(fences.HISTORY)
        self._begun = self._prepared = self._updated = False

    def add_request(self, request: "CachedRequestState") -> None:
        """Store the number of tokens with which the request joins the batch."""
        self._joined[request.req_id] = request.num_tokens

    def check_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", counts: np.ndarray
    ) -> None:
        """Check that upstream would not embed a placeholder in this step.

        Called before a step's tokens are gathered on the host. ``counts`` [rows] is the number of
        tokens to compute per row, drafts included. Nothing is checked without async scheduling, nor
        in a pipeline, whose last stage samples and does not embed tokens.

        Raises:
            IndexError: an input token was sampled since the request joined the batch and is not the
                newest. The scheduler has discarded such a token.
        """
        alone = runner.parallel_config.pipeline_parallel_size == 1
        if not (alone and runner.use_async_scheduling) or counts.max() == 1:
            return
        batch, rows, drafts = self.batch, len(counts), scheduled.scheduled_spec_decode_tokens
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
        """Drop tokens in flight beyond ``length`` output tokens, before a truncation to it."""
        self.settle_older(fences.HISTORY)
        row = self.batch.req_id_to_index[req_id]
        end = int(self.batch.num_prompt_tokens[row]) + length
        for step in self.in_flight:
            # With drafts, _write_guessed drops the tokens that do not fit.
            columns, source = step.columns, step.rows.get(req_id)
            if columns is not None and source is not None and columns[source] >= end:
                del step.rows[req_id]

    def loses_tokens(self, req_id: str, length: int, owner: str) -> bool:
        """Return whether truncating an output to ``length`` may lose a sampled token.

        ``length`` includes placeholders. A truncation for rejected drafts loses only placeholders,
        other truncations may lose tokens. This waits for the step in flight, which has arrived
        except on a lagging rank; ``owner`` names the fence.
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

        A newest step with drafts is skipped until the batch is updated for the next step, because
        the placeholders of its drafts do not exist before.
        """
        held = bool(self.in_flight) and self.in_flight[-1].drafted and not self._updated
        self._settle_to(int(held), owner)

    def settle_older(self, owner: str) -> None:
        """Settle all steps but the newest; ``owner`` names the fence."""
        self._settle_to(1, owner)

    def _settle_to(self, left: int, owner: str) -> None:
        """Settle the oldest steps until ``left`` remain in flight."""
        steps = []
        while len(self.in_flight) > left:
            step = self.in_flight.popleft()
            if step.rows:
                fences.wait(step.event, owner)
                steps.append(step)
        special = self.arrived is not None or self._cuts_may_be_missed
        if not special and all(step.columns is not None for step in steps):
            self._write_together(steps)
        else:
            for step in steps:
                self._write(step)

    @property
    def drafted(self) -> bool:
        """Whether any step in flight had drafts."""
        return any(step.drafted for step in self.in_flight)

    def unsettled(self, row: int) -> bool:
        """Return whether the request in a row has tokens in flight."""
        output = self.batch.req_output_token_ids[row]
        return bool(output) and output[-1] == PLACEHOLDER

    def settle_rows(self, rows: Iterable[int], owner: str) -> None:
        """Settle every step if the request in any of these rows has tokens in flight."""
        if any(map(self.unsettled, rows)):
            self.settle_now(owner)

    def _write(self, step: SampledStep) -> None:
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

    def _write_together(self, steps: list[SampledStep]) -> None:
        """Settle ``steps`` without drafts, given oldest first. Rows may have moved since."""
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

    def _rows_of(self, step: SampledStep) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a step's requests: in the batch, and in the step's tokens."""
        sources = self._rows(step.rows, len(step.tokens))
        if step.metadata is self.batch.sampling_metadata:
            return sources, sources
        rows = map(self.batch.req_id_to_index.__getitem__, step.rows)
        return np.fromiter(rows, np.intp, len(step.rows)), sources

    def _whole(self) -> list[list[int]]:
        """Return the output lists of all rows, cached until a row changes."""
        metadata = self.batch.sampling_metadata
        if metadata is not self._lists_of:
            self._lists_of = metadata
            self._lists = self.batch.req_output_token_ids[: self.batch.num_reqs]
        return self._lists

    def _rows(self, named: Mapping[str, int], count: int) -> np.ndarray:
        """Return the rows in ``named`` (request id to row); ``count`` is the number of all rows."""
        if len(named) == count:
            return self._all_rows[:count]
        return np.fromiter(named.values(), np.intp, len(named))

    def _drop_cut(self, step: SampledStep, columns: np.ndarray) -> None:
        """Drop a step's tokens whose placeholders were lost in a truncation."""
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

    def _write_guessed(self, step: SampledStep) -> None:
        """Settle a step in which a request may have fewer tokens than placeholders.

        Each newer step accounts for one trailing placeholder; the others belong to this step.
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
