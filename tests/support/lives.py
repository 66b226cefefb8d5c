"""Lives of a batch: the real scheduler over two model runners, upstream's and ours.

Real are the scheduler, the input batch, the samplers, and of the runner the parts that
keep a request's state and sample. Simulated are the model (random logits, the same for
both), the drafter, and, for want of a device on the machines that this runs on, the copy
to the host: its buffer holds :data:`POISON` until its event completes.

A life may have twins: ours once more, with copies that arrive at once, and with copies that
arrive only when somebody waits for them, also where the engine has read another rank's. What
a consumer sees must be the same in all three.
"""

import copy
import itertools
import pickle
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from demo.model import write
from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils import cpu_triton_utils as cpu_kernels
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu.pool.late_interaction_runner import LateInteractionRunner

from support import modules
from support.processors import Spy

#: No token, and no placeholder: whoever reads a copy too early finds it.
POISON = -7_777_777
VOCABULARY = 37
#: Drafts are of the first few tokens, so that their penalties matter.
DRAFTED = 3
BLOCK = 4
#: What a subclass of a user's may bring along; see :class:`Half`.
OWN = ("sample_tokens", "_update_states", "batch", "sampler")
#: Whether a copy has arrived by now; asked at its start, at each query and at each step.
Arrives = Callable[[], bool]


class SetAside(Exception):
    """A life that cannot go on, or that stock is known to get wrong; its reason."""


class Copy:
    """A copy to the host, and its event."""

    def __init__(self, source: torch.Tensor, arrives: Arrives) -> None:
        self.source = source
        self.host = torch.full_like(source, POISON)
        self.done = False
        self.waits = 0
        self._arrives = arrives
        self.query()

    def complete(self) -> None:
        """The copy arrives."""
        self.done = True
        self.host.copy_(self.source)

    def query(self) -> bool:
        """Whether the copy has arrived."""
        if not self.done and self._arrives():
            self.complete()
        return self.done

    def synchronize(self) -> None:
        """Wait for the copy."""
        self.waits += not self.done
        self.complete()


class Half:
    """One of the runners: upstream's, ours, or a twin of ours.

    Args:
        load: modules.pristine or modules.overlaid.
        life: whose it is.
        arrives: whether its copies have arrived.
        reads: whether the engine reads its copies, and not another rank's.

    Attributes:
        logits: what the step's penalties and processors made of the logits, in order.
        sampled: what the step's sampler gave.
        waits: how often sampling waited for a copy that had not completed.
        spy: the logits processor of a life that has one.
    """

    def __init__(
        self,
        load: Callable[[str], Any],
        life: "Life",
        arrives: Arrives = lambda: False,
        reads: bool = True,
    ) -> None:
        self.life = life
        self.load = load
        self.arrives = arrives
        self.reads = reads
        runner_module = load(modules.RUNNER)
        # The drafter's own state, of which the simulated one has none.
        runner_module.update_ngram_gpu_tensors_incremental = lambda *_, **__: None
        runner_module.get_pp_group = lambda: SimpleNamespace(is_last_rank=True, world_size=1)
        rejection_module = load(modules.REJECTION_SAMPLER)
        for name in (
            "rejection_greedy_sample_kernel",
            "rejection_random_sample_kernel",
            "expand_kernel",
            "sample_recovered_tokens_kernel",
        ):
            setattr(rejection_module, name, getattr(cpu_kernels, name))
        self.sampler = self._sampler()
        self.rejection_sampler = rejection_module.RejectionSampler(self.sampler)
        self.logits: list[torch.Tensor] = []
        for module in (self.sampler, self.rejection_sampler):
            module.apply_logits_processors = self._recorded(module.apply_logits_processors)
        self.spy: Spy | None = None
        self.batch = self._batch_class()(
            max_num_reqs=life.max_num_seqs,
            max_model_len=life.max_model_len,
            max_num_batched_tokens=life.max_tokens_a_step,
            device=torch.device("cpu"),
            pin_memory=False,
            vocab_size=VOCABULARY,
            block_sizes=[BLOCK],
            kernel_block_sizes=[BLOCK],
            logitsprocs=self._logitsprocs(),
            logitsprocs_need_output_token_ids=self._declares() or life.reasoning is not None,
            num_spec_tokens=life.drafts,
            reasoning_config=life.reasoning,
        )
        self.runner = self._runner(runner_module)
        self.last: Copy | None = None
        self.sampled: Any = None
        self.waits = 0

    @property
    def overlaid(self) -> bool:
        """Whether it is ours."""
        return self.load is modules.overlaid

    def _sampler(self) -> Any:
        kind = self.load(modules.SAMPLER).Sampler
        if self.life.own == "sampler":
            kind = type("Sampler", (kind,), {"__module__": __name__})
        return kind()

    def _batch_class(self) -> Any:
        """The batch's class; a user's own does without our constructor."""
        kind = self.load(modules.INPUT_BATCH).InputBatch
        if self.life.own == "batch":
            stock = modules.pristine(modules.INPUT_BATCH).InputBatch
            return type("Batch", (kind,), {"__init__": stock.__init__, "__module__": __name__})
        return kind

    def _runner_class(self, module: Any) -> Any:
        """The runner's class; a user's own updates the batch by a copy of upstream's code."""
        kind = module.GPUModelRunner
        if self.life.own == "_update_states":
            stock = modules.pristine(modules.RUNNER).GPUModelRunner
            own = {"_update_states": stock._update_states, "__module__": __name__}
            return type("Runner", (kind,), own)
        return kind

    def _declares(self) -> bool:
        """Whether the batch is told that a processor reads outputs, as a user's is.

        One of an entry point is not declared. What it reads with our fix is what stock gives
        to one that is, which is the oracle then.
        """
        life = self.life
        fixed = life.switch != "-plugin-processors" and life.own != "batch"
        if life.processor == "plugin":
            return fixed and not self.overlaid
        return life.processor == "user"

    def _logitsprocs(self) -> Any:
        """Logits processors of its own."""
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.logits_processor.builtin import (
            LogitBiasLogitsProcessor,
            MinTokensLogitsProcessor,
        )

        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=self.life.max_num_seqs),
            speculative_config=None,
        )
        made = [
            kind(config, torch.device("cpu"), False)
            for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)
        ]
        if self.life.processor is not None:
            self.spy = Spy(config, torch.device("cpu"), False)
            made.append(self.spy)
        return LogitsProcessors(made)

    def _recorded(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*arguments: Any, **named: Any) -> torch.Tensor:
            result = function(*arguments, **named)
            self.logits.append(result.clone())
            return result

        return wrapper

    def _runner(self, module: Any) -> Any:
        life = self.life
        runner = object.__new__(self._runner_class(module))
        vars(runner).update(
            requests={},
            num_prompt_logprobs={},
            late_interaction_runner=LateInteractionRunner(),
            encoder_cache={},
            device=torch.device("cpu"),
            input_batch=self.batch,
            is_pooling_model=False,
            uses_mrope=False,
            uses_xdrope_dim=0,
            max_model_len=life.max_model_len,
            speculative_config=life.speculative,
            num_spec_tokens=life.drafts,
            use_async_scheduling=life.asynchronous,
            use_async_spec_decode=life.asynchronous and life.drafts > 0,
            prev_num_draft_tokens=SimpleNamespace(np=np.zeros(life.max_num_seqs, np.int32)),
            kv_cache_config=SimpleNamespace(kv_cache_groups=["one"]),
            reorder_batch_threshold=life.reorder_threshold,
            discard_request_mask=SimpleNamespace(
                np=np.zeros(life.max_num_seqs, bool),
                gpu=torch.zeros(life.max_num_seqs, dtype=torch.bool),
            ),
            routed_experts_initialized=False,
            sampled_token_ids_pinned_cpu=torch.empty((life.max_num_seqs, 1), dtype=torch.int64),
            transfer_event=SimpleNamespace(record=lambda: None, synchronize=lambda: None),
            sampler=self.sampler,
            rejection_sampler=self.rejection_sampler,
            _draft_token_ids=None,
            _draft_token_req_ids=None,
            _draft_probs=None,
            _draft_prob_req_ids=None,
            valid_sampled_token_count_event=None,
            valid_sampled_token_count_cpu=None,
            _num_valid_draft_tokens_event=SimpleNamespace(synchronize=lambda: None),
            _num_valid_draft_tokens_cpu=torch.zeros(life.max_num_seqs, dtype=torch.int32),
            token_ids_gpu_tensor=None,
            num_tokens_no_spec_gpu=torch.zeros(life.max_num_seqs, dtype=torch.int32),
            _ngram_pinned_idx_buf=None,
            _ngram_pinned_val_buf=None,
        )
        return runner

    def step(self, scheduled: Any, seed: int) -> "tuple[ModelRunnerOutput, Copy]":
        """The state-keeping and sampling parts of execute_model and sample_tokens."""
        runner, batch, life = self.runner, self.batch, self.life
        corrections = runner._update_states(scheduled)
        count = batch.num_reqs
        scheduled_tokens = np.array([scheduled.num_scheduled_tokens[r] for r in batch.req_ids])
        lengths = batch.num_computed_tokens_cpu[:count] + scheduled_tokens
        known = np.array([runner.requests[r].num_tokens for r in batch.req_ids])
        runner.discard_request_mask.np[:count] = lengths < known
        runner.discard_request_mask.gpu[:count] = torch.from_numpy(lengths < known)
        drafts = self._drafts(scheduled)
        if corrections is not None:
            corrections()

        positions = count + (sum(drafts.num_draft_tokens) if drafts else 0)
        logits = life.random_logits(seed, positions)
        life.constrain(scheduled, batch, logits)
        self.logits.clear()
        torch.default_generator.manual_seed(seed)
        waited = self.last.waits if self.last else 0
        with torch.compiler.set_stance("force_eager"):  # it would compile every shape
            sampled = self.sampled = runner._sample(logits, drafts)
        if self.overlaid and life.own != "sample_tokens":
            ids, discarded = sampled.sampled_token_ids, runner.discard_request_mask.gpu
            batch.readiness.observe_sampled(ids, discarded)
        self.waits += (self.last.waits if self.last else 0) - waited
        ids = sampled.sampled_token_ids
        batch.prev_sampled_token_ids = None
        self._propose(ids, seed)
        (_, _, tokens, _, req_ids, rows, invalid) = runner._bookkeeping_sync(
            scheduled, sampled, logits, torch.empty(positions, 1), positions
        )
        output = ModelRunnerOutput(req_ids, rows, tokens)
        ids = ids.clone()
        if life.asynchronous:
            ids[invalid] = -1  # what get_output clears
        this = Copy(ids, self.arrives)
        if life.asynchronous:
            batch.set_async_sampled_token_ids(this.host, this)
        self.last = this
        return output, this

    def _drafts(self, scheduled: Any) -> SpecDecodeMetadata | None:
        """The step's drafts, as the device knows them."""
        spec = scheduled.scheduled_spec_decode_tokens
        if not spec:
            return None
        ids = []
        for req_id in self.batch.req_ids:
            tokens = list(spec.get(req_id, ()))
            if tokens and self.life.asynchronous:
                # Of a request that was not in the last step, nobody has proposed any.
                proposed = self.life.proposed.get(req_id, [-1] * len(tokens))
                tokens = proposed[: len(tokens)]
            ids.append(tokens)
        made = SpecDecodeMetadata.make_dummy(ids, torch.device("cpu"))
        counts = torch.tensor([len(tokens) for tokens in ids])
        ends = (counts + 1).cumsum(0)
        made.bonus_logits_indices = (ends - 1).to(torch.int32)
        starts = torch.repeat_interleave(ends - counts - 1, counts)
        within = torch.cat([torch.arange(len(tokens)) for tokens in ids])
        made.target_logits_indices = (starts + within).to(torch.int32)
        return made

    def _propose(self, ids: torch.Tensor, seed: int) -> None:
        life, runner, batch = self.life, self.runner, self.batch
        if not life.drafts:
            return
        valid = ((ids >= 0) & (ids < VOCABULARY)).sum(1)
        discarded = runner.discard_request_mask.gpu[: len(ids)]
        valid = torch.where(discarded, 0, valid)
        runner._draft_token_ids = [list(life.propose(seed, req_id)) for req_id in batch.req_ids]
        if not life.asynchronous:
            return
        runner._draft_token_req_ids = batch.req_ids.copy()
        for row, req_id in enumerate(batch.req_ids):
            runner._num_valid_draft_tokens_cpu[row] = life.valid(seed, req_id)
        runner.valid_sampled_token_count_event = SimpleNamespace(synchronize=lambda: None)
        runner.valid_sampled_token_count_cpu = valid.clamp(min=1)
        last = ids.gather(1, (valid.clamp(min=1) - 1).unsqueeze(1))
        batch.prev_sampled_token_ids = last


class Life:
    """A scheduler, and both runners in step with it.

    Args:
        seed: everything random in the simulated parts comes from it.
        asynchronous: schedule one step ahead of the outputs.
        drafts: draft tokens a request and step; 0 for none.
        processor: give each half a logits processor, which reads the history: one that is
            named when the engine is made ("user"), or an entry point's ("plugin").
        trimmed: of the drafts that are scheduled, the runner drops some, often all
            (ngram_gpu, which finds no match).
        markers: the start and the end marker of thinking; requests may then have a budget.
        ahead: how many steps more the scheduler is ahead of the outputs, as with as many
            more micro-batches in a pipeline.
        own: what a user's subclasses bring along, one of OWN, or None.
        switch: the value of VLLM_READINESS; empty for the default.
        arrives: whether a copy of upstream's half or ours has arrived.
        twins: whether ours lives twice more, with all copies early, and late.
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
        self.reasoning = _reasoning(markers)
        self.speculative = _speculative(drafts, trimmed)
        self.scheduler = _scheduler(self, num_blocks)
        self.ahead = ahead
        self.own = own
        self.switch = switch
        self.stock = Half(modules.pristine, self, arrives)
        with pytest.MonkeyPatch.context() as patch:
            if switch:
                patch.setenv("VLLM_READINESS", switch)
            self.ours = Half(modules.overlaid, self, arrives)
            self.twins = []
            if twins:
                self.twins.append(Half(modules.overlaid, self, lambda: True))
                # With drafts a rank that lags takes those that were rejected for a cut, and waits.
                late = Half(modules.overlaid, self, lambda: False, reads=drafts > 0)
                self.twins.append(late)
        self.halves = [self.stock, self.ours, *self.twins]
        self.in_flight: deque[tuple[Any, Any, list[Copy]]] = deque()
        self.proposed: dict[str, list[int]] = {}
        self.steps = 0
        self.preemptions = 0
        self.drafted = 0
        self.accepted = 0
        self.added = 0
        self.failing: set[int] = set()
        self.structured: set[str] = set()
        #: To cut outputs back at the next step, by how many tokens.
        self.cuts: dict[str, int] = {}
        #: Requests that were, of which the scheduler still has the whole output.
        self.shortened: set[str] = set()
        #: Whether the scheduler knows what the runners do. With more than two steps in flight
        #: it loses the tokens of a request that it preempts.
        self.faithful = not (asynchronous and ahead)
        #: Requests of which the scheduler knows something else than the runners.
        self.strays: set[str] = set()
        #: Why stock may be wrong from here on; None: it is not.
        self.excuse: str | None = None

    def random_logits(self, seed: int, rows: int) -> torch.Tensor:
        """What the model would give, the same for both halves."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn((rows, VOCABULARY), generator=generator) * 2
        if self.drafts or self.reasoning:
            logits[:, :DRAFTED] += 6.0  # or hardly a draft, or marker, would come up
        return logits

    def propose(self, seed: int, req_id: str) -> list[int]:
        """Draft tokens for a request, the same for both halves."""
        chooser = random.Random(f"{seed} {req_id}")
        return [chooser.randrange(DRAFTED) for _ in range(self.drafts)]

    def valid(self, seed: int, req_id: str) -> int:
        """How many of the drafts for a request a runner that trims leaves."""
        chooser = random.Random(f"{seed} {req_id} valid")
        return chooser.choice([0, 0, chooser.randint(0, self.drafts)]) if seed % 3 else 0

    def add(self, prompt: list[int], req_id: str | None = None, **params: Any) -> str:
        """A request arrives."""
        req_id = req_id or f"r{self.added}"
        self.added += 1
        bad_words = params.pop("bad_words", None)
        resumable = params.pop("resumable", False)
        made = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})
        made._bad_words_token_ids = bad_words
        made._all_stop_token_ids |= set(made.stop_token_ids or ())
        request = Request(
            request_id=req_id,
            prompt_token_ids=prompt,
            sampling_params=made,
            pooling_params=None,
            arrival_time=self.added,
            resumable=resumable,
        )
        self.scheduler.add_request(request)
        return req_id

    def close(self, session: str) -> None:
        """A streaming session is over: no input follows."""
        if session in self.scheduler.requests:
            self.add([1], session)

    def read(self) -> None:
        """The engine reads all that is in flight."""
        while self.in_flight:
            self._read()

    def abort(self, req_id: str) -> None:
        """A client goes away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def fail_loads(self, req_id: str) -> None:
        """The next output to be read says that a block of the request failed to load."""
        blocks = self.scheduler.kv_cache_manager.get_block_ids(req_id)[0]
        self.failing = set(blocks[:1])

    def preempt_all(self) -> None:
        """Preempt every running request, with its tokens in flight.

        The scheduler then discards what it would otherwise have been given.
        """
        self.faithful = False
        self._scheduled(self.scheduler.reset_prefix_cache, True)

    def drop_drafts(self) -> None:
        """The next step is scheduled without drafts."""
        for request in self.scheduler.running:
            request.spec_token_ids = []

    def constrain(self, scheduled: Any, batch: Any, logits: torch.Tensor) -> None:
        """Structured output: every second token is forbidden to these requests."""
        if not self.structured:
            return
        spec = scheduled.scheduled_spec_decode_tokens
        req_ids = [r for r in batch.req_ids if r in self.structured]
        rows = sum(1 + len(spec.get(r, ())) for r in req_ids)
        words = -(-VOCABULARY // 32)
        mask = np.full((rows, words), 0x55555555, dtype=np.int32)
        apply_grammar_bitmask(scheduled, GrammarOutput(req_ids, mask), batch, logits)

    def step(self, arrives: bool = False, read_first: bool = False) -> None:
        """Schedule and run one step, and read the one before it (async) or this one.

        Args:
            arrives: the copy that is in flight completes before the step begins.
            read_first: the engine reads it, too, before it schedules the step.
        """
        if read_first:
            self.read()
        for _, _, copies in self.in_flight:
            for one, half in zip(copies, self.halves, strict=True):
                if one.query() is False and arrives and half not in self.twins:
                    one.complete()
        scheduled = self._scheduled(self.scheduler.schedule)
        self._cut(scheduled)
        self._doubt(scheduled)
        depth = max(0, len(self.in_flight) - 1)
        if scheduled.total_num_scheduled_tokens or scheduled.finished_req_ids:
            self.steps += 1
            self._run(scheduled)
        if scheduled.total_num_scheduled_tokens:
            depth = self.asynchronous + self.ahead
        while len(self.in_flight) > depth:
            self._read()

    def _scheduled(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What upstream's scheduler gives, which knows of stock's outputs alone."""
        try:
            return function(*arguments)
        except Exception as error:
            why = f"upstream's scheduler raises {type(error).__name__}"
            raise SetAside(why) from error

    def _cut(self, scheduled: Any) -> None:
        """Cut outputs back, as after a failed load, in what the runners are told."""
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
            raise SetAside("the scheduler brings back what the test has cut off")

    def _doubt(self, scheduled: Any) -> None:
        """Stock takes as many tokens for outputs as it is told, also where they are a prompt's.

        That is so where a request comes back to the batch with more than one step in flight:
        it was preempted, or left out of a step.
        """
        cached = scheduled.scheduled_cached_reqs
        back = {r for r in cached.req_ids if r not in self.stock.batch.req_id_to_index}
        for req_id in back | cached.resumed_req_ids:
            told = cached.num_output_tokens[cached.req_ids.index(req_id)]
            if told > self.scheduler.requests[req_id].num_output_tokens:
                self.excuse = "stock takes prompt tokens for outputs of what comes back"

    def run(self, steps: int, arrives: Callable[[], bool] = lambda: False) -> None:
        """Run some steps, or until no request is left."""
        for _ in range(steps):
            if not self.scheduler.requests and not self.in_flight:
                return
            self.step(arrives())

    def finish(self, most: int = 400) -> None:
        """Run until no request is left.

        Raises:
            SetAside: upstream's scheduler does not come to an end.
        """
        self.run(most)
        if self.scheduler.requests:
            raise SetAside("upstream's scheduler does not come to an end")

    def _run(self, scheduled: Any) -> None:
        seed = self.random.randrange(2**31)
        preempted = scheduled.preempted_req_ids or ()
        self.preemptions += len(preempted)
        if not scheduled.total_num_scheduled_tokens:
            for half in self.halves:
                half.runner._update_states(copy.deepcopy(scheduled))
            return
        (output, first), *others = self._stepped(pickle.dumps(scheduled), seed)
        if self.drafts:
            self.proposed = {r: self.propose(seed, r) for r in self.ours.batch.req_ids}
        self.in_flight.append((scheduled, output, [first, *(copy for _, copy in others)]))
        self._compare_twins()
        try:
            for other, second in others:
                assert torch.equal(first.source, second.source)
                assert output.req_ids == other.req_ids
                assert output.sampled_token_ids == other.sampled_token_ids
            self._compare()
        except AssertionError as error:
            if self.excuse is None:
                raise
            raise SetAside(self.excuse) from error

    def _stepped(self, scheduled: bytes, seed: int) -> list[tuple[ModelRunnerOutput, Copy]]:
        """What each half makes of a step.

        Args:
            scheduled: the scheduler's output, pickled: each half has one of its own.
            seed: of what is random.

        Raises:
            SetAside: each of them raises the same.
        """
        first, *others = self.halves
        try:
            results = [first.step(pickle.loads(scheduled), seed)]
        except Exception as error:
            for half in others:
                with pytest.raises(type(error)):
                    half.step(pickle.loads(scheduled), seed)
            raise SetAside(f"stock's runner raises {type(error).__name__}") from error
        return results + [half.step(pickle.loads(scheduled), seed) for half in others]

    def _read(self) -> None:
        scheduled, output, copies = self.in_flight.popleft()
        for one, half in zip(copies, self.halves, strict=True):
            if half.reads:
                one.synchronize()
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
        self._scheduled(self.scheduler.update_from_output, scheduled, output)
        if self.drafts and not self.asynchronous:
            req_ids = [r for r in self.ours.batch.req_ids if r in self.scheduler.requests]
            tokens = [list(self.proposed[r]) for r in req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids, tokens))

    def _compare(self) -> None:
        """Logits bit for bit, and what is always true of our history."""
        _same(self.stock, self.ours)
        for row, known, tail in self.outputs():
            assert -1 not in known
            assert POISON not in known
            req_id = self.ours.batch.req_ids[row]
            truth = self.truth(req_id)
            faithful = self.faithful and req_id not in self.strays
            assert not faithful or known == truth[: len(known)], (req_id, known, truth)
            assert tail <= len(self.ours.batch.readiness.history.in_flight) * (1 + self.drafts)
            # Where the runner trims drafts, a placeholder may be written over what a cut left.
            assert (self.trimmed and req_id in self.strays) or self.held(row, len(known)) == known
            start = self.ours.batch.num_prompt_tokens[row]
            # Where the runner trims drafts, upstream may mark a place too early.
            written = len(known) + bool(tail and not self.trimmed)
            assert self.ours.batch.is_token_ids[row, start : start + written].all()

    def _compare_twins(self) -> None:
        """What consumers see is the same whether copies come early or late."""
        for twin in self.twins:
            _same(self.ours, twin)
            mine, theirs = self.ours.batch, twin.batch
            if self.drafts:
                continue  # nobody is given the lists then, which a cut may settle early
            assert mine.req_output_token_ids == theirs.req_output_token_ids
            ends = mine.num_tokens_no_spec[: mine.num_reqs]
            assert (ends == theirs.num_tokens_no_spec[: mine.num_reqs]).all()
            for row, end in enumerate(ends):
                assert (mine.token_ids_cpu[row, :end] == theirs.token_ids_cpu[row, :end]).all()

    def truth(self, req_id: str) -> list[int]:
        """A request's tokens: what the scheduler has, and what is on its way to it."""
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
        """The first output tokens of one of our requests, as token_ids_cpu has them."""
        start = self.ours.batch.num_prompt_tokens[row]
        tokens: list[int] = self.ours.batch.token_ids_cpu[row, start : start + count].tolist()
        return tokens

    def outputs(self) -> Iterator[tuple[int, list[int], int]]:
        """Row, settled tokens and number of placeholders of each of our requests.

        None where upstream keeps the history.
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
        """Each request's tokens, once everything in flight has been waited for."""
        self.ours.batch.readiness.history.settle_now("test")
        for row, known, tail in self.outputs():
            assert tail == 0 or self.drafts
            assert self.held(row, len(known)) == known
        return {self.ours.batch.req_ids[row]: known for row, known, _ in self.outputs()}


def _same(one: Half, other: Half) -> None:
    """Logits and logprobs bit for bit, and what the processors were given."""
    assert len(one.logits) == len(other.logits)
    for mine, theirs in zip(one.logits, other.logits, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
    mine, theirs = (half.sampled.logprobs_tensors for half in (one, other))
    assert (mine is None) == (theirs is None)
    for part, like in zip((mine or ())[:3], (theirs or ())[:3], strict=True):
        assert torch.equal(part.view(torch.int32), like.view(torch.int32))
    if one.spy is not None and other.spy is not None:
        assert one.spy.seen == other.spy.seen


def no_room_for_a_third(monkeypatch: pytest.MonkeyPatch, slots: Any) -> None:
    """The third slot that is made finds no room on the device."""
    whole, made = slots._build_slot, itertools.count(1)

    def no_third(row: int) -> torch.Tensor:
        if next(made) == 3:
            raise torch.OutOfMemoryError
        slot: torch.Tensor = whole(row)
        return slot

    monkeypatch.setattr(slots, "_build_slot", no_third)


def _reasoning(markers: tuple[list[int], list[int]] | None) -> Any:
    if markers is None:
        return None
    start, end = markers
    return SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)


def _speculative(drafts: int, trimmed: bool) -> Any:
    if not drafts:
        return None
    method = "ngram_gpu" if trimmed else "ngram"
    return SpeculativeConfig(method=method, num_speculative_tokens=drafts, prompt_lookup_max=2)


@cache
def _model() -> ModelConfig:
    path = write(Path(tempfile.mkdtemp(prefix="model-")), vocab_size=VOCABULARY)
    return ModelConfig(model=str(path), skip_tokenizer_init=True, seed=0)


def _scheduler(life: Life, num_blocks: int) -> Any:
    model = copy.copy(_model())
    cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    cache_config.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=model,
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=life.max_num_seqs,
            max_num_batched_tokens=life.max_tokens_a_step,
            max_model_len=life.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        speculative_config=life.speculative,
    )
    config.model_config.max_model_len = life.max_model_len
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv_cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], attention)])
    kind = AsyncScheduler if life.asynchronous else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=kv_cache,
        block_size=BLOCK,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )
