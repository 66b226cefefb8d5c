"""The fix undrafted-rows: from which state a hybrid model's row continues.

Upstream's runner builds the metadata of upstream's Mamba 2 and gated delta net layers.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill
from support.scheduling import make_scheduler, speculative_config
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.utils import CpuGpuBuffer

FIX = "undrafted-rows"
ROWS = 4
DRAFTS = 2
BLOCK = 16
KINDS = {"mamba2": Mamba2AttentionMetadataBuilder, "gdn": GDNAttentionMetadataBuilder}


class Row(NamedTuple):
    """A row of a step.

    Attributes:
        accepted: tokens that the step before gave it.
        drafts: its drafts; None for a prompt that is prefilled from its second token on.
        recomputed: tokens of its output that it computes anew, in place of drafts.
    """

    accepted: int
    drafts: int | None
    recomputed: int = 1


def buffer(dtype: torch.dtype, values: Any, fill: int = 0) -> CpuGpuBuffer:
    """A buffer as the runner has them, whose copy on the device is the host's."""
    buffer = CpuGpuBuffer(ROWS + 1, dtype=dtype, device=torch.device("cpu"), pin_memory=False)
    buffer.np.fill(fill)
    buffer.np[: len(values)] = values
    buffer.gpu = buffer.cpu
    return buffer


def metadata_of(side: str, kind: str, rows: list[Row]) -> Any:
    """Build a layer's metadata by a side's runner."""
    load = modules.of_side(side)
    speculative = speculative_config(DRAFTS, False)
    config = make_scheduler(False, speculative, 60, ROWS, 64, 96).vllm_config
    config.model_config = mock.Mock(wraps=config.model_config, is_hybrid=True)
    config.model_config.get_mamba_chunk_size.return_value = 8
    spec = MambaSpec(
        block_size=BLOCK, shapes=((16, 64),), dtypes=(torch.float16,), num_speculative_blocks=DRAFTS
    )
    builder = KINDS[kind](spec, ["layer"], config, torch.device("cpu"))
    batch = empty(load, 37, max_num_reqs=ROWS, num_spec_tokens=DRAFTS)
    fill(batch, [Spec([1] * 8, [2] * 8, {}) for _ in rows])
    scheduled = [5 if row.drafts is None else row.recomputed + row.drafts for row in rows]
    computed = [1 if row.drafts is None else 15 for row in rows]
    for row, count in enumerate(computed):
        batch.num_computed_tokens_cpu[row] = count
        batch.block_table[0].block_table.np[row, : 1 + DRAFTS] = 10 * (row + 1) + np.arange(3)
    batch.block_table[0].block_table.gpu = batch.block_table[0].block_table.cpu
    lengths = torch.tensor([*map(sum, zip(computed, scheduled, strict=True))], dtype=torch.int32)
    ends = np.cumsum([0, *scheduled])
    drafted = any(row.drafts for row in rows)
    draft_counts = [row.drafts or -1 for row in rows] if drafted else [2] * len(rows)
    runner = object.__new__(load(modules.RUNNER).GPUModelRunner)
    group = SimpleNamespace(
        get_metadata_builder=lambda _: builder, layer_names=["layer"], kv_cache_spec=spec
    )
    vars(runner).update(
        input_batch=batch,
        device=torch.device("cpu"),
        speculative_config=speculative,
        model_config=config.model_config,
        cache_config=config.cache_config,
        parallel_config=config.parallel_config,
        drafter=None,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]),
        attn_groups=[[group]],
        optimistic_seq_lens_cpu=lengths,
        seq_lens=lengths,
        positions=torch.zeros(64, dtype=torch.int64),
        query_start_loc=buffer(torch.int32, ends, int(ends[-1])),
        num_accepted_tokens=buffer(torch.int32, [row.accepted for row in rows], 1),
        num_decode_draft_tokens=buffer(torch.int32, draft_counts, -1),
        mamba_prev_last_scheduled_idx=None,
        use_async_spec_decode=False,
        uniform_decode_query_len=1 + DRAFTS,
        routed_experts_initialized=False,
        dcp_world_size=1,
        is_mm_prefix_lm=False,
    )
    built, _ = runner._build_attention_metadata(
        num_tokens=sum(scheduled),
        num_reqs=len(rows),
        max_query_len=max(scheduled),
        use_spec_decode=drafted,
        num_scheduled_tokens={f"r{row}": count for row, count in enumerate(scheduled)},
        slot_mappings={0: torch.zeros(64, dtype=torch.int64)},
    )
    return built["layer"]


def states_of(built: Any) -> list[int]:
    """The blocks of the states that the rows continue from, in order."""
    if isinstance(built, GDNAttentionMetadata):
        tables, alone = built.spec_state_indices_tensor, built.non_spec_state_indices_tensor
    else:
        tables, alone = built.state_indices_tensor_d, built.state_indices_tensor_p
    accepted = built.num_accepted_tokens
    blocks = [] if alone is None else alone.tolist()
    for row, table in enumerate([] if tables is None else tables.tolist()):
        blocks.append(table[0 if accepted is None else accepted[row] - 1])
    return sorted(blocks)


UNDRAFTED = [Row(3, 0), Row(1, 0)]
MIXED = [Row(3, 0), Row(2, 2)]
PREFILLED = [Row(2, 0), Row(1, None)]


@pytest.mark.parametrize(
    ("kind", "rows", "stock", "fixed"),
    [
        ("mamba2", UNDRAFTED, [10, 20], [12, 20]),
        ("mamba2", PREFILLED, [10, 20], [11, 20]),
        ("gdn", UNDRAFTED, [10, 20], [12, 20]),
        ("gdn", PREFILLED, [10, 20], [11, 20]),
        ("gdn", MIXED, [10, 21], [12, 21]),
    ],
)
def test_a_row_continues_from_the_state_of_its_last_accepted_token(
    side: str, kind: str, rows: list[Row], stock: list[int], fixed: list[int]
) -> None:
    right = fixed if side == "ours" else stock
    assert states_of(metadata_of(side, kind, rows)) == right


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows",
    [
        [Row(1, 0), Row(1, 0)],
        [Row(1, 0), Row(3, 1)],
        [Row(3, 2), Row(2, 1)],
        [Row(1, None), Row(1, None)],
        [Row(2, 2), Row(1, None)],
        [Row(3, 0), Row(1, 0, recomputed=1 + DRAFTS)],
    ],
)
def test_other_steps_are_built_as_ever(kind: str, rows: list[Row]) -> None:
    stock, ours = (vars(metadata_of(name, kind, rows)) for name in ("pinned", "ours"))
    assert stock.keys() == ours.keys()
    for field, value in stock.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, ours[field]), field
        elif field != "nums_dict":
            assert value == ours[field], field
