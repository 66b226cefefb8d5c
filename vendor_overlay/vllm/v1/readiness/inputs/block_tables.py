"""Feature ``block-tables``: a step sends changed block ids only.

In every step, upstream copies the rows of each block table to the device, at full max_model_len
width: 4 MiB for 128 requests of up to 131,072 tokens. In a decode step about eight of these block
ids are new. Here ``commit_block_table`` sends only

- block ids appended to rows: through one pinned buffer, with one scatter per KV cache group;
- entire rows that were written in another way, because a request came, left or moved, and rows that
  the last commit did not include: by one copy per run of rows.

A small table, or one with many changed rows, is copied whole, as upstream does. On CPU engines host
and device share the tables, and nothing is sent.

Appended ids are found from the number of block ids per row, and the tables collect the rows written
in another way. Contents are not compared. No pinned buffer is written while a copy may read it:
under async scheduling the runner waits for the previous step's copies, and otherwise there are more
buffers than in-flight steps.
"""

# mirrors: vllm.v1.worker.block_table:BlockTable.commit_block_table
# mirrors: vllm.v1.worker.block_table:BlockTable.append_row
# mirrors: vllm.v1.worker.block_table:BlockTable.add_row
# mirrors: vllm.v1.worker.block_table:BlockTable.clear_row
# mirrors: vllm.v1.worker.block_table:BlockTable.move_row
# mirrors: vllm.v1.worker.block_table:BlockTable.swap_row
# mirrors: vllm.v1.worker.block_table:MultiGroupBlockTable.commit_block_table
# mirrors: vllm.v1.utils:CpuGpuBuffer.copy_to_gpu

from collections.abc import Iterator
from operator import is_
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

import numpy as np
import torch
from vllm.distributed import get_pp_group
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import gauges, pinning, subclasses

if TYPE_CHECKING:
    from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable

#: Bytes up to which a table is copied whole, because the copy takes no longer than its launch.
SMALL = 256 << 10
#: Maximum number of runs of rows copied one by one, and of block ids scattered.
RUNS = 4
CELLS = 1024
#: 4-byte words per entry of a pinned buffer: an int64 index and an int32 block id.
_WORDS = 3


class ChangedRows(set[int]):
    """Rows to send entirely; ignored when tables are compared."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[set[int]], tuple[list[int]]]:
        """Pickle and copy as a plain set."""
        return set, (list(self),)

    def __eq__(self, other: object) -> bool:
        """Compare equal to any set, for callers that compare whole batches."""
        return isinstance(other, set)

    __hash__ = None


class Cells(NamedTuple):
    """Block ids appended to rows of one KV cache group; arrays of one length."""

    group: int
    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray


def attach(tables: "MultiGroupBlockTable | None") -> "BlockTables | None":
    """Attach the feature to the block tables of a new batch; None to fall back to upstream.

    Falls back for third-party table classes, and for a device without pinned host memory.
    """
    if "readiness" not in vars(type(tables)):
        return None
    assert tables is not None
    groups = tables.block_tables
    if not groups or any("changed_rows" not in vars(type(table)) for table in groups):
        return None
    if not (groups[0].pin_memory or groups[0].device.type == "cpu"):
        return None
    sender = BlockTables(list(groups))
    tables.readiness = sender
    return sender


def _stages() -> int:
    try:
        return 2 * int(get_pp_group().world_size)
    except AssertionError:  # not initialised
        return 2


class BlockTables(subclasses.Uncopied):
    """Block tables of one batch on the device, one per KV cache group."""

    def __init__(self, tables: "list[BlockTable]") -> None:
        self._tables = tables
        self._changed = ChangedRows()
        for table in tables:
            table.changed_rows = self._changed
        #: Number of block ids per row when the row was last sent, by group.
        self._counts = [table.num_blocks_per_row.copy() for table in tables]
        #: Number of rows in the last commit; later rows on the device are undefined.
        self._sent = 0
        self._given_up = False
        self._targets = [torch.empty(0) for _ in tables]
        self._flat: list[torch.Tensor] = []
        self._on_host = False
        self._follow()
        device, size = tables[0].device, CELLS * _WORDS
        self._staged = torch.zeros(size, dtype=torch.int32, device=device)
        self._stages = [
            pinning.allocate(size * 4).view(torch.int32)
            if tables[0].pin_memory
            else torch.zeros(size, dtype=torch.int32, device="cpu")
            for _ in range(_stages())
        ]
        gauges.watch(self)
        self._turn = 0
        #: Views of the pinned and device buffers, by index of pinned buffer and number of cells.
        self._views: dict[tuple[int, int], _Entries] = {}
        # A kernel's first launch may block.
        dummy = _Entries.of(torch.zeros_like(self._stages[0]), self._staged, 1)
        torch.zeros(1, dtype=torch.int32, device=device).scatter_(0, dummy.where, dummy.what)

    def held(self) -> Iterator[gauges.Value]:
        """See :meth:`gauges.Holder.held`."""
        pinned = sum(stage.nbytes for stage in self._stages if stage.is_pinned())
        yield gauges.Value(gauges.PINNED_BYTES, (registry.BLOCK_TABLES,), pinned)

    def commit(self, requests: int) -> bool:
        """Update the first ``requests`` rows on the device; False to fall back to upstream."""
        if self._given_up:
            return False
        if self._follow():
            self._changed.clear()
            return True
        rows = self._take_rows(requests)
        runs = None if 2 * len(rows) > requests else _runs(rows)
        cells: list[Cells] = []
        for group, table in enumerate(self._tables):
            now = table.num_blocks_per_row[:requests]
            sent = self._counts[group][:requests]
            if runs is not None:
                if rows:
                    sent[rows] = now[rows]
                elif now.tobytes() == sent.tobytes():
                    continue
                if 4 * requests * table.max_num_blocks_per_req > SMALL:
                    grown = self._grown(group, requests)
                    if grown is not None:
                        self._copy_runs(group, runs)
                        cells.append(grown)
                        continue
            table.commit_block_table(requests)  # upstream's copy of all rows of this group
            sent[:] = now
        if cells:
            self._send(cells, requests)
        return True

    def lose(self) -> None:
        """Invalidate all rows on the device."""
        self._sent = 0

    def give_up(self) -> None:
        """Fall back to upstream permanently. Called before the tables are written directly."""
        self._given_up = True

    def _follow(self) -> bool:
        """Update references to replaced tensors; True if host and device share the tables."""
        targets = [table.block_table.gpu for table in self._tables]
        if not all(map(is_, targets, self._targets)):
            self._targets = targets
            self._flat = [target.view(-1) for target in targets]
            sources = [table.block_table.cpu for table in self._tables]
            self._on_host = all(map(is_, targets, sources))
            self.lose()
        return self._on_host

    def _take_rows(self, requests: int) -> list[int]:
        """Return the rows below ``requests`` to send entirely, and mark them as sent."""
        rows = self._changed
        if requests > self._sent:
            rows.update(range(self._sent, min(requests, len(self._counts[0]))))
        taken = [row for row in rows if row < requests]
        rows.clear()
        self._sent = requests
        return taken

    def _grown(self, group: int, requests: int) -> Cells | None:
        """Return the block ids appended since the rows were sent; None if a row is shorter now."""
        table, counts = self._tables[group], self._counts[group]
        now, sent = table.num_blocks_per_row[:requests], counts[:requests]
        rows = np.flatnonzero(now != sent)
        columns = sent[rows]
        added = now[rows] - columns
        lengths = set(added.tolist())
        if lengths - {1}:
            if min(lengths) < 0:
                return None
            ends = np.cumsum(added)
            offsets = np.arange(ends[-1]) - np.repeat(ends - added, added)
            rows, columns = np.repeat(rows, added), np.repeat(columns, added) + offsets
        return Cells(group, rows, columns, table.block_table.np[rows, columns])

    def _copy_runs(self, group: int, runs: list[tuple[int, int]]) -> None:
        source = self._tables[group].block_table.cpu
        for begin, end in runs:
            self._targets[group][begin:end].copy_(source[begin:end], non_blocking=True)

    def _send(self, cells: list[Cells], requests: int) -> None:
        """Send appended block ids; copy whole tables if there are too many."""
        for group, rows, _, _ in cells:
            self._counts[group][rows] = self._tables[group].num_blocks_per_row[rows]
        total = sum(len(grown.values) for grown in cells)
        if total > CELLS:
            for grown in cells:
                self._tables[grown.group].commit_block_table(requests)
        elif total:
            self._upload(cells, total)

    def _upload(self, cells: list[Cells], total: int) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % len(self._stages)
        entries = self._views.get((turn, total))
        if entries is None:
            entries = _Entries.of(self._stages[turn], self._staged, total)
            self._views[turn, total] = entries
        end = 0
        for group, rows, columns, ids in cells:
            begin, end = end, end + len(ids)
            width = self._tables[group].max_num_blocks_per_req
            entries.indices[begin:end] = rows * width + columns
            entries.values[begin:end] = ids
        entries.target.copy_(entries.source, non_blocking=True)
        end = 0
        for group, _, _, ids in cells:
            begin, end = end, end + len(ids)
            where, what = entries.where, entries.what
            if end - begin < total:
                where, what = where[begin:end], what[begin:end]
            self._flat[group].scatter_(0, where, what)


class _Entries(NamedTuple):
    """Views of the pinned and device buffers, which hold all indices, then all block ids."""

    indices: np.ndarray  # on the host, to be written
    values: np.ndarray  # on the host, to be written
    source: torch.Tensor  # of the copy
    target: torch.Tensor  # of the copy
    where: torch.Tensor  # indices on the device
    what: torch.Tensor  # block ids on the device

    @classmethod
    def of(cls, stage: torch.Tensor, staged: torch.Tensor, total: int) -> "_Entries":
        """Create the views of ``total`` cells."""
        words = stage.numpy()
        begin, end = 2 * total, _WORDS * total
        return cls(
            *(words[:begin].view(np.int64), words[begin:end]),
            *(stage[:end], staged[:end]),
            *(staged[:begin].view(torch.int64), staged[begin:end]),
        )


def _runs(rows: list[int]) -> list[tuple[int, int]] | None:
    """Return begin and end of each run of consecutive rows; None if there are too many runs."""
    runs: list[tuple[int, int]] = []
    for row in sorted(rows):
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        elif len(runs) == RUNS:
            return None
        else:
            runs.append((row, row + 1))
    return runs
