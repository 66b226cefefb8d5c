"""A lockstep run: one scheduler over upstream's runner and ours."""

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.readiness import worker
from vllm.v1.readiness.sample import thinking_fixes
from vllm.v1.request import Request, RequestStatus

from support import modules
from support.lockstep.comparison import (
    compare_histories,
    compare_twins,
    embeds_placeholder,
    prompt_is_lost,
    same_step,
)
from support.lockstep.copies import Arrives, SimulatedCopy
from support.lockstep.inputs import same_inputs
from support.lockstep.model import draw_drafts
from support.lockstep.runner import RunnerUnderTest
from support.scheduling import (
    VOCABULARY,
    make_scheduler,
    reasoning_config,
    speculative_config,
)


class SetAside(Exception):
    """The run cannot go on, or reached a known fault of stock's; the reason."""


class LockstepRun:
    """A scheduler, and runners in step with it.

    Args:
        seed: seed of everything random in the simulated parts.
        asynchronous: schedule one step ahead of the outputs.
        drafts: draft tokens a request and step; 0 for none.
        max_num_seqs: most requests in a batch.
        max_tokens_a_step: most tokens scheduled for a step.
        num_blocks: blocks of the KV cache.
        max_model_len: longest sequence, in tokens.
        reorder_threshold: most tokens of a request that counts as a decode and is moved before
            prefills; None keeps the order.
        processor: give each runner a logits processor that reads the history: one that the
            user names ("user"), or an entry point's ("plugin"); one that says it does not read
            the newest token ("older"), or none ("none"); None for none.
        trimmed: the runner drops some of the scheduled drafts, often all, as ngram_gpu does
            where it has no match.
        markers: the start and the end marker of thinking; requests may then have a budget.
        ahead: further steps that are scheduled ahead of the outputs, as with so many more
            micro-batches in a pipeline.
        own: the part that a user's subclasses replace, one of OWN; None for none.
        switch: the value of VLLM_READINESS; empty for the default.
        arrives: decides when copies of upstream's runner and ours arrive.
        twins: run ours twice more, once with all copies early and once with all late.
    """

    def __init__(
        self,
        seed: int = 0,
        asynchronous: bool = True,
        drafts: int = 0,
        max_num_seqs: int = 8,
        max_tokens_a_step: int = 24,
        num_blocks: int = 60,
        max_model_len: int = 96,
        reorder_threshold: int | None = None,
        processor: str | None = None,
        trimmed: bool = False,
        markers: tuple[list[int], list[int]] | None = None,
        ahead: int = 0,
        own: str | None = None,
        switch: str = "",
        arrives: Arrives = lambda: False,
        twins: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.asynchronous = asynchronous
        self.drafts = drafts
        self.max_num_seqs = max_num_seqs
        self.max_tokens_a_step = max_tokens_a_step
        self.max_model_len = max_model_len
        self.reorder_threshold = reorder_threshold
        self.processor = processor
        self.trimmed = trimmed
        self.reasoning = reasoning_config(markers)
        self.speculative = speculative_config(drafts, trimmed)
        self.scheduler = make_scheduler(
            asynchronous,
            self.speculative,
            num_blocks,
            max_num_seqs,
            max_tokens_a_step,
            max_model_len,
        )
        self.ahead = ahead
        self.own = own
        self.switch = switch
        with self._switched():
            self.runners = self.make_runners(arrives, twins)
        self.in_flight: deque[tuple[Any, Any, list[SimulatedCopy]]] = deque()
        self.proposed: dict[str, list[int]] = {}
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.added = 0
        self.failing: set[int] = set()
        self.structured: set[str] = set()
        #: Outputs to cut back at the next step, and by how many tokens.
        self.cuts: dict[str, int] = {}
        #: Requests whose outputs were cut back; the scheduler still has them whole.
        self.shortened: set[str] = set()
        #: Whether the scheduler knows all tokens of the runners. With more than two steps in
        #: flight it loses the tokens of a request that it preempts.
        self.faithful = not (asynchronous and ahead)
        #: Requests whose tokens differ between the scheduler and the runners.
        self.strays: set[str] = set()
        #: Known fault of stock's that may show from here on; None if there is none.
        self.excuse: str | None = None

    def make_runners(self, arrives: Arrives, twins: bool) -> list[RunnerUnderTest]:
        """Make the runners, with the value of VLLM_READINESS set."""
        self.stock = RunnerUnderTest(modules.pristine, self, arrives)
        self.ours = RunnerUnderTest(modules.overlaid, self, arrives)
        self.twins = []
        if twins:
            self.twins.append(RunnerUnderTest(modules.overlaid, self, lambda: True))
            # With drafts, a rank that lags mistakes rejected drafts for a cut, and waits.
            reads = self.drafts > 0
            late = RunnerUnderTest(modules.overlaid, self, lambda: False, reads=reads)
            self.twins.append(late)
        # Of thinking budgets, upstream's holder with our fixes is the oracle for the feature.
        thinking_fixes.mend(self.stock.batch, worker.of(self.ours.batch).on)
        return [self.stock, self.ours, *self.twins]

    def add(self, prompt: list[int], req_id: str | None = None, **params: Any) -> str:
        """Add a request.

        Args:
            prompt: its token ids.
            req_id: its id; None for a new one.
            params: fields of SamplingParams, "bad_words" as token ids, and "resumable" of
                a streaming session.

        Returns:
            The request's id.
        """
        req_id = req_id or f"r{self.added}"
        self.added += 1
        bad_words = params.pop("bad_words", None)
        resumable = params.pop("resumable", False)
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})
        sampling._bad_words_token_ids = bad_words
        sampling._all_stop_token_ids |= set(sampling.stop_token_ids or ())
        request = Request(
            request_id=req_id,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=self.added,
            resumable=resumable,
        )
        self.scheduler.add_request(request)
        return req_id

    def close(self, session: str) -> None:
        """End a streaming session: no more input follows."""
        if session in self.scheduler.requests:
            self.add([1], session)

    def read(self) -> None:
        """Let the engine read all outputs that are in flight."""
        while self.in_flight:
            self._read()

    def abort(self, req_id: str) -> None:
        """Abort a request, as when its client disconnects."""
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def fail_loads(self, req_id: str) -> None:
        """Report, with the next output, that a block of the request failed to load."""
        blocks = self.scheduler.kv_cache_manager.get_block_ids(req_id)[0]
        self.failing = set(blocks[:1])

    def preempt_all(self) -> None:
        """Preempt every running request; the scheduler discards their tokens in flight."""
        self.faithful = False
        self._ask_scheduler(self.scheduler.reset_prefix_cache, True)

    def drop_drafts(self) -> None:
        """Schedule the next step without drafts."""
        for request in self.scheduler.running:
            request.spec_token_ids = []

    def step(self, arrives: bool = False, read_first: bool = False) -> None:
        """Schedule and run a step, and read the output that is due.

        Args:
            arrives: complete the copies in flight before the step begins.
            read_first: read them, too, before the step is scheduled.
        """
        if read_first:
            self.read()
        for _, _, copies in self.in_flight:
            for in_flight, runner in zip(copies, self.runners, strict=True):
                if not in_flight.query() and arrives and runner not in self.twins:
                    in_flight.complete()
        scheduled = self._ask_scheduler(self.scheduler.schedule)
        longest = max((r.num_prompt_tokens for r in self.scheduler.running), default=0)
        if longest > self.max_model_len:  # The fix stalled-requests refuses such a turn.
            raise SetAside("a session outgrows max_model_len")
        self._cut_outputs(scheduled)
        self._note_miscounted_prompts(scheduled)
        depth = max(0, len(self.in_flight) - 1)
        if scheduled.total_num_scheduled_tokens or scheduled.finished_req_ids:
            self.steps += 1
            with self._switched():
                self._run(scheduled)
        if scheduled.total_num_scheduled_tokens:
            depth = self.asynchronous + self.ahead
        while len(self.in_flight) > depth:
            self._read()

    @contextmanager
    def _switched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            if self.switch:
                patch.setenv("VLLM_READINESS", self.switch)
            yield

    def _ask_scheduler(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call upstream's scheduler; an error of its own sets the run aside."""
        try:
            return function(*arguments)
        except Exception as error:
            why = f"upstream's scheduler raises {type(error).__name__}"
            raise SetAside(why) from error

    def _cut_outputs(self, scheduled: Any) -> None:
        """Report shorter outputs to the runners, as after a failed load."""
        cached = scheduled.scheduled_cached_reqs
        for req_id, lost in self.cuts.items():
            row = self.ours.batch.req_id_to_index.get(req_id)
            if row is None or req_id not in cached.req_ids:
                continue
            at = cached.req_ids.index(req_id)
            cached.num_output_tokens[at] = max(0, cached.num_output_tokens[at] - lost)
            self.shortened.add(req_id)
            self.strays.add(req_id)
        self.cuts = {}
        if self.shortened & cached.resumed_req_ids:
            raise SetAside("the scheduler restores an output that the test has cut back")

    def _note_miscounted_prompts(self, scheduled: Any) -> None:
        """Note that stock may now count tokens of a prompt as output.

        It does where a request returns to the batch with more than one step in flight, after
        a preemption or a step without it.
        """
        cached = scheduled.scheduled_cached_reqs
        returned = {r for r in cached.req_ids if r not in self.stock.batch.req_id_to_index}
        for req_id in returned | cached.resumed_req_ids:
            reported = cached.num_output_tokens[cached.req_ids.index(req_id)]
            if reported > self.scheduler.requests[req_id].num_output_tokens:
                self.excuse = "stock counts prompt tokens as output of a request that returns"

    def run(self, steps: int, arrives: Callable[[], bool] = lambda: False) -> None:
        """Run some steps, or until no request is left."""
        for _ in range(steps):
            if not self.scheduler.requests and not self.in_flight:
                return
            self.step(arrives())

    def finish(self) -> None:
        """Run until no request is left.

        Raises:
            SetAside: upstream's scheduler does not come to an end.
        """
        self.run(400)
        if self.scheduler.requests:
            raise SetAside("upstream's scheduler does not come to an end")

    def _run(self, scheduled: Any) -> None:
        """Run a scheduled step in every runner, and compare them."""
        seed = self.random.randrange(2**31)
        if not scheduled.total_num_scheduled_tokens:
            for participant in self.runners:
                participant.runner._update_states(copy.deepcopy(scheduled))
            return
        (output, first), *others = self._run_all(pickle.dumps(scheduled), seed)
        if self.drafts:
            names = self.ours.batch.req_ids
            self.proposed = {name: draw_drafts(seed, name, self.drafts) for name in names}
        self.in_flight.append((scheduled, output, [first, *(second for _, second in others)]))
        compare_twins(self)
        try:
            for other, second in others:
                assert torch.equal(first.source, second.source)
                assert output.req_ids == other.req_ids
                assert output.sampled_token_ids == other.sampled_token_ids
            same_inputs(self.stock, self.ours)
            same_step(self.stock, self.ours)
            compare_histories(self)
        except AssertionError as error:
            if self.excuse is None:
                raise
            raise SetAside(self.excuse) from error

    def _run_all(
        self, scheduled: bytes, seed: int
    ) -> list[tuple[ModelRunnerOutput, SimulatedCopy]]:
        """Run a step in every runner, each with its own copy of the scheduler's output.

        Args:
            scheduled: the scheduler's output, pickled.
            seed: of the logits and of sampling.

        Raises:
            SetAside: stock raises an error, and every other runner raises the same. Where stock
                has lost a prompt that ours still has, the others raise nothing. Or stock computes
                from a placeholder, after a cut, and ours stops there.
        """
        first, *others = self.runners
        try:
            results = [first.step(pickle.loads(scheduled), seed)]
        except Exception as error:
            lost = prompt_is_lost(self.stock, self.ours)
            for other in others:
                with nullcontext() if lost else pytest.raises(type(error)):
                    other.step(pickle.loads(scheduled), seed)
            why = "loses a prompt" if lost else f"raises {type(error).__name__}"
            raise SetAside(f"stock's runner {why}") from error
        try:
            return results + [other.step(pickle.loads(scheduled), seed) for other in others]
        except IndexError as error:
            if not embeds_placeholder(self.stock, pickle.loads(scheduled)):
                raise
            raise SetAside("stock computes from a placeholder, and ours stops") from error

    def _read(self) -> None:
        """Read the oldest output in flight, and hand it to the scheduler."""
        scheduled, output, copies = self.in_flight.popleft()
        for in_flight, runner in zip(copies, self.runners, strict=True):
            if runner.reads:
                in_flight.synchronize()
        if self.asynchronous:
            output.sampled_token_ids = [
                [token for token in row if 0 <= token < VOCABULARY]
                for row in copies[0].source.tolist()
            ]
        if self.failing:
            output.kv_connector_output = KVConnectorOutput(invalid_block_ids=self.failing)
            self.failing = set()
        for req_id, spec in scheduled.scheduled_spec_decode_tokens.items():
            self.drafted += len(spec)
            tokens = output.sampled_token_ids[output.req_id_to_index[req_id]]
            self.accepted += max(len(tokens) - 1, 0)
        self._ask_scheduler(self.scheduler.update_from_output, scheduled, output)
        if self.drafts and not self.asynchronous:
            req_ids = [r for r in self.ours.batch.req_ids if r in self.scheduler.requests]
            tokens = [list(self.proposed[r]) for r in req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids, tokens))

    def truth(self, req_id: str) -> list[int]:
        """Return a request's tokens: the scheduler's, and those in flight to it."""
        request = self.scheduler.requests.get(req_id)
        tokens = list(request.output_token_ids) if request else []
        for _, output, copies in self.in_flight:
            row = output.req_id_to_index.get(req_id)
            if row is not None and not self.asynchronous:
                tokens += output.sampled_token_ids[row]
            elif row is not None:
                tokens += [t for t in copies[0].source[row].tolist() if 0 <= t < VOCABULARY]
        return tokens

    def held(self, row: int, count: int) -> list[int]:
        """Return the first ``count`` output tokens of one of our rows, from token_ids_cpu."""
        start = self.ours.batch.num_prompt_tokens[row]
        tokens: list[int] = self.ours.batch.token_ids_cpu[row, start : start + count].tolist()
        return tokens

    def outputs(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield each of our rows, its settled tokens and its number of placeholders.

        Nothing is yielded where upstream keeps the history.
        """
        if self.ours.batch.readiness.history is None:
            return
        for row, output in enumerate(self.ours.batch.req_output_token_ids):
            assert output is not None
            known = list(output)
            while known and known[-1] == -1:
                known.pop()
            yield row, known, len(output) - len(known)

    def settled(self) -> dict[str, list[int]]:
        """Wait for everything in flight, and return each request's tokens."""
        self.ours.batch.readiness.history.settle_now("test")
        for row, known, tail in self.outputs():
            assert tail == 0 or self.drafts
            assert self.held(row, len(known)) == known
        return {self.ours.batch.req_ids[row]: known for row, known, _ in self.outputs()}
