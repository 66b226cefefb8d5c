"""Readback on a GPU: the kernel and the buffers. Late readbacks of engines: test_long.py."""

import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gpu.kinds import ENVIRONMENT
from support.batches import drawn
from support.engine import Engine
from support.sites import REPO
from vllm.v1.readiness.outputs.readback import Readbacks

pytestmark = pytest.mark.gpu

PROGRAM = REPO / "tests" / "gpu" / "kinds.py"

DTYPES = [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
#: Words of four bytes in a block of the kernel, and bytes from which readbacks copy instead.
BLOCK = 1024
STORED = 1 << 20


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether bytes, shape and dtype are the same."""
    pair = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bool(torch.equal(*pair))


class TestKernel:
    """The kernel stores all bytes of its sources, and no others."""

    @staticmethod
    def check(sources: list[torch.Tensor]) -> None:
        """Store sources into targets between bytes that must not change."""
        from vllm.v1.readiness.kernels import readback

        margin = 64
        memories = [
            torch.full((source.nbytes + 2 * margin,), 0xA5, dtype=torch.uint8, pin_memory=True)
            for source in sources
        ]
        targets = [
            memory[margin : margin + source.nbytes].view(source.dtype).view(source.shape)
            for memory, source in zip(memories, sources, strict=True)
        ]
        on_device = [source.cuda() for source in sources]
        readback.store(on_device, targets)
        torch.cuda.synchronize()
        for source, target, device, memory in zip(
            sources, targets, on_device, memories, strict=True
        ):
            assert same(target, source)
            assert same(device.cpu(), source)
            assert (memory[:margin] == 0xA5).all()
            assert (memory[margin + source.nbytes :] == 0xA5).all()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_each_dtype_at_sizes_around_blocks_and_words(self, dtype: torch.dtype) -> None:
        for count in (0, 1, 2, 3, 4, 5, 7, 127, 128, 129, BLOCK - 1, BLOCK, BLOCK + 1, 4099):
            self.check([drawn(count, dtype, count)])

    @pytest.mark.parametrize("count", range(10))
    def test_any_number_of_tensors_of_any_kind(self, count: int) -> None:
        chance = random.Random(count)
        for turn in range(5):
            sizes = [chance.choice([0, 1, 5, 128, 2688, 5001]) for _ in range(count)]
            self.check([drawn(n, chance.choice(DTYPES), turn + i) for i, n in enumerate(sizes)])

    def test_sizes_beyond_what_readbacks_have_it_store(self) -> None:
        self.check([drawn(STORED // 4 + 3, torch.int32, 1), drawn(5, torch.int64, 2)])


@pytest.mark.parametrize("words", [STORED // 4 - 1, STORED // 4, STORED // 4 + 1])
@pytest.mark.parametrize("side", [False, True])
def test_stored_and_copied_tensors_arrive_alike(words: int, side: bool) -> None:
    readbacks = Readbacks(torch.device("cuda"))
    expected = [drawn(words - 33, torch.float32, 1).view(-1, 1), drawn(33, torch.int32, 2)]
    stream = torch.cuda.Stream() if side else None
    readback = readbacks.start([tensor.cuda() for tensor in expected], stream)
    readback.wait("test")
    assert all(map(same, readback.tensors, expected))


class Held(NamedTuple):
    """Tensors of a readback, its event, and what they must hold."""

    tensors: list[torch.Tensor]
    event: torch.Event
    expected: list[torch.Tensor]


@pytest.mark.parametrize("seed", range(3))
def test_late_copies_held_dropped_and_reused_are_always_right(seed: int) -> None:
    """Sources are made on the device by kernels, and overwritten as soon as they may be."""
    chance = random.Random(seed)
    readbacks = Readbacks(torch.device("cuda"), least=256)
    sides = [torch.cuda.Stream() for _ in range(2)]
    counts = [1, 40, 128, 2688, 70_000, 300_000]  # the last is too large to be stored
    known = [torch.arange(count, dtype=torch.int32) for count in counts]
    bases = [tensor.cuda() for tensor in known]
    torch.cuda.synchronize()
    held: list[Held] = []
    early = 0

    def check(readback: Held) -> None:
        assert all(map(same, readback.tensors, readback.expected))

    def check_arrived() -> None:
        for readback in held:
            if readback.event.query():
                check(readback)

    for number in range(300):
        action = chance.random()
        if action < 0.5:
            picked = [chance.randrange(len(counts)) for _ in range(chance.randrange(1, 5))]
            sources = [bases[n] + number for n in picked]
            expected = [known[n] + number for n in picked]
            stream = chance.choice([None, *sides])
            for delayed in (stream, None):
                with torch.cuda.stream(delayed):
                    torch.cuda._sleep(chance.choice([0, 0, 100_000, 3_000_000]))
            readback = readbacks.start(sources, stream)
            if stream is None:
                for source in sources:
                    source.fill_(-1)
            del sources
            assert readback.event is not None
            early += not readback.event.query()
            views, halves = (
                [tensor[len(tensor) // 2 :] for tensor in tensors]
                for tensors in (readback.tensors, expected)
            )
            whole = Held(readback.tensors, readback.event, expected)
            held.append(whole if chance.random() < 0.5 else Held(views, readback.event, halves))
            del readback, views, whole
        elif held and action < 0.75:
            place = chance.randrange(len(held))
            held[place].event.synchronize()
            check(held[place])
            if chance.random() < 0.5:
                del held[place]
        elif held and action < 0.95:
            del held[chance.randrange(len(held))]  # in flight or not
        check_arrived()
    torch.cuda.synchronize()
    check_arrived()
    assert early > 20, "nothing was ever in flight"


def test_tensors_on_the_host_are_copied_too() -> None:
    """A user's own pooler may return such tensors."""
    sources = [torch.arange(5.0), torch.arange(4.0, device="cuda")]
    readback = Readbacks(torch.device("cuda")).start(sources, torch.cuda.Stream())
    readback.wait("test-owner")
    for source, tensor in zip(sources, readback.tensors, strict=True):
        assert torch.equal(source.cpu(), tensor)


def test_chunks_of_a_prompt_arrive_in_their_rows() -> None:
    readbacks = Readbacks(torch.device("cuda"))
    for rows, width in ((1, 1), (37, 4), (300, 1009)):
        ids = torch.arange(rows * width).view(rows, width)
        shape = (rows, width)
        tensors = readbacks.reserve(((shape, torch.int32), (shape, torch.float32)))
        assert tensors is not None
        start = 0
        for stop in (rows // 3, rows // 2, rows):
            chunk = slice(start, stop)
            torch.cuda._sleep(2_000_000)
            # Wider than the host's, as upstream makes them.
            sources = [ids[chunk].cuda(), (ids[chunk] * 0.5).cuda()]
            assert readbacks.fill(tensors, chunk, sources)
            start = stop
        event = readbacks.event_of(tensors)
        assert event is not None
        event.synchronize()
        assert same(tensors[0], ids.int())
        assert same(tensors[1], ids * 0.5)


def test_strided_and_converted_sources() -> None:
    readbacks = Readbacks(torch.device("cuda"))
    source = drawn(35, torch.int32, 1).view(5, 7).cuda()
    readback = readbacks.start([source.t(), source[:, ::2]])
    readback.wait("test")
    assert same(readback.tensors[0], source.t().cpu().contiguous())
    assert same(readback.tensors[1], source[:, ::2].cpu().contiguous())
    target = torch.zeros(8, dtype=torch.int32, pin_memory=True)
    readbacks.copy(target[:5], torch.arange(5, device="cuda") - 2)
    torch.cuda.synchronize()
    assert target.tolist() == [-2, -1, 0, 1, 2, 0, 0, 0]


def test_a_buffer_lives_as_long_as_a_view_of_it() -> None:
    readbacks = Readbacks(torch.device("cuda"))
    source = torch.arange(10, device="cuda")
    first = readbacks.start([source])
    first.wait("test")
    view = first.tensors[0].numpy()[3:]
    address = first.tensors[0].data_ptr()
    del first
    others = [readbacks.start([source + 1]) for _ in range(3)]
    assert address not in [other.tensors[0].data_ptr() for other in others]
    torch.cuda.synchronize()
    assert view.tolist() == [3, 4, 5, 6, 7, 8, 9]
    del view
    assert readbacks.start([source]).tensors[0].data_ptr() == address


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH"
)
def test_memcheck_finds_nothing(engines: dict[str, Engine], tmp_path: Path) -> None:
    """In our kernels; the engine's other kernels are not watched."""
    log = tmp_path / "memcheck.log"
    # Compilation would run under memcheck as well, for minutes.
    environment = {**ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"}
    outcome = engines["overlaid"].start(PROGRAM, [str(log)], environment=environment).finish()
    assert (outcome["errors"], outcome["failed"]) == ([], None)
    assert len(outcome["results"]) == 4
    (errors,) = re.findall(r"ERROR SUMMARY: (\d+) error", log.read_text())
    assert errors == "0", log.read_text()[-6000:]


def test_sources_may_begin_between_words() -> None:
    """Last, because a misaligned access on the device ends its use by this process."""
    readbacks = Readbacks(torch.device("cuda"))
    for dtype in (torch.uint8, torch.bfloat16, torch.bool):
        expected = drawn(64, dtype, 3)
        source = expected.cuda()
        for start in range(1, 5):
            readback = readbacks.start([source[start : start + 32]])
            readback.wait("test")
            assert same(readback.tensors[0], expected[start : start + 32])
