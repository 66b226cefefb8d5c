"""The fix draft-gates: whose gates a gated delta net computes drafted tokens with.

Upstream's layer runs on metadata that upstream's builder has built. Its kernels need a GPU, where
tests/gpu/test_hybrid.py runs them; here each token's output is computed from its inputs alone.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from support import modules
from support.scheduling import make_scheduler, speculative_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

FIX = "draft-gates"
LAYER = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
DRAFTS = 2
HEADS, SIZE = 2, 3


class Row(NamedTuple):
    """A row of a step: the tokens that are computed, and how many of them are drafts, if any."""

    tokens: int
    drafts: int | None = None


def metadata_of(rows: list[Row]) -> Any:
    """Build the metadata of a step."""
    config = make_scheduler(False, speculative_config(DRAFTS, False), 60, 8, 64, 96).vllm_config
    spec = MambaSpec(
        block_size=16, shapes=((16, 64),), dtypes=(torch.float16,), num_speculative_blocks=DRAFTS
    )
    builder = GDNAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    lengths = torch.tensor([row.tokens for row in rows], dtype=torch.int32)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    count, total = len(rows), int(lengths.sum())
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths + 20,
        num_reqs=count,
        num_actual_tokens=total,
        max_query_len=int(lengths.max()),
        max_seq_len=int(lengths.max()) + 20,
        block_table_tensor=torch.arange(count * 4, dtype=torch.int32).view(count, 4),
        slot_mapping=torch.zeros(total, dtype=torch.int64),
    )
    drafts = [-1 if row.drafts is None else row.drafts for row in rows]
    accepted = torch.ones(count, dtype=torch.int32)
    return builder.build(0, common, accepted, torch.tensor(drafts, dtype=torch.int32))


def computed(values: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute each token's output [1, tokens, heads, size] with its gates [tokens, heads]."""
    return values * a[None, :, :, None] + b[None, :, :, None]


def split(values: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Give queries, keys and values the same values."""
    return [None if values is None else values.view(1, -1, HEADS, SIZE)] * 3


#: What is computed in the kernels' place. The kernel for drafts reads the first gates.
KERNELS: dict[str, Any] = {
    **dict.fromkeys(("causal_conv1d_update", "causal_conv1d_fn"), lambda values, *_, **__: values),
    "fused_post_conv_prep": lambda *, conv_output, a, b, **_: (
        *[conv_output.reshape(-1, HEADS, SIZE)] * 3,
        a,
        b,
    ),
    "fused_sigmoid_gating_delta_rule_update": lambda *, v, a, b, **_: (
        computed(v, a[: v.shape[1]], b[: v.shape[1]]),
        None,
    ),
}


def wrong_tokens(side: str, rows: list[Row]) -> list[int]:
    """Run a step; return the tokens that are not computed with their own gates."""
    module, built = modules.of_side(side)(LAYER), metadata_of(rows)
    drawn = torch.Generator().manual_seed(1)
    count = built.num_actual_tokens
    values, a, b = (
        torch.rand(count, size, generator=drawn) for size in (HEADS * SIZE, HEADS, HEADS)
    )
    layer = object.__new__(module.QwenGatedDeltaNetAttention)
    torch.nn.Module.__init__(layer)
    vars(layer).update(
        prefix="layer",
        kv_cache=(torch.zeros(99, 4, HEADS * SIZE), torch.zeros(99, HEADS, SIZE, SIZE)),
        conv1d=SimpleNamespace(weight=torch.zeros(HEADS * SIZE, 1, 4), bias=None),
        activation="silu",
        enable_packed_recurrent_decode=False,
        rearrange_mixed_qkv=split,
        chunk_gated_delta_rule=lambda *, v, g, beta, initial_state, **_: (
            computed(v, g[0], beta[0]),
            initial_state,
        ),
        **dict.fromkeys(("A_log", "dt_bias"), torch.zeros(HEADS)),
        **dict.fromkeys(("num_k_heads", "tp_size", "head_k_dim", "head_v_dim"), 1),
    )
    context = SimpleNamespace(attn_metadata={"layer": built})
    replaced: dict[str, Any] = {"get_forward_context": lambda: context, **KERNELS}
    found = torch.zeros(count, HEADS, SIZE)
    with mock.patch.multiple(module, **replaced):
        layer._forward_core(values, b, a, found)
    expected = computed(values.view(1, -1, HEADS, SIZE), a, b)[0]
    wrong: list[int] = (found != expected).any(2).any(1).nonzero().flatten().tolist()
    return wrong


DRAFTED, SHORT = Row(3, 2), Row(2)
#: Rows, and the tokens that stock computes with the gates of others.
STEPS: list[tuple[list[Row], list[int]]] = [
    ([Row(1), DRAFTED], [1, 2, 3]),
    ([SHORT, DRAFTED, Row(1), Row(2, 1)], [2, 3, 4, 6, 7]),
    ([DRAFTED, Row(1), Row(1, 0)], [4]),
    # Nothing precedes a row with drafts.
    ([DRAFTED, Row(2, 1), SHORT, Row(5)], []),
    ([DRAFTED, Row(1, 0), Row(2, 1)], []),
    ([Row(1), Row(1)], []),
    ([Row(1), Row(5)], []),
]


@pytest.mark.parametrize(("rows", "stock"), STEPS)
def test_each_token_is_computed_with_its_own_gates(
    side: str, rows: list[Row], stock: list[int]
) -> None:
    assert wrong_tokens(side, rows) == ([] if side == "ours" else stock)
