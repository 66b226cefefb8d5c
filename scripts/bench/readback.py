"""What readback costs, and the foreign copies that it must not wait for.

    PYTHON scripts/bench/readback.py stores [--sizes BYTES...] [--repeats N] [--json FILE]

prints how long it takes to bring four tensors to pinned memory by the overlay's kernel and
by copies, by their total size. :class:`Foreign` is what cases of ``engine.py`` run beside a
decoding engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    Tensors = Sequence[torch.Tensor]
    Way = Callable[[Tensors, Tensors], object]

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "scripts")

from bench import report  # noqa: E402
from bench.machine import describe  # noqa: E402
from bench.report import REFUSED  # noqa: E402
from overlay import output  # noqa: E402

KERNELS = ROOT / "vendor_overlay" / "vllm" / "v1" / "readiness" / "kernels" / "readback.py"

#: Sampled ids, and the ids, values and ranks of logprobs.
TENSORS = 4
#: Keeps the device busy until everything that is timed has been launched.
HEAD_START = 500_000


class Foreign:
    """Long pinned copies on a stream of their own, as a KV connector's.

    A burst is several copies from or to the same two buffers, one queued behind the other.
    Bursts begin at a fixed pace in time, so that every side has them for the same part of it,
    however many steps it makes meanwhile.

    Args:
        direction: "d2h" or "h2d".
        size: bytes of each buffer.
    """

    #: Seconds that a burst has to take at least, and seconds from one's launch to the next one's.
    LEAST, PACE = 0.2, 0.5
    #: How much longer a burst is made than that, because steps may speed it up or down.
    MARGIN = 1.2

    def __init__(self, direction: str, size: int = 2 << 30) -> None:
        import torch

        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._pair = {"d2h": (host, device), "h2d": (device, host)}[direction]
        self._stream = torch.cuda.Stream()
        self._due = 0.0
        self._bursts: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # The first copies may be slower than the rest.
        torch.cuda.synchronize()
        self._copies = 1
        for _ in range(3):
            self._launch()
        fastest = min(self.finish()) / 1e3
        self._copies = math.ceil(self.LEAST * self.MARGIN / fastest)

    def step(self) -> bool:
        """Before a step: launch a burst if it is time to; whether one is running."""
        if self.running():
            return True
        now = time.monotonic()
        if now < self._due:
            return False
        # A burst that was late does not make the next one early.
        self._due = now + self.PACE
        self._launch()
        return True

    def running(self) -> bool:
        """Whether a burst has been launched and is not over."""
        return bool(self._bursts) and not self._bursts[-1][1].query()

    def finish(self) -> list[float]:
        """Wait for what is running; the length of every burst since the last call, in ms."""
        self._stream.synchronize()
        lengths = [begun.elapsed_time(ended) for begun, ended in self._bursts]
        self._bursts.clear()
        return lengths

    def _launch(self) -> None:
        import torch

        target, source = self._pair
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begun.record()
            for _ in range(self._copies):
                target.copy_(source, non_blocking=True)
            ended.record()
        self._bursts.append((begun, ended))


class Cost(NamedTuple):
    """Of bringing some tensors to the host, in microseconds.

    Attributes:
        launch: the host's time until everything is launched.
        device: the device's time, when everything was launched before it began.
        whole: from the first launch until the host may read, on an idle device.
    """

    launch: float
    device: float
    whole: float


def stores(sizes: Sequence[int], repeats: int) -> tuple[list[list[str | int | float]], list[str]]:
    """The table's rows, and what did not arrive as it was sent.

    Args:
        sizes: total bytes of the tensors.
        repeats: of each measurement, whose median is taken.
    """
    import torch

    ways: dict[str, Way] = {"kernel": _kernels().store, "copy_": _copy}
    rows: list[list[str | int | float]] = []
    problems = []
    for size in sizes:
        words = size // TENSORS // 4
        sources = [torch.randint(1 << 30, (words,), device="cuda").int() for _ in range(TENSORS)]
        expected = [source.cpu() for source in sources]
        shown: list[str | int | float] = [size]
        for name, way in ways.items():
            targets = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in sources]
            cost = _cost(way, sources, targets, repeats)
            same = all(map(torch.equal, targets, expected))
            shown += cost if same else [REFUSED] * len(cost)
            if not same:
                problems.append(f"{size:,} bytes by {name}: what arrived differs")
        rows.append(shown)
    return rows, problems


def _cost(way: Way, sources: Tensors, targets: Tensors, repeats: int) -> Cost:
    import torch

    costs = []
    for turn in range(repeats + 3):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start = time.perf_counter()
        way(sources, targets)
        ended.record()
        ended.synchronize()
        whole = time.perf_counter() - start
        torch.cuda._sleep(HEAD_START)
        begun.record()
        start = time.perf_counter()
        way(sources, targets)
        launch = time.perf_counter() - start
        ended.record()
        ended.synchronize()
        if turn >= 3:  # those before warm up
            costs.append(Cost(launch * 1e6, begun.elapsed_time(ended) * 1e3, whole * 1e6))
    return Cost(*map(statistics.median, zip(*costs, strict=True)))


def _copy(sources: Tensors, targets: Tensors) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _kernels() -> ModuleType:
    """The overlay's kernels from this checkout, without vLLM, which they do not need."""
    spec = importlib.util.spec_from_file_location(KERNELS.stem, KERNELS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[KERNELS.stem] = module  # Triton looks a kernel's module up
    spec.loader.exec_module(module)
    return module


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("stores", help="kernel against copies, by total size")
    sizes = [1 << bits for bits in range(10, 25, 2)]
    command.add_argument("--sizes", type=int, nargs="+", default=sizes, help="bytes (%(default)s)")
    command.add_argument("--repeats", type=int, default=100, help="(%(default)s)")
    command.add_argument("--json", type=Path, help="write the run to this file, too")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure and print; 0 if everything arrived as it was."""
    args = _parser().parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("bench: stores needs a CUDA device", file=sys.stderr)
        return 1
    started = time.monotonic()
    rows, problems = stores(args.sizes, args.repeats)
    times = ("launch", "device", "idle, until read")
    run: dict[str, Any] = {
        **describe("table", started, {}, torch.cuda.get_device_name()),
        "title": f"{TENSORS} tensors to pinned memory; microseconds, median of {args.repeats}",
        "note": None,
        "columns": [
            "bytes in all",
            *(f"{way}: {of}" for way in ("kernel", "copy_") for of in times),
        ],
        "align": ["r"] * 7,
        "rows": rows,
        "problems": problems,
    }
    return report.publish(run, args.json)


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
