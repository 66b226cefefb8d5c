"""The fix lost-wakeups: readers of upstream's message queue, whose announcements are not sent.

A writer and a reader of one real queue, over shared memory and ZeroMQ.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import modules
from vllm.v1.readiness.engine import lost_wakeups, switch

QUEUE = "vllm/distributed/device_communicators/shm_broadcast.py"
#: Seconds in which a reader that looks for messages has found one.
PATIENCE = 60


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a tenth of a second at most."""
    monkeypatch.setattr(lost_wakeups, "_LONGEST", 100)


@contextmanager
def idle_reader(
    module: Any, value: str
) -> Iterator[tuple[Any, Any, threading.Event, list[object]]]:
    """A reader that waits for an announcement.

    Args:
        module: upstream's or ours.
        value: of the switch.

    Yields:
        The writer's queue and the reader's, an event that is set once a message was read, and
        the messages that were read.
    """
    writer = module.MessageQueue(1, 1, max_chunk_bytes=1 << 12, max_chunks=2)
    handle = writer.export_handle()
    waiting, found = threading.Event(), threading.Event()
    read: list[object] = []

    def run() -> None:
        reader.wait_until_ready()
        condition = reader._spin_condition
        condition.busy_loop_s = -1  # idle at once, not after a second
        poll = condition.poller.poll

        def wait(timeout: int | None) -> Any:
            waiting.set()
            return poll(timeout)

        condition.poller.poll = wait
        try:
            read.append(reader.dequeue(indefinite=True))
        except RuntimeError as cancelled:
            read.append(cancelled)
        found.set()

    with mock.patch.dict(os.environ, {switch.NAME: value}):
        reader = module.MessageQueue.create_from_handle(handle, 0)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            writer.wait_until_ready()
            assert waiting.wait(PATIENCE)
            yield writer, reader, found, read
        finally:
            reader.shutdown()
            thread.join(PATIENCE)
            for queue in (reader, writer):  # left to the collector, a context may never end
                queue.local_socket.context.destroy(linger=0)
            for address in (handle.local_subscribe_addr, handle.local_notify_addr):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def lose(writer: Any) -> None:
    """Write a message without an announcement."""
    with mock.patch.object(writer._spin_condition, "notify"):
        writer.enqueue("step")


@pytest.mark.parametrize("value", ["on", "lost-wakeups"])
def test_a_message_that_was_not_announced_is_read(value: str) -> None:
    with idle_reader(modules.overlaid(QUEUE), value) as (writer, _, found, read):
        lose(writer)
        assert found.wait(PATIENCE)
        assert read == ["step"]


@pytest.mark.parametrize(
    ("load", "value"),
    [
        (modules.pristine, "on"),
        (modules.overlaid, "-fixes"),
        (modules.overlaid, "-lost-wakeups"),
    ],
)
def test_stocks_reader_waits_for_the_announcement(load: Callable[[str], Any], value: str) -> None:
    with idle_reader(load(QUEUE), value) as (writer, _, found, read):
        lose(writer)
        assert not found.wait(1)
        writer._spin_condition.notify()
        assert found.wait(PATIENCE)
        assert read == ["step"]


def test_an_idle_reader_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_wakeups, "_LONGEST", 1000 * PATIENCE)
    with idle_reader(modules.overlaid(QUEUE), "on") as (_, reader, found, read):
        reader.shutdown()
        assert found.wait(PATIENCE / 2)
        assert [str(error) for error in read] == ["cancelled"]


@pytest.mark.parametrize(
    ("timeout", "bounded"), [(None, 100), (300_000, 100), (100, 100), (20, 20)]
)
def test_no_wait_gets_longer(
    timeout: int | None, bounded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lost_wakeups.bounded(timeout) == bounded
    monkeypatch.setenv(switch.NAME, "off")
    assert lost_wakeups.bounded(timeout) == timeout
