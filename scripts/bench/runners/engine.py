"""One of the engines of a process whose steps are interleaved."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import model

from bench.models import GENERATED
from bench.parts import Clock, time_parts
from bench.runners.cases import KINDS, PROMPT, SIDES, SIZES, Case, Load, Side, lifetime, prompt
from bench.runners.twins import Twins, is_twin, twin_name

_WORKERS = {
    "cpu": ("vllm.v1.worker.cpu_worker", "CPUWorker"),
    "cuda": ("vllm.v1.worker.gpu_worker", "Worker"),
}


def _keep_graphs() -> None:
    """Keep the CUDA graphs of the engines so far: a later one drops all that are registered."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    for wrapper in (CUDAGraphWrapper, BreakableCUDAGraphWrapper):
        wrapper._all_instances.clear()


class Engine:
    """An engine in this process that is given one batch after the other.

    Attributes:
        name: of :data:`~bench.runners.cases.SIDES`.
        clock: times each part of a step.
        tokens: those of each request of the case, by its name.
    """

    def __init__(self, name: str, load: Load, twins: Twins, home: Path) -> None:
        """Make the engine.

        Args:
            name: of the side.
            load: what is measured.
            twins: stock's modules.
            home: directory for the generated model.
        """
        import torch
        from vllm import envs
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        self.name, self._load = name, load
        self._side, self._kind = SIDES[name], KINDS[load.kind]
        gpu = torch.cuda.is_available()
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(self._side.version - 1)
        envs.disable_envs_cache()  # an engine before this one has switched it on

        kind, batch = self._kind, max(load.batches)
        others: dict[str, Any] = {**GENERATED}
        if self._side.stock:
            module, worker = _WORKERS["cuda" if gpu else "cpu"]
            twins.load(module)
            others["worker_cls"] = f"{twin_name(module)}.{worker}"
        if kind.drafts:
            others["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": kind.drafts,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            }
        written = model.write(
            home, **{**SIZES[load.size], "max_position_embeddings": max(kind.length, 512)}
        )
        graphs = {each.batch * (1 + kind.drafts) for each in load.cases}
        arguments = EngineArgs(
            **others,
            model=str(written),
            seed=0,
            max_model_len=kind.length,
            max_num_seqs=batch,
            enable_prefix_caching=False,
            disable_log_stats=True,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sorted(graphs),
            },
            # Every prompt of a batch in its first step.
            max_num_batched_tokens=max(batch * max(PROMPT, 1 + kind.drafts), 512),
            gpu_memory_utilization=0.2,
            num_gpu_blocks_override=load.blocks,
            async_scheduling=kind.asynchronous,
            # By its class: for its name vLLM starts a process on the CPU.
            distributed_executor_backend=UniProcExecutor,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        if gpu:
            _keep_graphs()
        self._core = self._engine.engine_core.engine_core
        self.runner = self._core.model_executor.driver_worker.worker.model_runner
        self.asynchronous: bool = self._engine.vllm_config.scheduler_config.async_scheduling
        self.clock = Clock()
        self._watch(torch.accelerator.synchronize if gpu else lambda: None)
        self.tokens: dict[str, list[int]] = {}
        self._case, self._added = load.cases[0], 0

    def _watch(self, synchronize: Callable[[], None]) -> None:
        runner, scheduler = self.runner, self._core.scheduler
        time_parts(self.clock, scheduler, runner, self._side.version)
        sample = runner.sample_tokens

        def settled(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            return sample(*args, **kwargs)

        if not self.asynchronous:  # sampling is waited for there, and the model would be, too
            runner.sample_tokens = settled

    def begin(self, case: Case) -> None:
        """Add the requests of a case."""
        self._case, self._added = case, 0
        self.tokens = {}
        for _ in range(case.batch):
            self._add()

    def _add(self) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        request = self._added
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=lifetime(self._case, self._load, request),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens = TokensPrompt(prompt_token_ids=prompt(self._case, request))
        self._engine.add_request(str(request), tokens, sampling)
        self.tokens[str(request)] = []
        self._added += 1

    def step(self) -> dict[str, int]:
        """Take one step; return nanoseconds in each part."""
        self.clock.lap()
        outputs = self._engine.step()
        lap = self.clock.lap()
        for output in outputs:
            self.tokens[output.request_id] += output.outputs[0].token_ids
        if self._case.changing:
            self._add()
        return lap

    def end(self) -> None:
        """Abort the requests of the case, and bring the engine to rest."""
        self._engine.abort_request(list(self.tokens))
        core = self._core
        while core.scheduler.has_requests() or core.batch_queue:
            self._engine.engine_core.get_output()

    def digest(self) -> str:
        """Return a digest of the tokens of the case so far."""
        ordered = [self.tokens[str(request)] for request in range(self._added)]
        return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()

    def doubts(self, twins: Twins) -> list[str]:
        """Return why this engine is not what its side says, if it is not."""
        found = doubts(self._side, self.runner, twins)
        if self.asynchronous != self._kind.asynchronous:
            found.append("it does not schedule as it should")
        return found


def doubts(side: Side, runner: Any, twins: Twins) -> list[str]:
    """Return the classes that a model runner has and that are not of its side."""
    batch = getattr(runner, "input_batch", None)
    objects = {"runner": runner, "input_batch": batch}
    objects |= {name: getattr(runner, name, None) for name in ("sampler", "rejection_sampler")}
    objects["sampling_metadata"] = getattr(batch, "sampling_metadata", None)
    found = [
        f"its {name} has {cls.__qualname__} of {cls.__module__}"
        for name, one in objects.items()
        for cls in type(one).__mro__
        if (cls.__module__ in twins.names if side.stock else is_twin(cls.__module__))
    ]
    if side.stock:
        carrying = [name for name, one in objects.items() if hasattr(one, "readiness")]
        found += [f"its {name} carries the overlay" for name in carrying]
    elif not hasattr(batch, "readiness"):
        found.append("its input_batch does not carry the overlay")
    if (".gpu." in type(runner).__module__) != (side.version == 2):
        found.append(f"its runner is of {type(runner).__module__}")
    return found
