"""Readback on a GPU: the kernel, the buffers, and engines that wait for nothing unnamed.

All engines run at once, since nothing is timed: stock, overlaid with the sync guard on
``error``, and overlaid with each readback delayed at random.
"""

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gpu.kinds import BATCHES, ENGINES, ENVIRONMENT, GUARD
from support.batches import drawn
from support.checkpoint import generate
from support.engine import Engine
from support.sites import REPO, UPSTREAM
from vllm.v1.readiness.readback import Readbacks

pytestmark = pytest.mark.gpu

PROGRAM = REPO / "tests" / "gpu" / "kinds.py"
#: Arguments of the program and environment, by run.
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "stock": ([], {}),
    "guarded": ([], {GUARD: "error"}),
    "delayed": (["--delay", "7"], {GUARD: "warn"}),
}
SYNCHRONOUS = ("sync", "ngram")

DTYPES = [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
#: Words of four bytes in a block of the kernel, and bytes from which readbacks copy instead.
BLOCK = 1024
STORED = 1 << 20

Runs = dict[tuple[str, str], Any]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bytes, shape and dtype are the same."""
    pair = (each.reshape(-1).view(torch.uint8) for each in (one, other))
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
            self.check([drawn(n, chance.choice(DTYPES), turn + at) for at, n in enumerate(sizes)])

    def test_sizes_beyond_what_readbacks_have_it_store(self) -> None:
        self.check([drawn(STORED // 4 + 3, torch.int32, 1), drawn(5, torch.int64, 2)])


@pytest.mark.parametrize("words", [STORED // 4 - 1, STORED // 4, STORED // 4 + 1])
@pytest.mark.parametrize("side", [False, True])
def test_what_is_stored_and_what_is_copied_arrives_alike(words: int, side: bool) -> None:
    readbacks = Readbacks(torch.device("cuda"))
    expected = [drawn(words - 33, torch.float32, 1).view(-1, 1), drawn(33, torch.int32, 2)]
    stream = torch.cuda.Stream() if side else None
    readback = readbacks.start([each.cuda() for each in expected], stream)
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
    bases = [each.cuda() for each in known]
    torch.cuda.synchronize()
    held: list[Held] = []
    early = 0

    def check(at: int) -> None:
        tensors, _, expected = held[at]
        assert all(map(same, tensors, expected))

    for number in range(300):
        what = chance.random()
        if what < 0.5:
            picked = [chance.randrange(len(counts)) for _ in range(chance.randrange(1, 5))]
            sources = [bases[at] + number for at in picked]
            expected = [known[at] + number for at in picked]
            stream = chance.choice([None, *sides])
            for each in (stream, None):
                with torch.cuda.stream(each):
                    torch.cuda._sleep(chance.choice([0, 0, 100_000, 3_000_000]))
            readback = readbacks.start(sources, stream)
            if stream is None:
                for source in sources:
                    source.fill_(-1)
            del sources
            assert readback.event is not None
            early += not readback.ready()
            views = [each[len(each) // 2 :] for each in readback.tensors]
            halves = [each[len(each) // 2 :] for each in expected]
            whole = Held(readback.tensors, readback.event, expected)
            held.append(whole if chance.random() < 0.5 else Held(views, readback.event, halves))
            del readback, views, whole
        elif held and what < 0.75:
            at = chance.randrange(len(held))
            held[at].event.synchronize()
            check(at)
            if chance.random() < 0.5:
                del held[at]
        elif held and what < 0.95:
            del held[chance.randrange(len(held))]  # in flight or not
        for at, each in enumerate(held):
            if each.event.query():
                check(at)
    torch.cuda.synchronize()
    for at in range(len(held)):
        check(at)
    assert early > 20, "nothing was ever in flight"


def test_what_is_on_the_host_already_is_copied_too() -> None:
    """A pooler of somebody else's may give such tensors."""
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


@pytest.fixture(scope="module")
def overlaid() -> Iterator[Engine]:
    """An overlaid view of the installation."""
    with tempfile.TemporaryDirectory(prefix="readback-", dir=UPSTREAM) as folder:
        engine = Engine(Path(folder))
        generate(engine.folder / "model")  # before several runs at once would
        engine.apply()
        yield engine


@pytest.fixture(scope="module")
def runs(overlaid: Engine) -> Iterator[Runs]:
    """The report of every run on every engine."""
    with tempfile.TemporaryDirectory(prefix="readback-", dir=UPSTREAM) as folder:
        stock = Engine(Path(folder))
        generate(stock.folder / "model")

        def result(wanted: tuple[str, str]) -> Any:
            name, engine = wanted
            arguments, environment = RUNS[name]
            side = stock if name == "stock" else overlaid
            settings = {**ENVIRONMENT, **environment}
            paths = [REPO / "tests"]
            return side.start(PROGRAM, [engine, *arguments], paths, **settings).finish()

        names = [(name, engine) for engine in ENGINES for name in RUNS]
        with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
            yield dict(zip(names, pool.map(result, names), strict=True))


def parted(one: Any, other: Any) -> list[str]:
    """Where the outputs of two runs differ."""
    found = [
        f"{name}, {what}"
        for batch in BATCHES
        for name, given in one["batches"][batch]["results"].items()
        for what, value in given.items()
        if other["batches"][batch]["results"][name][what] != value
    ]
    steps = [
        f"{batch}, steps"
        for batch in BATCHES
        if one["batches"][batch]["steps"] != other["batches"][batch]["steps"]
    ]
    return found + steps


def complaints(outcome: Any) -> str:
    """All errors of a run, with function and stack, and the guard's reports."""
    texts = [f"{each['function']}: {each['stack']}" for each in outcome["errors"]]
    return "\n".join([*texts, *outcome["reports"], outcome["failed"] or ""]).strip()


@pytest.mark.parametrize("engine", ENGINES)
class TestEngines:
    """Kinds of output, by engine."""

    def test_no_step_waits_for_the_device_by_accident(self, runs: Runs, engine: str) -> None:
        guarded = runs["guarded", engine]
        # Under `error` a run ends at its first wait; under `warn` all waits are reported.
        reports = runs["delayed", engine]["reports"]
        told = [text for text in reports if "waits for the device" in text]
        assert complaints(guarded) == "", "\n\n".join([complaints(guarded), *told])
        assert told == []
        assert guarded["planted"] is not None, "a planted sync was not found"
        assert "DeviceSyncError" in guarded["planted"]

    def test_hundreds_of_steps_of_every_kind(self, runs: Runs, engine: str) -> None:
        """With drafts, fewer steps make as many tokens."""
        for (_, name), outcome in runs.items():
            if name == engine:
                assert complaints(outcome | {"reports": []}) == ""
                assert outcome["batches"].keys() == BATCHES.keys()
                assert sum(batch["steps"] for batch in outcome["batches"].values()) > 600
        results = [batch["results"] for batch in runs["stock", engine]["batches"].values()]
        given = [json.dumps(one["tokens"]) for each in results for one in each.values()]
        assert len(set(given)) > len(given) / 2
        usual, ours = (
            sum(batch["steps"] for batch in runs["stock", name]["batches"].values())
            for name in ("sync", engine)
        )
        assert ours < usual if "ngram" in engine else ours >= usual

    def test_tokens_and_logprobs_are_stocks_bit_for_bit(self, runs: Runs, engine: str) -> None:
        assert parted(runs["stock", engine], runs["guarded", engine]) == []

    def test_a_late_readback_changes_nothing(self, runs: Runs, engine: str) -> None:
        assert parted(runs["stock", engine], runs["delayed", engine]) == []
        assert runs["delayed", engine]["delays"] > 300

    @pytest.mark.parametrize("name", ["guarded", "delayed"])
    def test_each_wait_has_the_owner_it_should(self, runs: Runs, engine: str, name: str) -> None:
        total = 0
        for function, fences, events, ended in runs[name, engine]["calls"]:
            if function == "execute_model":
                continue
            call = f"{function}: fences {fences}, events {events}, prompts {ended}"
            assert events.keys() <= {"fence"}, call
            if function == "sample_tokens" and engine not in SYNCHRONOUS:
                # Slots begin anew where a cut may have lost a token that is on its way.
                cuts = engine == "ngram_gpu" and name == "delayed"
                assert fences.keys() <= ({"penalties", "bad-words"} if cuts else set()), call
                continue
            total += sum(fences.values())
            assert fences.get("output", 0) <= 1, call
            allowed = {"output", "prompt-logprobs"} if engine in SYNCHRONOUS else {"output"}
            assert fences.keys() <= allowed, call
            assert fences.get("prompt-logprobs", 0) <= ended, call
        # Where the host is not ahead of the device, it has nothing to wait for.
        if engine in SYNCHRONOUS or name == "delayed":
            assert total > 100, "waits were not counted"


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH"
)
def test_memcheck_finds_nothing(overlaid: Engine, tmp_path: Path) -> None:
    """In our kernels; the engine's other kernels are not watched."""
    log = tmp_path / "memcheck.log"
    arguments = ["sync", "--short", "--sanitize", str(log)]
    # Compilation would run under memcheck as well, for minutes.
    environment = {**ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"}
    outcome = overlaid.start(PROGRAM, arguments, [REPO / "tests"], **environment).finish()
    assert complaints(outcome) == ""
    assert len(outcome["batches"]["mixed"]["results"]) == 4
    (errors,) = re.findall(r"ERROR SUMMARY: (\d+) error", log.read_text())
    assert errors == "0", log.read_text()[-6000:]


def test_what_begins_between_words_arrives_as_well() -> None:
    """Last, because a misaligned access on the device ends its use by this process."""
    readbacks = Readbacks(torch.device("cuda"))
    for dtype in (torch.uint8, torch.bfloat16, torch.bool):
        expected = drawn(64, dtype, 3)
        source = expected.cuda()
        for start in range(1, 5):
            readback = readbacks.start([source[start : start + 32]])
            readback.wait("test")
            assert same(readback.tensors[0], expected[start : start + 32])
