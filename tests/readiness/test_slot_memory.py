"""Memory for slots: taken in slabs, free again when nothing refers to a slot."""

from typing import Any

import pytest
import torch
from support import modules
from support.batches import Spec, empty, state
from vllm.v1.readiness.sample import slot_memory
from vllm.v1.readiness.sample.slot_memory import SlotMemory

CPU = torch.device("cpu")
VOCABULARY = 37
PENALTY = {"presence_penalty": 1.5}


def test_slots_do_not_overlap() -> None:
    memory = SlotMemory(5, 3, CPU)
    slots = [memory.allocate() for _ in range(3)]
    for number, slot in enumerate(slots):
        slot.fill_(number + 1)
    assert [slot.tolist() for slot in slots] == [[n + 1] * 5 for n in range(3)]


def test_a_slot_that_is_let_go_of_is_taken_again() -> None:
    memory = SlotMemory(5, 3, CPU)
    slots = [memory.allocate() for _ in range(3)]
    address = slots[1].data_ptr()
    view = slots[1]
    del slots[1]
    assert memory.allocate().data_ptr() != address  # of another slab: it is still held
    del view
    assert memory.allocate().data_ptr() == address


@pytest.fixture
def slabs_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocate each slot alone."""
    monkeypatch.setattr(slot_memory, "_SLAB", 1)


def test_a_slot_that_outlives_its_release_is_not_given_out(slabs_of_one: None) -> None:
    """What is let go of later belongs to a slab that is gone."""
    memory = SlotMemory(5, 2, CPU)
    first, late = memory.allocate(), memory.allocate()
    del first
    memory.release()
    assert memory.allocated == 2
    del late
    memory.reserved = True
    memory.release()
    assert memory.allocated == 2
    memory.reserved = False
    memory.release()
    assert memory.allocated == 0
    assert memory.allocate().shape == (5,)


def step(batch: Any) -> None:
    """Begin a step, and make it ready to be sampled."""
    live = batch.readiness
    live.history.begin_step()
    live.begin_sampling(torch.zeros(batch.num_reqs, VOCABULARY), None)


def test_one_slab_is_held_for_a_request_that_comes_alone() -> None:
    memory = SlotMemory(5, 2, CPU)
    address = memory.allocate().data_ptr()
    memory.release()
    assert memory.allocated == 2
    assert memory.allocate().data_ptr() == address


def test_an_idle_batch_gives_slabs_back(slabs_of_one: None) -> None:
    batch = empty(modules.overlaid, VOCABULARY)
    memory = batch.readiness.penalties.memory
    batch.add_request(state(Spec([1], [2], {}), "r0"))
    batch.refresh_metadata()
    step(batch)
    assert memory.allocated == 0
    for number in (1, 2):
        batch.add_request(state(Spec([1, number], [2], PENALTY), f"r{number}"))
    batch.refresh_metadata()
    step(batch)
    assert memory.allocated
    rows = batch.num_reqs
    batch.readiness.observe_sampled(
        torch.ones(rows, 1, dtype=torch.int32), torch.zeros(rows, dtype=bool)
    )
    for number in range(rows):
        batch.remove_request(f"r{number}")
    assert memory.allocated == 0


def test_no_more_slots_are_held_than_were_planned_for() -> None:
    """Four leave and are kept; four join, and need the memory."""
    batch = empty(modules.overlaid, VOCABULARY, max_num_reqs=8)
    batch.readiness.penalties.capacity = 4
    batch.readiness.penalties.memory = SlotMemory(VOCABULARY, 4, CPU)
    running = [state(Spec([1, n], [2], PENALTY), f"r{n}") for n in range(4)]
    for request in running:
        batch.add_request(request)
    batch.refresh_metadata()
    step(batch)
    batch.readiness.observe_sampled(torch.ones(4, 1, dtype=torch.int32), torch.zeros(4, dtype=bool))
    for number in range(4):
        batch.remove_request(f"r{number}")
    for number in range(4):
        batch.add_request(state(Spec([1, number], [2], PENALTY), f"s{number}"))
        batch.condense()
    batch.refresh_metadata()
    step(batch)
    held = [slot for slot in batch.readiness.penalties._slots.values() if slot is not None]
    kept = [kept for kept in batch.readiness.penalties._kept.values() if kept.tensor is not None]
    assert len(held) + len(kept) == 4
    assert batch.readiness.penalties.memory.allocated == 4
    assert batch.readiness.penalties.serving
    assert running
