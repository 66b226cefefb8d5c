"""Lives of a batch: the real scheduler over two model runners, upstream's and ours.

Real are the scheduler, the input batch, the samplers, and of the runner the parts that
keep a request's state and sample. Simulated are the model (random logits, the same for
both), the drafter, and, for want of a device on the machines that this runs on, the copy
to the host: its buffer holds :data:`POISON` until its event completes.
"""

import copy
import itertools
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
from support.processors import ForbidLatest

#: No token, and no placeholder: whoever reads a copy too early finds it.
POISON = -7_777_777
VOCABULARY = 37
#: Drafts are of the first few tokens, so that their penalties matter.
DRAFTED = 3
BLOCK = 4


class Copy:
    """A copy to the host, and its event."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source.clone()
        self.host = torch.full_like(source, POISON)
        self.done = False
        self.waits = 0

    def complete(self) -> None:
        """The copy arrives."""
        self.done = True
        self.host.copy_(self.source)

    def query(self) -> bool:
        """Whether the copy has arrived."""
        return self.done

    def synchronize(self) -> None:
        """Wait for the copy."""
        self.waits += not self.done
        self.complete()


class Half:
    """One of the two runners.

    Attributes:
        logits: what the step's penalties and processors made of the logits, in order.
        waits: how often sampling waited for a copy that had not completed.
    """

    def __init__(self, load: Callable[[str], Any], life: "Life") -> None:
        self.life = life
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
        self.sampler = load(modules.SAMPLER).Sampler()
        self.rejection_sampler = rejection_module.RejectionSampler(self.sampler)
        self.logits: list[torch.Tensor] = []
        for module in (self.sampler, self.rejection_sampler):
            module.apply_logits_processors = self._recorded(module.apply_logits_processors)
        self.batch = load(modules.INPUT_BATCH).InputBatch(
            max_num_reqs=life.max_num_seqs,
            max_model_len=life.max_model_len,
            max_num_batched_tokens=life.max_tokens_a_step,
            device=torch.device("cpu"),
            pin_memory=False,
            vocab_size=VOCABULARY,
            block_sizes=[BLOCK],
            kernel_block_sizes=[BLOCK],
            logitsprocs=life.logitsprocs(),
            logitsprocs_need_output_token_ids=life.processor or life.reasoning is not None,
            num_spec_tokens=life.drafts,
            reasoning_config=life.reasoning,
        )
        self.runner = self._runner(runner_module)
        self.last: Copy | None = None
        self.waits = 0

    def _recorded(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*arguments: Any, **named: Any) -> torch.Tensor:
            result = function(*arguments, **named)
            self.logits.append(result.clone())
            return result

        return wrapper

    def _runner(self, module: Any) -> Any:
        life = self.life
        runner = object.__new__(module.GPUModelRunner)
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
        torch.manual_seed(seed)
        waited = self.last.waits if self.last else 0
        sampled = runner._sample(logits, drafts)
        if hasattr(batch, "readiness"):
            ids, discarded = sampled.sampled_token_ids, runner.discard_request_mask.gpu
            batch.readiness.count(ids, discarded)
        self.waits += (self.last.waits if self.last else 0) - waited
        ids = sampled.sampled_token_ids
        batch.prev_sampled_token_ids = None
        self._propose(ids, seed)
        (_, _, tokens, _, req_ids, rows, invalid) = runner._bookkeeping_sync(
            scheduled, sampled, logits, torch.empty(positions, 1), positions
        )
        output = ModelRunnerOutput(req_ids, rows, tokens)
        this = Copy(ids)
        if life.asynchronous:
            this.source[invalid] = -1  # what get_output clears
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
        processor: give each half a user's logits processor, which reads the history.
        trimmed: of the drafts that are scheduled, the runner drops some, often all
            (ngram_gpu, which finds no match).
        markers: the start and the end marker of thinking; requests may then have a budget.
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
        processor: bool = False,
        trimmed: bool = False,
        markers: tuple[list[int], list[int]] | None = None,
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
        self.stock = Half(modules.pristine, self)
        self.ours = Half(modules.overlaid, self)
        self.in_flight: deque[tuple[Any, Any, list[Copy]]] = deque()
        self.proposed: dict[str, list[int]] = {}
        self.steps = 0
        self.preemptions = 0
        self.drafted = 0
        self.accepted = 0
        self.added = 0
        self.failing: set[int] = set()
        self.structured: set[str] = set()
        self.faithful = True

    def logitsprocs(self) -> Any:
        """Logits processors of a half's own."""
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.logits_processor.builtin import (
            LogitBiasLogitsProcessor,
            MinTokensLogitsProcessor,
        )

        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=self.max_num_seqs),
            speculative_config=None,
        )
        made = [
            kind(config, torch.device("cpu"), False)
            for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)
        ]
        if self.processor:
            made.append(ForbidLatest(config, torch.device("cpu"), False))
        return LogitsProcessors(made)

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
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

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
        while read_first and self.in_flight:
            self._read()
        if arrives:
            for _, _, copies in self.in_flight:
                for one in copies:
                    one.complete()
        scheduled = self.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens or scheduled.finished_req_ids:
            self.steps += 1
            self._run(scheduled)
        depth = 1 if self.asynchronous and scheduled.total_num_scheduled_tokens else 0
        while len(self.in_flight) > depth:
            self._read()

    def run(self, steps: int, arrives: Callable[[], bool] = lambda: False) -> None:
        """Run some steps, or until no request is left."""
        for _ in range(steps):
            if not self.scheduler.requests and not self.in_flight:
                return
            self.step(arrives())

    def finish(self) -> None:
        """Run until no request is left."""
        self.run(400)
        assert not self.scheduler.requests

    def _run(self, scheduled: Any) -> None:
        seed = self.random.randrange(2**31)
        preempted = scheduled.preempted_req_ids or ()
        self.preemptions += len(preempted)
        if not scheduled.total_num_scheduled_tokens:
            for half in (self.stock, self.ours):
                half.runner._update_states(copy.deepcopy(scheduled))
            return
        results = [half.step(copy.deepcopy(scheduled), seed) for half in (self.stock, self.ours)]
        if self.drafts:
            self.proposed = {r: self.propose(seed, r) for r in self.ours.batch.req_ids}
        (output, first), (other, second) = results
        assert torch.equal(first.source, second.source)
        assert output.req_ids == other.req_ids
        assert output.sampled_token_ids == other.sampled_token_ids
        self.in_flight.append((scheduled, output, [first, second]))
        self._compare()

    def _read(self) -> None:
        scheduled, output, copies = self.in_flight.popleft()
        for one in copies:
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
        self.scheduler.update_from_output(scheduled, output)
        if self.drafts and not self.asynchronous:
            req_ids = [r for r in self.ours.batch.req_ids if r in self.scheduler.requests]
            tokens = [list(self.proposed[r]) for r in req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids, tokens))

    def _compare(self) -> None:
        """Logits bit for bit, and what is always true of our history."""
        assert len(self.stock.logits) == len(self.ours.logits)
        for theirs, ours in zip(self.stock.logits, self.ours.logits, strict=True):
            assert torch.equal(theirs.view(torch.int32), ours.view(torch.int32))
        for row, known, tail in self.outputs():
            assert -1 not in known
            assert POISON not in known
            truth = self.truth(self.ours.batch.req_ids[row])
            assert not self.faithful or known == truth[: len(known)]
            assert tail <= len(self.ours.batch.readiness.history.in_flight) * (1 + self.drafts)
            assert self.held(row, len(known)) == known
            start = self.ours.batch.num_prompt_tokens[row]
            # Where the runner trims drafts, upstream may mark a place too early.
            written = len(known) + bool(tail and not self.trimmed)
            assert self.ours.batch.is_token_ids[row, start : start + written].all()

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
        """Row, settled tokens and number of placeholders of each of our requests."""
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


def no_room_for_a_third(monkeypatch: pytest.MonkeyPatch, slots: Any) -> None:
    """The third slot that is made finds no room on the device."""
    whole, made = slots._count_history, itertools.count(1)

    def no_third(row: int) -> torch.Tensor:
        if next(made) == 3:
            raise torch.OutOfMemoryError
        slot: torch.Tensor = whole(row)
        return slot

    monkeypatch.setattr(slots, "_count_history", no_third)


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
def _model() -> Path:
    return write(Path(tempfile.mkdtemp(prefix="model-")), vocab_size=VOCABULARY)


def _scheduler(life: Life, num_blocks: int) -> Any:
    model = ModelConfig(model=str(_model()), skip_tokenizer_init=True, seed=0)
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
