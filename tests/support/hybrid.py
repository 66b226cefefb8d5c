"""A runner of a hybrid model with drafts, upstream's or ours, without a model or a device.

Real are the input batch, and the methods of the runner that keep requests' state, prepare a
step's inputs and count its accepted drafts.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu.pool.late_interaction_runner import LateInteractionRunner

from support import modules
from support.batches import empty
from support.lockstep import inputs

DRAFTS = 3
ROWS = 6
PROMPT = [1, 2, 3]
VOCABULARY = 16
CPU = torch.device("cpu")
#: When a step's counts arrive: at once, while the next step's rows are moved, or when waited for.
MOMENTS = ("before", "while", "after")

_copy = torch.Tensor.copy_


class HybridRunner:
    """A runner, and the counts that are on their way to its host.

    Args:
        load: modules.pristine or modules.overlaid.
        asynchronous: whether it is scheduled asynchronously.
        mode: mamba_cache_mode, "none" or "align".
        moment: one of MOMENTS.
        own: a method that a user's subclass replaces, by upstream's; None for none.
    """

    def __init__(
        self,
        load: Any,
        asynchronous: bool = True,
        mode: str = "none",
        moment: str = "",
        own: str | None = None,
    ) -> None:
        self.moment = moment
        self.mode = mode
        self._arriving: list[Callable[[], Any]] = []
        #: By request, how many tokens have states, and how many drafts the last step rejected.
        self._lengths: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._scheduled: Any = None
        self.batch = empty(load, VOCABULARY, max_num_reqs=ROWS, length=96, num_spec_tokens=DRAFTS)
        module = load(modules.RUNNER)
        module.get_pp_group = lambda: SimpleNamespace(is_last_rank=True, world_size=1)
        kind = module.GPUModelRunner
        if own is not None:
            stock = modules.pristine(modules.RUNNER).GPUModelRunner
            kind = type("Runner", (kind,), {own: getattr(stock, own)})
        self.runner = object.__new__(kind)
        vars(self.runner).update(self._state(asynchronous, mode))
        self.batch.block_table.compute_slot_mapping = lambda *_: None
        reorder = self.runner._may_reorder_batch

        def arrive_and_reorder(scheduled: Any) -> None:
            self._arrive("while")
            reorder(scheduled)

        self.runner._may_reorder_batch = arrive_and_reorder

    def _state(self, asynchronous: bool, mode: str) -> dict[str, Any]:
        def buffer(size: int, dtype: torch.dtype = torch.int32) -> CpuGpuBuffer:
            return CpuGpuBuffer(size, dtype=dtype, device=CPU, pin_memory=False)

        tokens = 96
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: self._arrive("after"))
        # The kernel that copies states; nothing is copied, so that all counts stay.
        names = ("mamba_state_idx", "num_scheduled_tokens", "num_computed_tokens")
        counts = buffer(ROWS)
        fused = SimpleNamespace(
            is_initialized=True,
            run_fused_postprocess=lambda **_: None,
            num_accepted_tokens_out=counts.gpu,
            **{f"{name}_buf": buffer(ROWS) for name in (*names, "num_draft_tokens")},
        )
        return {
            **inputs.buffers(ROWS, tokens),
            "requests": {},
            "num_prompt_logprobs": {},
            "late_interaction_runner": LateInteractionRunner(),
            "encoder_cache": {},
            "device": CPU,
            "input_batch": self.batch,
            "is_pooling_model": False,
            "uses_mrope": False,
            "uses_xdrope_dim": 0,
            "max_model_len": tokens,
            "speculative_config": SimpleNamespace(use_ngram_gpu=lambda: False),
            "model_config": SimpleNamespace(is_hybrid=True),
            "model": SimpleNamespace(get_mamba_state_copy_func=lambda: ()),
            "cache_config": SimpleNamespace(mamba_cache_mode=mode),
            "compilation_config": SimpleNamespace(static_forward_context={}),
            "kv_cache_config": SimpleNamespace(kv_cache_groups=["one"]),
            "num_spec_tokens": DRAFTS,
            "use_async_scheduling": asynchronous,
            "use_async_spec_decode": asynchronous,
            "reorder_batch_threshold": 1 + DRAFTS,
            "_mamba_bufs": SimpleNamespace(postprocess_align=fused),
            "num_accepted_tokens_event": event,
            "valid_sampled_token_count_event": event,
            "valid_sampled_token_count_cpu": None,
            "_arange_scratch": np.empty(tokens, np.int64),
            "num_accepted_tokens": counts,
            "num_decode_draft_tokens": buffer(ROWS),
            "_prepare_input_ids": lambda *_: None,
        }

    def _arrive(self, moment: str) -> None:
        """Let the counts on their way arrive, if it is their moment or they are waited for."""
        if moment in (self.moment, "after"):
            for copy in self._arriving:
                copy()
            self._arriving.clear()

    def step(
        self,
        drafted: Mapping[str, int],
        finished: tuple[str, ...] = (),
        preempted: tuple[str, ...] = (),
    ) -> dict[str, int]:
        """Schedule a step, and prepare its inputs.

        Args:
            drafted: each request's number of drafts. A request that is not known is new, and
                its prompt is computed.
            finished: requests that are over.
            preempted: requests among ``drafted`` that were preempted: their tokens so far are
                computed again.

        Returns:
            The count that the step reads for each request.
        """
        runner = self.runner
        for name in finished:
            del self._lengths[name]
        known = [name for name in drafted if name in self._lengths]
        new = [name for name in drafted if name not in self._lengths]
        tokens = {name: 1 + count for name, count in drafted.items()}
        tokens |= dict.fromkeys(new, len(PROMPT))
        tokens |= {name: self._lengths[name] + 1 for name in preempted}
        outputs = [self._lengths[name] + 1 - len(PROMPT) for name in known]
        cached = CachedRequestData(
            req_ids=known,
            resumed_req_ids=set(preempted),
            new_token_ids=[],
            all_token_ids={name: [1] * (self._lengths[name] + 1) for name in known},
            new_block_ids=[([1],) if name in preempted else None for name in known],
            num_computed_tokens=[
                0 if name in preempted else self._computed(name) for name in known
            ],
            num_output_tokens=[
                count + runner.requests[name].prev_num_draft_len
                for name, count in zip(known, outputs, strict=True)
            ],
        )
        self._scheduled = SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(name, PROMPT, [], SamplingParams(), None, ([1],), 0, None)
                for name in new
            ],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={
                name: [-1] * count for name, count in drafted.items() if count
            },
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=set(finished),
            free_encoder_mm_hashes=[],
        )
        self._lengths |= dict.fromkeys(new, len(PROMPT))
        with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
            correct = runner._update_states(self._scheduled)
            names = self.batch.req_ids
            lengths = np.array([tokens[name] for name in names], dtype=np.int32)
            runner._prepare_inputs(self._scheduled, lengths)
            if correct is not None:
                correct()
        # With "align" the runner copies states by the host's counts, and uploads them again.
        align = self.mode == "align"
        read = self.batch.num_accepted_tokens_cpu if align else runner.num_accepted_tokens.gpu
        return {name: int(read[row]) for row, name in enumerate(names)}

    def _computed(self, name: str) -> int:
        """Return what the scheduler takes for computed: also drafts that it has not heard of."""
        ahead = self.runner.use_async_scheduling and name in self.batch.req_id_to_index
        return self._lengths[name] + (self._rejected.get(name, 0) if ahead else 0)

    def sample(self, accepted: Mapping[str, int]) -> None:
        """Sample the step; ``accepted`` is each request's number of accepted drafts."""
        runner, names = self.runner, self.batch.req_ids.copy()
        spec = self._scheduled.scheduled_spec_decode_tokens
        counts = torch.tensor([1 + accepted.get(name, 0) for name in names])
        sampled = torch.where(torch.arange(1 + DRAFTS) < counts[:, None], 1, -1)
        lands = self.batch.num_accepted_tokens_cpu_tensor.data_ptr()

        def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
            if target.data_ptr() != lands:
                return _copy(target, source, non_blocking)
            source = source.clone()
            self._arriving.append(lambda: _copy(target, source))
            return target

        with mock.patch.object(torch.Tensor, "copy_", copy):
            runner._update_states_after_model_execute(sampled, self._scheduled)
        self._arrive("before" if runner.use_async_scheduling else "after")
        self._rejected = {}
        for name, count in zip(names, counts.tolist(), strict=True):
            drafts = len(spec.get(name, ()))
            first = not runner.requests[name].output_token_ids
            self._lengths[name] += 0 if first else count
            self._rejected[name] = 0 if first else 1 + drafts - count
            row = self.batch.req_id_to_index[name]
            placed = 1 if runner.use_async_scheduling else count
            runner.requests[name].output_token_ids.extend([-1] * placed)
            self.batch.num_tokens_no_spec[row] += placed
        if runner.use_async_scheduling:
            self.batch.prev_req_id_to_index = {name: row for row, name in enumerate(names)}
            self.batch.prev_sampled_token_ids = sampled[:, :1]
            runner.valid_sampled_token_count_gpu = counts.int()
            runner.valid_sampled_token_count_cpu = counts
