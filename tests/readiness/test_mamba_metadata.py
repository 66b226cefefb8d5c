"""The feature mamba-metadata: nothing asks the device whether prompts continue from a state."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.hybrid_step import Row
from support.inputs import differences
from support.mamba2 import DECODE, DRAFTED, DRAFTS, LATER, WHOLE, metadata
from vllm.v1.readiness.engine import switch

PADDING = Row(0, 0, 0)


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


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


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
    stock, ours = (
        metadata(load, ordered, mode=mode)() for load in (modules.pristine, modules.overlaid)
    )
    assert differences(vars(stock), vars(ours)) == []
    assert type(ours.prep_initial_states) is bool


@given(rows=ROWS, rejected=st.integers(0, DRAFTS), mode=MODES)
def test_metadata_is_stocks_with_drafts(rows: list[Row], rejected: int, mode: str) -> None:
    """Lengths on the host are then too large, but for rows that begin."""
    drafted = [DRAFTED if row.computed >= row.prompt else row for row in rows]
    ordered = sorted(drafted, key=lambda row: (row.computed < row.prompt, row.computed == 0))
    stock, ours = (
        metadata(load, ordered, DRAFTS, rejected, mode)()
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
    ours = metadata(modules.overlaid, rows, drafts, place=on_device)
    assert ours().prep_initial_states is (LATER in rows)
    with pytest.raises(WaitedError):  # as upstream does
        metadata(modules.pristine, rows, drafts, place=on_device)()
    others = switch.enabled() - {"mamba-metadata"}
    with mock.patch.object(switch, "enabled", lambda: others), pytest.raises(WaitedError):
        ours()
