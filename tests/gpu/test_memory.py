"""Device memory: what penalties take, and when there is hardly any."""

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu.kinds import ENVIRONMENT
from overlay.errors import Exit
from support import modules
from support.batches import Spec, empty, fill
from support.engine import Engine
from support.sites import REPO, UPSTREAM, run

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
def test_room_is_held_where_vllm_leaves_none() -> None:
    """2 GiB are free, of which vLLM takes all; for 64 requests 37 MiB are held."""
    needed = 64 * 4 * VOCABULARY
    for utilization, held in ((1.0, needed), (0.9, 0)):
        batch = empty(modules.overlaid, VOCABULARY, "cuda", max_num_reqs=64)
        before = torch.cuda.memory_allocated()
        # Of what is not free vLLM's own share is what torch has reserved here.
        batch.readiness.reserve(SimpleNamespace(gpu_memory_utilization=utilization))
        assert torch.cuda.memory_allocated() - before == pytest.approx(held, abs=MIB)
        fill(batch, [Spec([1], [], {})])
        assert torch.cuda.memory_allocated() - before < MIB


def test_slots_are_not_cut_out_of_memory_that_others_come_back_to() -> None:
    """A block that an activation has given back is there for the next one, whole."""
    activation = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    batch = empty(modules.overlaid, LARGE, "cuda", max_num_reqs=64)
    fill(batch, [Spec([1, 2], [3], PENALTY)] * 64)
    del activation
    reserved = torch.cuda.memory_reserved()
    batch.readiness.begin_step()
    batch.readiness.prepare(torch.empty(1, LARGE), None)
    assert batch.readiness.penalties.serving
    activation = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    slots = 64 * 4 * LARGE
    assert torch.cuda.memory_reserved() - reserved < slots * 1.5
    del activation


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An overlaid view of the installation, where it can be linked to it."""
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=UPSTREAM))
    made = Engine(folder)
    assert run("apply", "--site", made.site).returncode == Exit.DONE
    yield made
    shutil.rmtree(folder)


@pytest.mark.parametrize("vocabulary", [VOCABULARY, LARGE])
def test_a_nearly_full_device_serves_512_penalised_requests(
    engine: Engine, vocabulary: int
) -> None:
    served = engine.start(PRESSURE, [str(vocabulary)], (), **ENVIRONMENT)
    found = served.finish()
    assert "error" not in found, found
    assert found["finished"] == 512
    assert "no room on the device" not in served.text()
    assert "kept from the KV cache, for the penalties of 512 requests" in served.text()


def test_an_idle_engine_holds_no_logprobs_on_the_device(engine: Engine) -> None:
    found = engine.start(IDLE, [], (), **ENVIRONMENT).finish()
    assert found["after"] - found["before"] < 32 * MIB, found
