"""Device memory that penalties take, with little of it free."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.kinds import ENVIRONMENT
from support import modules
from support.batches import Spec, empty, fill, state
from support.engine import Engine
from support.sites import REPO

pytestmark = pytest.mark.gpu

PRESSURE = REPO / "tests" / "gpu" / "pressure.py"
IDLE = REPO / "tests" / "gpu" / "idle.py"
VOCABULARY = 151_936
#: Slots of more than 1 MiB, which torch's allocator treats as large.
LARGE = 262_208
PENALTY = {"presence_penalty": 1.0}
MIB = 1 << 20


@pytest.fixture
def filled() -> Iterator[None]:
    """A device of which 2 GiB are left."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (2 << 30), dtype=torch.uint8, device="cuda")
    yield
    del held
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("filled")
def test_all_slots_are_allocated_first_where_vllm_leaves_no_room() -> None:
    """2 GiB are free, and vLLM takes all of them."""
    needed = 64 * 4 * VOCABULARY
    for fraction, cache, allocated in ((1.0, None, needed), (0.9, None, 0), (1.0, 1 << 30, 0)):
        batch = empty(modules.overlaid, VOCABULARY, "cuda", max_num_reqs=64)
        before = torch.cuda.memory_allocated()
        batch.readiness.penalties.reserve(
            SimpleNamespace(gpu_memory_utilization=fraction, kv_cache_memory_bytes=cache)
        )
        assert torch.cuda.memory_allocated() - before == pytest.approx(allocated, abs=MIB)
        reserved = torch.cuda.memory_reserved()
        fill(batch, [Spec([1], [], PENALTY)])
        begin(batch)
        assert batch.readiness.penalties.serving
        grown = torch.cuda.memory_reserved() - reserved
        assert (grown >= 16 * MIB) is not bool(allocated)


def begin(batch: Any) -> None:
    """Begin a step, and prepare its sampling."""
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(torch.empty(1, batch.vocab_size), None)


@pytest.mark.usefixtures("filled")
def test_slots_leave_what_activations_need_and_are_given_back() -> None:
    """2 GiB are free, and later activations need 1.5 of them."""
    batch = empty(modules.overlaid, LARGE, "cuda", max_num_reqs=1024)
    live = batch.readiness
    live.penalties.reserve(SimpleNamespace(gpu_memory_utilization=0.5, kv_cache_memory_bytes=None))
    torch.cuda.reset_peak_memory_stats()
    needed = 1536 * MIB
    activation = torch.empty(needed, dtype=torch.uint8, device="cuda")
    del activation
    live.warm_up()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    specs = [Spec([1, 2], [3], PENALTY)] * 700
    fill(batch, specs[:100])
    begin(batch)
    assert live.penalties.serving
    live.observe_sampled(
        torch.ones(100, 1, dtype=torch.int32, device="cuda"),
        torch.zeros(100, dtype=bool, device="cuda"),
    )
    for number, spec in enumerate(specs[100:], 100):
        batch.add_request(state(spec, f"r{number}"))
    batch.refresh_metadata()
    begin(batch)
    assert not live.penalties.serving
    # Slots that do not suffice are freed.
    assert free - torch.cuda.mem_get_info()[0] < 32 * MIB
    activation = torch.empty(needed, dtype=torch.uint8, device="cuda")
    del activation


def test_slots_do_not_split_blocks_that_activations_reuse() -> None:
    activation = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    batch = empty(modules.overlaid, LARGE, "cuda", max_num_reqs=64)
    fill(batch, [Spec([1, 2], [3], PENALTY)] * 64)
    del activation
    reserved = torch.cuda.memory_reserved()
    begin(batch)
    assert batch.readiness.penalties.serving
    activation = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    slots = 64 * 4 * LARGE
    assert torch.cuda.memory_reserved() - reserved < slots * 1.5
    del activation


@pytest.mark.parametrize("vocabulary", [VOCABULARY, LARGE])
def test_a_nearly_full_device_serves_512_penalised_requests(
    engine: Engine, vocabulary: int
) -> None:
    engine.apply()
    served = engine.start(PRESSURE, [str(vocabulary)], environment=ENVIRONMENT)
    report = served.finish()
    assert "error" not in report, report
    assert report["finished"] == 512
    assert "no memory left for" not in served.text()
    assert "to leave room for the penalties of 512 requests" in served.text()


def test_an_idle_engine_holds_no_logprobs_on_the_device(engine: Engine) -> None:
    engine.apply()
    report = engine.start(IDLE, environment=ENVIRONMENT).finish()
    assert report["after"] - report["before"] < 32 * MIB, report
