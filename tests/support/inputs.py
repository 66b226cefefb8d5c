"""A runner that prepares the inputs of one step, upstream's or ours, without a model."""

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from vllm.v1.readiness.engine import switch
from vllm.v1.utils import CpuGpuBuffer

from support import modules
from support.batches import Spec, empty, state
from support.lockstep import inputs

DRAFTS = 3
ROWS = 40
#: Tokens of a request, and of a step.
LENGTH, TOKENS = 16, ROWS * 4 + 8
CPU = torch.device("cpu")
#: What is in a buffer on the device before the step.
STALE = -7


class Row(NamedTuple):
    """A request.

    Attributes:
        prompt: length of its prompt.
        output: length of its output.
        computed: how many of its tokens are computed.
        tokens: how many the step computes, without drafts.
        drafts: how many drafts; None if it is not named among those with drafts.
        known: whether it has a sampled token on the device.
    """

    prompt: int = 2
    output: int = 1
    computed: int = 2
    tokens: int = 1
    drafts: int | None = None
    known: bool = True


class Step(NamedTuple):
    """A step.

    Attributes:
        rows: the requests.
        previous: the row of each in the step before, if it is known; each another.
        drafted: the order in which requests with drafts are named, as numbers of rows.
        proposed: the drafts on the device: their type, or None for none, or list.
        width: columns of the sampled tokens, of which the first counts.
        sampled: whether there are sampled tokens on the device.
        embeds: whether prompts may be embeddings.
    """

    rows: Sequence[Row]
    previous: Sequence[int]
    drafted: Sequence[int]
    proposed: torch.dtype | type[list] | None = torch.int64  # type: ignore[type-arg]
    width: int = 1
    sampled: bool = True
    embeds: bool = False


def _buffers() -> dict[str, Any]:
    """Return a runner's attributes for its inputs, whose buffers are stale on the device."""

    def buffer(*size: int, dtype: torch.dtype) -> CpuGpuBuffer:
        return CpuGpuBuffer(*size, dtype=dtype, device=CPU, pin_memory=False)

    made = {
        **inputs.buffers(ROWS, TOKENS),
        "_arange_scratch": np.empty(TOKENS, np.int64),
        "is_token_ids": buffer(TOKENS, dtype=torch.bool),
        "inputs_embeds": buffer(TOKENS, 1, dtype=torch.float32),
        "num_decode_draft_tokens": buffer(ROWS, dtype=torch.int32),
    }
    del made["kv_cache_config"]  # without it, the feature step-inputs leaves a step to others
    for each in made.values():
        if isinstance(each, CpuGpuBuffer):
            each.gpu.fill_(False if each.gpu.dtype == torch.bool else STALE)
    return made


def _proposed(step: Step, rows: int) -> Any:
    if step.proposed is None:
        return None
    if step.proposed is list:
        return [[1] * DRAFTS for _ in range(rows)]
    return 1000 + torch.arange(rows * DRAFTS, dtype=step.proposed).reshape(rows, DRAFTS)


def make(
    load: Callable[[str], Any], step: Step, value: str = "on", own: str | None = None
) -> tuple[Any, Any, np.ndarray]:
    """Make a runner and its step.

    Args:
        load: modules.pristine or modules.overlaid.
        step: the step.
        value: of VLLM_READINESS.
        own: a method that a user's subclass of the runner replaces, by upstream's.

    Returns:
        The runner, the scheduler's output, and [rows] number of tokens.
    """
    with mock.patch.dict(os.environ, {switch.NAME: value}):
        batch = empty(load, 37, max_num_reqs=ROWS, length=LENGTH, num_spec_tokens=DRAFTS)
    names = [f"r{number}" for number in range(len(step.rows))]
    requests: dict[str, Any] = {}
    for name, row in zip(names, step.rows, strict=True):
        tokens = [1 + (len(requests) + each) % 36 for each in range(row.prompt + row.output)]
        spec = Spec(tokens[: row.prompt], tokens[row.prompt :], {})
        requests[name] = state(spec, name)
        requests[name].num_computed_tokens = row.computed
        batch.add_request(requests[name])
    batch.block_table.compute_slot_mapping = lambda *_: None  # its kernel needs a device
    before = {
        row: name
        for name, each, row in zip(names, step.rows, step.previous, strict=True)
        if each.known
    }
    batch.prev_req_id_to_index = {before[row]: row for row in sorted(before)}
    count = max(step.previous) + 1
    if step.sampled:
        values = 100 + torch.arange(count * step.width, dtype=torch.int32)
        batch.prev_sampled_token_ids = values.reshape(count, step.width)
    lengths = [row.tokens + (row.drafts or 0) for row in step.rows]
    scheduled = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        num_scheduled_tokens=dict(zip(names, lengths, strict=True)),
        total_num_scheduled_tokens=sum(lengths),
        scheduled_spec_decode_tokens={
            names[row]: [-1] * (step.rows[row].drafts or 0) for row in step.drafted
        },
    )
    kind = load(modules.RUNNER).GPUModelRunner
    if own is not None:
        stock = modules.pristine(modules.RUNNER).GPUModelRunner
        kind = type("Runner", (kind,), {own: getattr(stock, own), "__module__": __name__})
    runner = object.__new__(kind)
    vars(runner).update(
        _buffers(),
        requests=requests,
        device=CPU,
        input_batch=batch,
        uses_mrope=False,
        uses_xdrope_dim=0,
        enable_prompt_embeds=step.embeds,
        num_spec_tokens=DRAFTS,
        use_async_scheduling=True,
        use_async_spec_decode=False,
        _draft_token_ids=_proposed(step, count),
    )
    return runner, scheduled, np.array(lengths, dtype=np.int32)


def prepare(runner: Any, scheduled: Any, lengths: np.ndarray) -> dict[str, Any]:
    """Prepare a step's inputs.

    Returns:
        What the step is given, each tensor on host and device by its name, or the error's type.
    """
    try:
        logits, drafts = runner._prepare_inputs(scheduled, lengths)
    except AssertionError:
        return {"error": AssertionError}
    given = {"logits": logits} | {
        f"drafts.{name}": each for name, each in vars(drafts or _NONE).items()
    }
    for name, each in vars(runner).items():
        if isinstance(each, CpuGpuBuffer):
            given |= {f"{name}.cpu": each.cpu, f"{name}.gpu": each.gpu}
        elif isinstance(each, torch.Tensor):
            given[name] = each
    return given


_NONE = SimpleNamespace()


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what differs, in type or in any bit."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return bool(a.dtype == b.dtype and torch.equal(a, b))
        if isinstance(a, dict) and isinstance(b, dict):
            return not differences(a, b)
        return bool(a == b)

    assert one.keys() == other.keys()
    return [name for name in one if not same(one[name], other[name])]
