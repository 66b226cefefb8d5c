"""The ring buffer: the newest records, each once, in order."""

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.readiness.watch.probe import ring as ring_module
from vllm.v1.readiness.watch.probe.ring import Ring


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns at every opportunity."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often")
def test_no_record_is_lost_or_torn_while_threads_put_and_one_reads() -> None:
    threads, each = 4, 16_000
    ring = Ring(1 << 16)
    together = threading.Barrier(threads)

    def put(thread: int) -> None:
        together.wait()
        for number in range(each):
            # Torn: its fields would not belong together.
            ring.put(thread, number, number * 3, number * 5, number * 7, thread)

    workers = [threading.Thread(target=put, args=(thread,)) for thread in range(threads)]
    parts = []
    cursor = 0
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        part, cursor = ring.since(cursor)
        parts.append(part)
    parts.append(ring.since(cursor)[0])
    rows = np.concatenate(parts)
    assert len(rows) == threads * each
    for factor, column in ((3, 2), (5, 3), (7, 4)):
        assert (rows[:, column] == factor * rows[:, 1]).all()
    assert (rows[:, 0] == rows[:, 5]).all()
    for thread in range(threads):
        assert rows[rows[:, 0] == thread, 1].tolist() == list(range(each))


class _Busy:
    """A ring's lock that others get before whoever reads: each time they put some records."""

    def __init__(self, ring: Ring, arrivals: list[int]) -> None:
        self.ring = ring
        self.arrivals = arrivals
        self.lock, ring._lock = ring._lock, self  # type: ignore[assignment]

    def __enter__(self) -> None:
        ring = self.ring
        ring._lock = self.lock
        for _ in range(self.arrivals.pop() if self.arrivals else 0):
            ring.put(0, ring.count, ring.count, ring.count)
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        self.ring._lock = self  # type: ignore[assignment]


@given(st.integers(0, 40), st.lists(st.integers(0, 30), max_size=12), st.integers(1, 20))
def test_a_ring_overrun_while_it_is_read_gives_each_record_in_its_place(
    count: int, arrivals: list[int], chunk: int
) -> None:
    ring = Ring(16)
    for number in range(count):
        ring.put(0, number, number, number)
    busy = _Busy(ring, arrivals)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_module, "_CHUNK", chunk)
        first, cursor = ring.since(0)
        ring._lock = busy.lock
        second, last = ring.since(cursor)
    numbers = [*first[:, 1].tolist(), *second[:, 1].tolist()]
    assert numbers == sorted(set(numbers))
    assert numbers[-16:] == list(range(max(0, ring.count - 16), ring.count))
    assert last == ring.count
