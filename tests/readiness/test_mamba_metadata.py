"""The feature mamba-metadata: nothing asks the device whether prompts continue from a state."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.hybrid_step import RECURRENT, Row, config
from support.inputs import differences
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.readiness.engine import switch

BUILDER = "vllm/v1/attention/backends/mamba2_attn.py"
DRAFTS = 3
CPU = torch.device("cpu")
DECODE, DRAFTED = Row(5, 9), Row(5, 9, 1 + DRAFTS, DRAFTS)
WHOLE, LATER, PADDING = Row(9, 0, 9), Row(30, 16, 14), Row(0, 0, 0)


class WaitedError(Exception):
    """The host has read a tensor of the device."""


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor that the host cannot read without a wait, like all that is made of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reading = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__")
        if func in [getattr(torch.Tensor, name) for name in reading]:
            raise WaitedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def build(
    load: Any,
    rows: Sequence[Row],
    drafts: int = 0,
    rejected: int = 0,
    mode: str = "none",
    kind: type[torch.Tensor] = torch.Tensor,
) -> Any:
    """The metadata of a step.

    Args:
        load: modules.pristine or modules.overlaid.
        rows: requests, decodes first, as the runner orders them.
        drafts: the most drafts of a request.
        rejected: drafts of each decode's last step that were rejected, as the host does not know.
        mode: mamba_cache_mode.
        kind: of the tensors on the device.
    """
    settings = config(drafts)
    settings.model_config.get_mamba_chunk_size = lambda: 8
    settings.model_config.max_model_len = 4 * RECURRENT.block_size
    settings.cache_config.mamba_cache_mode = mode
    if drafts:
        settings.speculative_config.parallel_drafting = False
    tokens = np.array([row.tokens for row in rows])
    computed = np.array([row.computed for row in rows])
    decoding = np.array([row.computed >= row.prompt for row in rows])
    starts = torch.from_numpy(np.append(0, tokens.cumsum()).astype(np.int32))
    bound = torch.from_numpy((computed + tokens).astype(np.int32))
    lengths = bound - torch.from_numpy((rejected * decoding * (computed > 0)).astype(np.int32))
    common = CommonAttentionMetadata(
        query_start_loc=starts.as_subclass(kind),
        query_start_loc_cpu=starts,
        seq_lens=lengths.as_subclass(kind),
        seq_lens_cpu_upper_bound=bound,
        num_reqs=len(rows),
        num_actual_tokens=int(tokens.sum()),
        max_query_len=int(tokens.max()),
        max_seq_len=int(bound.max()),
        block_table_tensor=torch.arange(4 * len(rows), dtype=torch.int32).view(-1, 4),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        is_prefilling=torch.from_numpy(~decoding),
    )
    builder = load(BUILDER).Mamba2AttentionMetadataBuilder(RECURRENT, ["layer"], settings, CPU)
    accepted = torch.ones(len(rows), dtype=torch.int32) if drafts else None
    return builder.build(0, common, num_accepted_tokens=accepted)


ROWS = st.lists(
    st.one_of(
        st.builds(lambda n: Row(n, 0, n), st.integers(1, 20)),  # a whole prompt
        st.builds(lambda n: Row(40, 0, n), st.integers(1, 20)),  # its first chunk
        st.builds(lambda n, k: Row(40, n, k), st.integers(1, 20), st.integers(1, 20)),
        st.builds(lambda n: Row(5, n), st.integers(5, 20)),  # a decode
    ),
    min_size=1,
    max_size=8,
)
MODES = st.sampled_from(["none", "align", "all"])


@given(rows=ROWS, mode=MODES, padded=st.integers(0, 2))
def test_metadata_is_stocks(rows: list[Row], mode: str, padded: int) -> None:
    ordered = sorted(rows, key=lambda row: (row.tokens > 1, row.computed == 0))
    ordered += [PADDING] * padded
    stock, ours = (build(load, ordered, mode=mode) for load in (modules.pristine, modules.overlaid))
    assert differences(vars(stock), vars(ours)) == []
    assert type(ours.prep_initial_states) is bool


@given(rows=ROWS, rejected=st.integers(0, DRAFTS), mode=MODES)
def test_metadata_is_stocks_with_drafts(rows: list[Row], rejected: int, mode: str) -> None:
    """Lengths on the host are then too large, but for rows that begin."""
    drafted = [DRAFTED if row.computed >= row.prompt else row for row in rows]
    ordered = sorted(drafted, key=lambda row: (row.computed < row.prompt, row.computed == 0))
    stock, ours = (
        build(load, ordered, DRAFTS, rejected, mode)
        for load in (modules.pristine, modules.overlaid)
    )
    assert differences(vars(stock), vars(ours)) == []


@pytest.mark.parametrize(
    ("rows", "drafts"),
    [
        ([WHOLE], 0),
        ([DECODE, WHOLE], 0),
        ([DECODE, LATER, WHOLE], 0),
        ([LATER], 0),
        ([Row(30, 0, 1), WHOLE], 0),
        ([DRAFTED, WHOLE], DRAFTS),
        ([DRAFTED, LATER], DRAFTS),
    ],
)
def test_no_step_with_a_prompt_waits(rows: list[Row], drafts: int) -> None:
    made = build(modules.overlaid, rows, drafts, kind=OnDevice)
    assert made.prep_initial_states is (LATER in rows)
    with pytest.raises(WaitedError):  # as upstream does
        build(modules.pristine, rows, drafts, kind=OnDevice)
    others = switch.enabled() - {"mamba-metadata"}
    with mock.patch.object(switch, "enabled", lambda: others), pytest.raises(WaitedError):
        build(modules.overlaid, rows, drafts, kind=OnDevice)
