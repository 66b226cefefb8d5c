"""A process's file: written whole, then appended to, and begun anew when it has grown."""

import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe import records
from support import probes
from vllm.v1.readiness.watch.probe import files
from vllm.v1.readiness.watch.probe.files import RecordFile
from vllm.v1.readiness.watch.probe.ring import KINDS, Ring

HEADER = {
    name: value
    for name, value in probes.header(0).items()
    # What the file says itself.
    if name not in ("format", "version", "fields", "kinds", "byteorder", "records", "lost")
}


def put(ring: Ring, count: int) -> None:
    """Put ``count`` records, each with the next number."""
    for number in range(ring.count, ring.count + count):
        ring.put(number % len(KINDS), number, number + 5, number, 0, number)


class Recorded(NamedTuple):
    """A ring, and the file that it is written to."""

    path: Path
    ring: Ring
    file: RecordFile

    def write(self) -> None:
        """Write what is new."""
        self.file.write(lambda: HEADER)

    def numbers(self) -> list[int]:
        """The numbers of the records in the file."""
        return [span.began for span in records.read(self.path).spans]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """A file of five numbered records."""
    path, ring = tmp_path / "file.rank0", Ring(16)
    put(ring, 5)
    recorded = Recorded(path, ring, RecordFile(ring, str(path)))
    recorded.write()
    return recorded


class Full(io.FileIO):
    """A file on a full disk."""

    def write(self, data: Any) -> int:
        """Write some bytes."""
        super().write(bytes(data)[:10])
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failing", ["open", "write", "replace", "append"])
def test_a_write_that_fails_leaves_the_records_before(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = recorded.path.read_bytes()
    put(recorded.ring, 2)
    # Another file of the same name is written whole.
    file = recorded.file if failing == "append" else RecordFile(recorded.ring, str(recorded.path))
    with monkeypatch.context() as patch:
        if failing == "replace":
            patch.setattr(os, "replace", fail)
        else:
            patch.setattr(files, "open", fail if failing == "open" else Full, raising=False)
        with pytest.raises(OSError, match="No space left"):
            file.write(lambda: HEADER)
    assert recorded.path.read_bytes() == before
    assert [*recorded.path.parent.iterdir()] == [recorded.path]
    file.write(lambda: HEADER)
    assert recorded.numbers() == [*range(7)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_what_is_new_is_appended_and_a_file_that_has_grown_begins_anew(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("files") / "file.rank0"
    ring = Ring(16)
    file = RecordFile(ring, str(path))
    for count in counts:
        put(ring, count)
        file.write(lambda: HEADER)
        process = records.read(path)
        assert process.label == "rank0"
        numbers = [span.began for span in process.spans]
        for span, number in zip(process.spans, numbers, strict=True):
            assert (span.kind, span.length) == (KINDS[number % len(KINDS)], 5)
        assert numbers == sorted(set(numbers))
        assert numbers[-16:] == list(range(max(0, ring.count - 16), ring.count))
        assert len(numbers) <= 32
        assert process.header["lost"] == ring.count - len(numbers)


def test_a_write_costs_what_is_new(recorded: Recorded) -> None:
    before = recorded.path.read_bytes()
    put(recorded.ring, 3)
    recorded.write()
    after = recorded.path.read_bytes()
    assert after.startswith(before)
    assert recorded.numbers() == [*range(8)]


def test_a_file_that_another_program_changed_is_written_whole(recorded: Recorded) -> None:
    for change in (recorded.path.unlink, lambda: recorded.path.write_text("?")):
        change()
        put(recorded.ring, 1)
        recorded.write()
        assert len(recorded.numbers()) == recorded.ring.count
