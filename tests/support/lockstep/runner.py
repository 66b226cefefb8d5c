"""A runner in lockstep with others: upstream's or ours, without a model or a device.

Real are the input batch, the samplers, and the methods of the runner that keep requests'
state and sample. Simulated are the logits (random, the same for all runners), the drafter,
and the copies to the host.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils import cpu_triton_utils as cpu_kernels
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu.pool.late_interaction_runner import LateInteractionRunner

from support import modules
from support.lockstep import inputs
from support.lockstep.copies import Arrives, SimulatedCopy
from support.lockstep.model import constrain, draw_drafts, draw_kept_drafts, draw_logits
from support.processors import SPIES, Spy
from support.sampling import KERNELS, Expand
from support.scheduling import BLOCK, VOCABULARY

if TYPE_CHECKING:
    from support.lockstep.run import LockstepRun

#: What a user's subclass may bring along; see :class:`RunnerUnderTest`.
OWN = ("sample_tokens", "_update_states", "batch", "sampler")


class RunnerUnderTest:
    """Upstream's runner, ours, or a twin of ours.

    Args:
        load: modules.pristine or modules.overlaid.
        lockstep: the run that it belongs to. Its ``own`` names the part, one of :data:`OWN`,
            that a user's subclass replaces.
        arrives: decides when its copies arrive.
        reads: whether the engine reads its copies; otherwise it reads another rank's.

    Attributes:
        logits: the step's logits after penalties and processors, in order.
        sampled: the step's sampler output.
        logits_indices: int32 [rows], where the step's logits are; None with drafts, with which
            inputs are not prepared.
        waits: number of times that sampling waited for a copy that had not arrived.
        spy: the user's logits processor, if the run has one.
    """

    def __init__(
        self,
        load: Callable[[str], Any],
        lockstep: "LockstepRun",
        arrives: Arrives = lambda: False,
        reads: bool = True,
    ) -> None:
        self.lockstep = lockstep
        self.load = load
        self.arrives = arrives
        self.reads = reads
        runner_module = load(modules.RUNNER)
        # The drafter's own state, of which the simulated one has none.
        runner_module.update_ngram_gpu_tensors_incremental = lambda *_, **__: None
        runner_module.get_pp_group = lambda: SimpleNamespace(
            is_first_rank=True, is_last_rank=True, world_size=1
        )
        rejection_module = load(modules.REJECTION_SAMPLER)
        for name in KERNELS:
            setattr(rejection_module, name, getattr(cpu_kernels, name))
        rejection_module.expand_kernel = Expand()
        self.sampler = self._sampler()
        self.rejection_sampler = rejection_module.RejectionSampler(self.sampler)
        self.logits: list[torch.Tensor] = []
        for module in (self.sampler, self.rejection_sampler):
            module.apply_logits_processors = self._recorded(module.apply_logits_processors)
        self.spy: Spy | None = None
        self.batch = self._batch_class()(
            max_num_reqs=lockstep.max_num_seqs,
            max_model_len=lockstep.max_model_len,
            max_num_batched_tokens=lockstep.max_tokens_a_step,
            device=torch.device("cpu"),
            pin_memory=False,
            vocab_size=VOCABULARY,
            block_sizes=[BLOCK],
            kernel_block_sizes=[BLOCK],
            logitsprocs=self._logitsprocs(),
            logitsprocs_need_output_token_ids=self._declares() or lockstep.reasoning is not None,
            num_spec_tokens=lockstep.drafts,
            reasoning_config=lockstep.reasoning,
        )
        self.runner = self._runner(runner_module)
        self.last: SimulatedCopy | None = None
        self.sampled: Any = None
        self.logits_indices: torch.Tensor | None = None
        self.waits = 0

    @property
    def overlaid(self) -> bool:
        """Whether this is our runner."""
        return self.load is modules.overlaid

    def _sampler(self) -> Any:
        kind = self.load(modules.SAMPLER).Sampler
        if self.lockstep.own == "sampler":
            kind = type("Sampler", (kind,), {"__module__": __name__})
        return kind()

    def _batch_class(self) -> Any:
        """Return the batch's class; a user's subclass does not call our constructor."""
        kind = self.load(modules.INPUT_BATCH).InputBatch
        if self.lockstep.own == "batch":
            stock = modules.pristine(modules.INPUT_BATCH).InputBatch
            return type("Batch", (kind,), {"__init__": stock.__init__, "__module__": __name__})
        return kind

    def _runner_class(self, module: Any) -> Any:
        """Return the runner's class; a user's subclass has upstream's ``_update_states``."""
        kind = module.GPUModelRunner
        if self.lockstep.own == "_update_states":
            stock = modules.pristine(modules.RUNNER).GPUModelRunner
            own = {"_update_states": stock._update_states, "__module__": __name__}
            return type("Runner", (kind,), own)
        return kind

    def _declares(self) -> bool:
        """Return whether the batch is told that a processor reads outputs.

        Stock does not declare an entry point's processor, and our fix does. Stock with the
        declaration is the oracle for it.
        """
        fixed = self.lockstep.switch != "-plugin-processors" and self.lockstep.own != "batch"
        if self.lockstep.processor == "plugin":
            return fixed and not self.overlaid
        return self.lockstep.processor is not None

    def _logitsprocs(self) -> Any:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=self.lockstep.max_num_seqs),
            speculative_config=None,
        )
        processors: list[Any] = [
            kind(config, torch.device("cpu"), False)
            for kind in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)
        ]
        if self.lockstep.processor is not None:
            self.spy = SPIES[self.lockstep.processor](config, torch.device("cpu"), False)
            processors.append(self.spy)
        return LogitsProcessors(processors)

    def _recorded(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*arguments: Any, **named: Any) -> torch.Tensor:
            result = function(*arguments, **named)
            self.logits.append(result.clone())
            return result

        return wrapper

    def _runner(self, module: Any) -> Any:
        lockstep = self.lockstep
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
            max_model_len=lockstep.max_model_len,
            speculative_config=lockstep.speculative,
            num_spec_tokens=lockstep.drafts,
            use_async_scheduling=lockstep.asynchronous,
            use_async_spec_decode=lockstep.asynchronous and lockstep.drafts > 0,
            reorder_batch_threshold=lockstep.reorder_threshold,
            **inputs.buffers(lockstep.max_num_seqs, lockstep.max_tokens_a_step),
            routed_experts_initialized=False,
            sampled_token_ids_pinned_cpu=torch.empty((lockstep.max_num_seqs, 1), dtype=torch.int64),
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
            _num_valid_draft_tokens_cpu=torch.zeros(lockstep.max_num_seqs, dtype=torch.int32),
            token_ids_gpu_tensor=None,
            num_tokens_no_spec_gpu=torch.zeros(lockstep.max_num_seqs, dtype=torch.int32),
            _ngram_pinned_idx_buf=None,
            _ngram_pinned_val_buf=None,
        )
        return runner

    def step(self, scheduled: Any, seed: int) -> tuple[ModelRunnerOutput, SimulatedCopy]:
        """Run the parts of execute_model and sample_tokens that keep state and sample.

        Args:
            scheduled: the scheduler's output.
            seed: of the logits and of sampling.
        """
        runner, batch, lockstep = self.runner, self.batch, self.lockstep
        corrections = runner._update_states(scheduled)
        count = batch.num_reqs
        lengths = [scheduled.num_scheduled_tokens[r] for r in batch.req_ids]
        if lockstep.drafts:
            ends = batch.num_computed_tokens_cpu[:count] + np.array(lengths)
            known = np.array([runner.requests[r].num_tokens for r in batch.req_ids])
            runner.discard_request_mask.np[:count] = ends < known
            runner.discard_request_mask.copy_to_gpu(count)
            if (live := getattr(batch, "readiness", None)) is not None:
                live.check_inputs(runner, scheduled, np.array(lengths))
        else:
            self.logits_indices, _ = runner._prepare_inputs(scheduled, np.array(lengths, np.int32))
        drafts = self._drafts(scheduled)
        if corrections is not None:
            corrections()

        positions = count + (sum(drafts.num_draft_tokens) if drafts else 0)
        logits = draw_logits(seed, positions, bool(lockstep.drafts or lockstep.reasoning))
        constrain(lockstep.structured, scheduled, batch, logits)
        self.logits.clear()
        torch.default_generator.manual_seed(seed)
        waited = self.last.waits if self.last else 0
        with torch.compiler.set_stance("force_eager"):  # it would compile every shape
            sampled = self.sampled = runner._sample(logits, drafts)
        if self.overlaid and lockstep.own != "sample_tokens":
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
        if lockstep.asynchronous:
            ids[invalid] = -1  # what get_output clears
        this = SimulatedCopy(ids, self.arrives)
        if lockstep.asynchronous:
            batch.set_async_sampled_token_ids(this.host, this)
        self.last = this
        return output, this

    def _drafts(self, scheduled: Any) -> SpecDecodeMetadata | None:
        """Return the step's drafts, as the device has them; None without drafts."""
        spec = scheduled.scheduled_spec_decode_tokens
        if not spec:
            return None
        ids = []
        # No drafts were proposed for a request that the last step did not sample.
        sampled = self.batch.prev_req_id_to_index or ()
        for req_id in self.batch.req_ids:
            tokens = list(spec.get(req_id, ()))
            if tokens and self.lockstep.asynchronous and req_id in sampled:
                tokens = self.lockstep.proposed.get(req_id, tokens)[: len(tokens)]
            ids.append(tokens)
        metadata = SpecDecodeMetadata.make_dummy(ids, torch.device("cpu"))
        counts = torch.tensor([len(tokens) for tokens in ids])
        ends = (counts + 1).cumsum(0)
        metadata.bonus_logits_indices = (ends - 1).to(torch.int32)
        starts = torch.repeat_interleave(ends - counts - 1, counts)
        within = torch.cat([torch.arange(len(tokens)) for tokens in ids])
        metadata.target_logits_indices = (starts + within).to(torch.int32)
        return metadata

    def _propose(self, ids: torch.Tensor, seed: int) -> None:
        lockstep, runner, batch = self.lockstep, self.runner, self.batch
        if not lockstep.drafts:
            return
        valid = ((ids >= 0) & (ids < VOCABULARY)).sum(1)
        discarded = runner.discard_request_mask.gpu[: len(ids)]
        valid = torch.where(discarded, 0, valid)
        runner._draft_token_ids = [
            draw_drafts(seed, req_id, lockstep.drafts) for req_id in batch.req_ids
        ]
        if not lockstep.asynchronous:
            return
        runner._draft_token_req_ids = batch.req_ids.copy()
        for row, req_id in enumerate(batch.req_ids):
            runner._num_valid_draft_tokens_cpu[row] = draw_kept_drafts(
                seed, req_id, lockstep.drafts
            )
        runner.valid_sampled_token_count_event = SimpleNamespace(synchronize=lambda: None)
        runner.valid_sampled_token_count_cpu = valid.clamp(min=1)
        last = ids.gather(1, (valid.clamp(min=1) - 1).unsqueeze(1))
        batch.prev_sampled_token_ids = last
