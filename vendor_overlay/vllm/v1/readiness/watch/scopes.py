"""Scopes of the overlay's parts in traces, if vLLM's own scopes are on.

``VLLM_CUSTOM_SCOPES_FOR_PROFILING`` uses ``torch.profiler.record_function``,
``VLLM_NVTX_SCOPES_FOR_PROFILING`` nvtx. With neither, nothing is wrapped.
"""

# mirrors: nothing

from collections.abc import Iterator
from functools import partial

from vllm import envs
from vllm.v1.readiness.watch.wrapping import Function, wrap_once


def install() -> None:
    """Wrap the parts of a step, once per process, if vLLM's own scopes are on."""
    if not (envs.VLLM_CUSTOM_SCOPES_FOR_PROFILING or envs.VLLM_NVTX_SCOPES_FOR_PROFILING):
        return
    for part, owner, names in _parts():
        for name in names:
            wrap_once(owner, name, partial(_scoped, label=f"{part}: {name}"), by=__name__)


def _parts() -> Iterator[tuple[str, object, tuple[str, ...]]]:
    """Yield each part's name in traces, class or module, and functions."""
    from vllm.v1.readiness.engine import fences
    from vllm.v1.readiness.inputs.block_tables import BlockTables
    from vllm.v1.readiness.inputs.input_ids import InputIds
    from vllm.v1.readiness.inputs.step_inputs import StepInputs
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.readiness.outputs.model_outputs import Outputs
    from vllm.v1.readiness.outputs.readback import Readbacks
    from vllm.v1.readiness.sample.bad_words import BadWords
    from vllm.v1.readiness.sample.grammars import Grammars
    from vllm.v1.readiness.sample.penalties import Penalties
    from vllm.v1.readiness.sample.seeds import Seeds
    from vllm.v1.readiness.sample.thinking_budget import ThinkingBudget

    steps = ("begin_step", "prepare", "settle_for_sampling", "place", "observe_sampled")
    yield "live batch", LiveBatch, steps
    yield Penalties.name, Penalties, ("apply", "apply_to_targets")
    yield BadWords.name, BadWords, ("apply", "apply_to_targets")
    yield "thinking-budget", ThinkingBudget, ("update_state", "apply_to_logits")
    yield "seeds", Seeds, ("draw", "draw_uniform")
    yield "grammars", Grammars, ("apply_grammars",)
    yield "step-inputs", StepInputs, ("advance", "prepare_inputs")
    yield "input-ids", InputIds, ("fill_input_ids", "draft_metadata")
    yield "block-tables", BlockTables, ("commit",)
    yield "outputs", Outputs, ("show", "start_async")
    yield "readback", Readbacks, ("start", "fill")
    yield "fence", fences, ("wait",)


def _scoped(function: Function, label: str) -> Function:
    from vllm.v1.utils import record_function_or_nullcontext

    def scoped(*args: object, **kwargs: object) -> object:
        with record_function_or_nullcontext(f"readiness {label}"):
            return function(*args, **kwargs)

    return scoped
