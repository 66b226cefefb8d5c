"""The fix lora-slots: tokens are mapped to the slot that their adapter is in.

The managers are upstream's, without a model: their caches and slots are real.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from support import modules
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.v1.readiness.engine import lora_slots, switch

FIX = "lora-slots"
MANAGER = "vllm/lora/model_manager.py"
WORKER = "vllm/lora/worker_manager.py"
REQUEST = "vllm/lora/request.py"
SLOTS = 2


class Worker:
    """A worker's adapters without weights, and the slots that its batch's tokens were mapped to."""

    def __init__(self, side: str, capacity: int = 4) -> None:
        managers = modules.of_side(side)(MANAGER)

        class Manager(managers.LRUCacheLoRAModelManager):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.lora_config = SimpleNamespace(max_loras=SLOTS, max_cpu_loras=capacity)
                self.lora_index_to_id = [None] * SLOTS
                self.modules: dict[str, Any] = {}
                self._last_mapping = None
                cache = managers.LoRALRUCache
                self._registered_adapters = cache(capacity, self.deactivate_adapter)
                self._active_adapters = cache(SLOTS, self._deactivate_adapter)
                self.mapped: list[int] = []
                self.times = 0

            def _set_adapter_mapping(self, mapping: LoRAMapping) -> None:
                self.times += 1
                self.mapped = [self.lora_index_to_id.index(n) for n in mapping.index_mapping]

            def _create_merged_loras_inplace(self, lora: Any) -> None:
                pass

        self.manager = Manager()
        workers = modules.of_side(side)(WORKER)
        workers.LRUCacheLoRAModelManager = managers.LRUCacheLoRAModelManager  # ours knows ours
        self.worker = object.__new__(workers.LRUCacheWorkerLoRAManager)
        self.worker._adapter_manager = self.manager
        self.worker._load_adapter = lambda request: SimpleNamespace(id=request.lora_int_id)

    def step(self, *numbers: int) -> list[int | None]:
        """Run a step with a token of each adapter; the adapters in the slots that it reads."""
        mapping = LoRAMapping(numbers, numbers, is_prefill=True)
        # Not a set, whose order differs between processes, and with it the slots.
        self.worker.set_active_adapters([adapter(number) for number in numbers], mapping)
        return [self.manager.lora_index_to_id[slot] for slot in self.manager.mapped]


def adapter(number: int, **fields: Any) -> LoRARequest:
    """Name an adapter."""
    return LoRARequest(f"a{number}", number, "p", **fields)


@pytest.mark.parametrize("loads", [1, 2, 3])
def test_an_adapter_that_moved_is_read_from_its_slot(side: str, loads: int) -> None:
    worker = Worker(side)
    assert worker.step(1, 2) == [1, 2]
    right = True
    for number in range(3, 3 + loads):
        worker.worker.add_adapter(adapter(number))
        right &= worker.step(1, 2) == [1, 2]
    assert right or side != "ours"
    if side != "ours" and loads == 1:
        assert not right
    assert worker.step(2, 1) == [2, 1]


def test_the_mapping_is_kept_while_slots_are_the_same(side: str) -> None:
    worker = Worker(side)
    for _ in range(5):
        worker.step(1, 2)
        worker.worker.add_adapter(adapter(2))
    assert worker.manager.times == 1


@pytest.mark.parametrize("capacity", [2, 3, 4])
@pytest.mark.parametrize("pinned", [(3,), (3, 4)])
def test_a_pinned_adapter_leaves_room_for_the_batch(
    side: str, pinned: tuple[int, ...], capacity: int
) -> None:
    worker = Worker(side, capacity)
    for number in pinned:
        worker.worker.add_adapter(adapter(number))
        worker.worker.pin_adapter(number)
    if side == "ours":
        assert worker.step(1, 2) == [1, 2]
        assert worker.step(2) == [2]
    else:
        with pytest.raises((ValueError, RuntimeError), match=r"in list|pinned"):
            worker.step(1, 2)


def test_a_pinned_adapter_stays_while_there_is_room(side: str) -> None:
    worker = Worker(side)
    worker.worker.add_adapter(adapter(3))
    worker.worker.pin_adapter(3)
    for number in (1, 2, 1):
        assert worker.step(number) == [number]
        assert 3 in worker.manager.lora_index_to_id
    assert worker.step(3, 1) == [3, 1]


def test_adapters_of_one_name_are_two(side: str) -> None:
    kind = modules.of_side(side)(REQUEST).LoRARequest
    one, two = kind("a", 1, "p"), kind("a", 2, "p")
    assert len({one, two}) == (2 if side == "ours" else 1)
    assert one == kind("a", 1, "p")
    assert one != kind("b", 1, "p")
    assert one != "a"


def test_a_loaded_adapter_is_not_reloaded(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "pinned":
        monkeypatch.setenv(switch.NAME, "off")
    lora = adapter(1, load_inplace=True)
    lora_slots.loaded(lora)
    assert lora.load_inplace == (side != "ours")
