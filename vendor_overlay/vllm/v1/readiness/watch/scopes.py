"""Profiler scopes for the overlay's parts, if vLLM's own scopes are on.

``VLLM_CUSTOM_SCOPES_FOR_PROFILING`` uses ``torch.profiler.record_function``, and
``VLLM_NVTX_SCOPES_FOR_PROFILING`` uses nvtx. With neither variable, nothing is wrapped.
"""

# mirrors: nothing

from collections.abc import Iterator
from functools import partial
from importlib import import_module

from vllm import envs
from vllm.v1.readiness.watch.wrapping import Function, wrap_once

#: Per part: name in traces, class or module, and the functions to wrap.
_PARTS = (
    ("live batch", "live:LiveBatch", "begin_sampling settle_for_sampling observe_sampled"),
    ("history", "outputs.history:History", "begin_step place"),
    ("penalties", "sample.penalties:Penalties", "apply"),
    ("bad-words", "sample.bad_words:BadWords", "apply"),
    ("thinking-budget", "sample.thinking_budget:ThinkingBudget", "update_state apply_to_logits"),
    ("seeds", "sample.seeds:Seeds", "draw draw_uniform"),
    ("grammars", "sample.grammars:Grammars", "apply_grammars"),
    ("step-inputs", "inputs.step_inputs:StepInputs", "advance prepare"),
    ("input-ids", "inputs.input_ids:InputIds", "fill draft_metadata"),
    ("block-tables", "inputs.block_tables:BlockTables", "commit"),
    ("outputs", "outputs.model_outputs:Outputs", "show start_async"),
    ("readback", "outputs.readback:Readbacks", "start fill"),
    ("fence", "engine.fences", "wait"),
)


def install() -> None:
    """Wrap the functions of all parts, once per process, if vLLM's own scopes are on."""
    if not (envs.VLLM_CUSTOM_SCOPES_FOR_PROFILING or envs.VLLM_NVTX_SCOPES_FOR_PROFILING):
        return
    for part, owner, names in _parts():
        for name in names:
            wrap_once(owner, name, partial(_scoped, label=f"{part}: {name}"), by=__name__)


def _parts() -> Iterator[tuple[str, object, list[str]]]:
    for part, home, names in _PARTS:
        module, _, kind = home.partition(":")
        owner = import_module(f"vllm.v1.readiness.{module}")
        yield part, getattr(owner, kind) if kind else owner, names.split()


def _scoped(function: Function, label: str) -> Function:
    from vllm.v1.utils import record_function_or_nullcontext

    def scoped(*args: object, **kwargs: object) -> object:
        with record_function_or_nullcontext(f"readiness {label}"):
            return function(*args, **kwargs)

    return scoped
