"""Block tables and positions on a GPU that is always behind: the same bytes, and no wait."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.waits import errors_for_waits, waited
from support import modules
from vllm.v1.readiness.inputs import block_tables, rope_positions
from vllm.v1.utils import CpuGpuBuffer

pytestmark = pytest.mark.gpu

ROWS = 64
BLOCKS = [16, 32]


def make(load: Any) -> Any:
    return load(modules.BLOCK_TABLE).MultiGroupBlockTable(
        *(ROWS, 65536, 256, True, torch.device("cuda")),
        block_sizes=BLOCKS,
        kernel_block_sizes=BLOCKS,
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_device_holds_what_upstream_sends_and_the_host_does_not_wait(seed: int) -> None:
    """The host prepares a step as soon as the copies of the step before are done, as vLLM does."""
    chance = random.Random(seed)
    theirs, ours = both = make(modules.pristine), make(modules.overlaid)
    assert block_tables.attach(ours) is not None
    event = torch.cuda.Event()
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    event.record()
    for ids in range(1, 301):
        event.synchronize()
        requests = chance.randint(ROWS - 4, ROWS)
        grown = chance.sample(range(ROWS), chance.choice([0, 1, 4, 9]))
        changed = chance.sample(range(ROWS), chance.choice([0, 0, 1, 2, 3, 40]))
        for tables in both:
            for row in changed:
                tables.clear_row(row)
                tables.add_row(([ids] * 9, [ids + row] * 5), row)
            for row in grown:
                tables.append_row(([row + ids], [ids, row]), row)
        with errors_for_waits():
            for tables in both:
                tables.commit_block_table(requests)
        for tables in both:
            for table in tables.block_tables:
                table.get_device_tensor(ROWS)[requests:].fill_(0)
        event.record()
        found += [
            (one.block_table.gpu.clone(), other.block_table.gpu.clone())
            for one, other in zip(theirs.block_tables, ours.block_tables, strict=True)
        ][: 2 * chance.choice([0, 1])]
        torch.cuda._sleep(chance.choice([0, 100_000, 1_000_000]))
        if len(found) > 20:
            assert all(torch.equal(*pair) for pair in found)
            found.clear()
    assert all(torch.equal(*pair) for pair in found)


def test_positions_are_sent_while_the_device_is_busy() -> None:
    """So many that stock's copy, which goes through pageable memory, waits on an H200."""
    count, device = 131_072, torch.device("cuda")
    positions = CpuGpuBuffer(3, count + 1, dtype=torch.int64, device=device, pin_memory=True)
    positions.np[:] = torch.arange(3 * (count + 1)).view(3, count + 1)
    runner: Any = SimpleNamespace(uses_mrope=True, mrope_positions=positions, pin_memory=True)

    def stock() -> None:
        positions.gpu[:, :count].copy_(positions.cpu[:, :count], non_blocking=True)

    assert waited(stock) > 0.03, "the release's copy does not wait: the feature can go"
    positions.gpu.zero_()
    assert waited(lambda: rope_positions.send(runner, count)) < 0.01
    assert torch.equal(positions.gpu[:, :count].cpu(), positions.cpu[:, :count])
    assert not positions.gpu[:, count:].any()
