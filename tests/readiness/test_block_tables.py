"""The feature block-tables: the device's tables are those that upstream's copies make.

Upstream's tables and ours get the same operations, with a device whose memory is not the host's.
Both devices' tables are compared as a whole after every commit.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.asynchronous import cycling
from support.batches import empty
from support.device import Device, installed, poison
from support.examples import draws
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.inputs import block_tables
from vllm.v1.readiness.inputs.block_tables import BlockTables

ROWS = 8
#: Three KV cache groups; the blocks of the last are split for its kernels.
BLOCKS, KERNEL_BLOCKS = [16, 32, 32], [16, 32, 16]
GROUPS = len(BLOCKS)


def make(load: Any) -> Any:
    return load(modules.BLOCK_TABLE).MultiGroupBlockTable(
        max_num_reqs=ROWS,
        max_model_len=512,
        max_num_batched_tokens=64,
        pin_memory=False,
        device=torch.device("cpu"),
        block_sizes=BLOCKS,
        kernel_block_sizes=KERNEL_BLOCKS,
    )


class Pair:
    """Upstream's tables and ours, whose memory the simulated device has pinned."""

    def __init__(self, device: Device) -> None:
        self.theirs, self.ours = make(modules.pristine), make(modules.overlaid)
        self.both = (self.theirs, self.ours)
        for table in self.ours.block_tables:
            buffer = table.block_table
            pinned = device.allocate(buffer.cpu.nbytes).view(torch.int32).view_as(buffer.cpu)
            buffer.cpu, buffer.np = pinned.zero_(), pinned.numpy()
            table.pin_memory = True
        sender = block_tables.attach(self.ours)
        assert sender is not None
        self.sender: BlockTables = sender
        self.event = torch.Event()
        self.ids = 0

    def begin(self) -> None:
        """Begin a step, as the runner's synchronize_input_prep does."""
        self.event.synchronize()

    def new_ids(self, count: int) -> tuple[list[int], ...]:
        self.ids += count
        return tuple([self.ids * 10 + group] * count for group in range(GROUPS))

    def call(self, method: str, *arguments: Any) -> None:
        """Call one method of both."""
        for tables in self.both:
            getattr(tables, method)(*arguments)

    def room(self, row: int) -> int:
        """How many block ids a row has room for."""
        last = self.ours.block_tables[1]
        return int(last.max_num_blocks_per_req - last.num_blocks_per_row[row])

    def commit(self, requests: int) -> None:
        """Commit, and compare what the devices hold."""
        self.call("commit_block_table", requests)
        self.event.record()
        self.compare()

    def compare(self) -> None:
        for theirs, ours in zip(*(tables.block_tables for tables in self.both), strict=True):
            np.testing.assert_array_equal(ours.block_table.np, theirs.block_table.np)
            np.testing.assert_array_equal(ours.block_table.gpu, theirs.block_table.gpu)

    def pad(self, requests: int, padded: int) -> None:
        """Fill rows on the device with the null block, as the runner for a CUDA graph."""
        for tables in self.both:
            for table in tables.block_tables:
                table.get_device_tensor(padded)[requests:].fill_(0)

    def lose(self) -> None:
        """Lose what is on the device, as in its sleep."""
        for tables in self.both:
            for table in tables.block_tables:
                poison(table.block_table.gpu)
        self.sender.lose()


@contextmanager
def limits(small: int = 0, cells: int = 12) -> Iterator[None]:
    """Limits that small tables reach."""
    with mock.patch.multiple(block_tables, SMALL=small, RUNS=2, CELLS=cells):
        yield


ROW = st.integers(0, ROWS - 1)
OPERATIONS = st.one_of(
    st.tuples(st.just("add_row"), ROW, st.integers(0, 16)),
    st.tuples(st.just("append_row"), ROW, st.integers(1, 4)),
    st.tuples(st.just("append_row"), ROW, st.just(1)),
    st.tuples(st.sampled_from(["move_row", "swap_row"]), ROW, ROW),
    st.tuples(st.just("clear_row"), ROW, st.just(0)),
    st.tuples(st.just("lose"), st.just(0), st.just(0)),
)
STEPS = st.lists(
    st.tuples(
        st.lists(OPERATIONS, max_size=6),
        *(st.integers(1, ROWS), st.integers(0, ROWS)),
    ),
    min_size=1,
    max_size=12,
)


def perform(pair: Pair, name: str, row: int, other: int) -> None:
    if name in ("add_row", "append_row"):
        room = pair.room(row) if name == "append_row" else 16
        pair.call(name, pair.new_ids(min(other, room)), row)
    elif name == "lose":
        pair.lose()
    elif name == "clear_row":
        pair.call(name, row)
    else:
        pair.call(name, row, other)


@given(steps=STEPS, small=st.sampled_from([0, 600]), decisions=st.lists(st.integers(0, 5)))
@draws(150)
def test_the_device_holds_what_upstream_sends(
    steps: list[Any], small: int, decisions: list[int]
) -> None:
    """Rows come, grow, move and leave; padded rows are filled."""
    with limits(small), installed(Device(cycling(decisions))) as device:
        pair = Pair(device)
        for operations, requests, padded in steps:
            pair.begin()
            for operation in operations:
                perform(pair, *operation)
            pair.commit(requests)
            pair.pad(requests, padded)
        pair.begin()
        device.default.finish()
        assert device.rewritten == 0
        assert device.stream_waits == 0
        pair.compare()


def test_only_what_has_changed_is_sent() -> None:
    with limits(cells=64), installed(Device(cycling([]))) as device:
        pair, sizes = Pair(device), device.uploads
        for row in range(6):
            pair.call("add_row", pair.new_ids(3), row)
        pair.commit(6)
        widths = [4 * table.max_num_blocks_per_req for table in pair.ours.block_tables]  # bytes
        assert sizes == [6 * width for width in widths]
        sizes.clear()
        pair.commit(6)
        pair.commit(5)
        assert sizes == []
        for row in (1, 3, 4):
            pair.call("append_row", pair.new_ids(1), row)
        pair.commit(5)
        assert sizes == [(8 + 4) * (3 + 3 + 6)]  # an index of 8 bytes and an id of 4 for each cell
        sizes.clear()
        pair.call("swap_row", 2, 3)
        pair.call("append_row", pair.new_ids(1), 0)
        pair.commit(5)
        assert sizes == [*(2 * width for width in widths), (8 + 4) * 4]
        sizes.clear()
        for row in (0, 2, 4):
            pair.call("clear_row", row)
        pair.commit(5)
        assert sizes == [5 * width for width in widths]


def test_tables_that_somebody_else_writes_are_left_to_upstream() -> None:
    """Elastic expert parallelism saves tables, clears them, and writes both tensors itself."""
    with limits(), installed(Device(cycling([]))) as device:
        pair = Pair(device)
        pair.call("add_row", pair.new_ids(3), 0)
        pair.commit(1)
        pair.call("clear")
        for tables in pair.both:
            for table in tables.block_tables:
                table.block_table.np[0, :5] = 77
        device.uploads.clear()
        pair.commit(1)
        assert len(device.uploads) == GROUPS


def test_nothing_is_sent_where_the_devices_table_is_the_hosts() -> None:
    tables = make(modules.overlaid)
    sender = block_tables.attach(tables)
    assert sender is not None
    for table in tables.block_tables:
        table.block_table.gpu = table.block_table.cpu
        table.commit_block_table = None  # upstream's copy onto itself
    tables.add_row(([1], [2], [3]), 0)
    tables.commit_block_table(1)
    tables.append_row(([1], [2], [3]), 0)
    tables.commit_block_table(1)


def test_the_hosts_buffers_are_not_on_torchs_default_device() -> None:
    tables = make(modules.overlaid)
    with torch.device("meta"):
        sender = block_tables.attach(tables)
    assert sender is not None
    assert {stage.device.type for stage in sender._stages} == {"cpu"}


def test_a_batch_has_the_feature_on_any_rank_unless_it_is_off() -> None:
    def batch(value: str, **named: Any) -> Any:
        with mock.patch.dict(os.environ, {switch.NAME: value}):
            return empty(modules.overlaid, 16, **named)

    for each in (batch("on"), batch("on", is_pooling_model=True)):
        feature = each.readiness.block_tables
        assert each.block_table.readiness is feature is not None
    off = batch("-block-tables")
    assert off.block_table.readiness is off.readiness.block_tables is None
    off.readiness.lose_block_tables()


def test_other_classes_of_tables_are_left_to_upstream() -> None:
    own = modules.overlaid(modules.BLOCK_TABLE)
    tables = make(modules.overlaid)
    tables.block_tables[1].__class__ = type("Own", (own.BlockTable,), {})
    assert block_tables.attach(tables) is None
    tables = make(modules.overlaid)
    tables.__class__ = type("Own", (own.MultiGroupBlockTable,), {})
    assert block_tables.attach(tables) is None
    assert block_tables.attach(make(modules.pristine)) is None
    assert block_tables.attach(None) is None
    unpinned = make(modules.overlaid)
    for table in unpinned.block_tables:
        table.device = torch.device("cuda")
    assert block_tables.attach(unpinned) is None


@pytest.mark.parametrize(("pipeline", "buffers"), [(None, 2), (1, 2), (3, 6)])
def test_there_are_more_buffers_than_steps_in_flight(pipeline: int | None, buffers: int) -> None:
    group = mock.Mock(world_size=pipeline)
    known = mock.patch.object(block_tables, "get_pp_group", lambda: group)
    with known if pipeline else mock.patch.object(block_tables, "RUNS", 4):
        sender = block_tables.attach(make(modules.overlaid))
    assert sender is not None
    assert len({stage.data_ptr() for stage in sender._stages}) == buffers
