"""Long copies of another stream, to run beside a decoding engine."""

from __future__ import annotations

import math
import time


class ForeignCopies:
    """Long copies from the device to pinned memory on a stream of their own.

    They stand for those of a KV connector. A burst is several copies between the same two
    buffers, queued one behind the other. Bursts begin at a fixed pace in time, so that each side
    has them for the same share of it, however many steps it makes meanwhile.

    Args:
        size: bytes of either buffer.
    """

    #: The least seconds of a burst, and seconds between the launches of two bursts.
    LEAST, PACE = 0.2, 0.5
    #: How many times longer a burst is planned, because steps may speed it up or slow it down.
    MARGIN = 1.2

    def __init__(self, size: int = 2 << 30) -> None:
        import torch

        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._pair = host, device
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

    def step(self) -> None:
        """Launch a burst if one is due, and none is running. Call it before a step."""
        now = time.monotonic()
        if now >= self._due and (not self._bursts or self._bursts[-1][1].query()):
            # A burst that was late does not make the next one early.
            self._due = now + self.PACE
            self._launch()

    def finish(self) -> list[float]:
        """Wait for the last burst; return the milliseconds of each since the last call."""
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
