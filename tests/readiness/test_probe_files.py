"""A process's file: written whole, then appended to, and begun anew when it has grown."""

import io
import os
from pathlib import Path
from typing import Any

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


def filled(count: int, capacity: int) -> Ring:
    """Return a ring into which ``count`` numbered records were put."""
    ring = Ring(capacity)
    put(ring, count)
    return ring


def put(ring: Ring, count: int) -> None:
    """Go on with the numbers."""
    for number in range(ring.count, ring.count + count):
        ring.put(number % len(KINDS), number, number + 5, number, 0, number)


@pytest.mark.parametrize("failing", ["open", "write", "replace"])
def test_a_write_that_fails_leaves_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file.rank0"
    RecordFile(filled(3, 32), str(path)).write(lambda: HEADER)
    before = path.read_bytes()
    full = OSError(28, "No space left on device")

    class Full:
        def __init__(self, name: str, mode: str) -> None:
            self.file = Path(name).open(mode)  # noqa: SIM115

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise full

    def fail(*_: object) -> None:
        raise full

    if failing == "replace":
        monkeypatch.setattr(os, "replace", fail)
    else:
        stand_in = Full if failing == "write" else fail
        monkeypatch.setattr(files, "open", stand_in, raising=False)
    with pytest.raises(OSError, match="No space left"):
        RecordFile(filled(9, 32), str(path)).write(lambda: HEADER)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["file.rank0"]


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


def test_a_write_costs_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "file.rank0"
    ring = filled(1000, 1024)
    file = RecordFile(ring, str(path))
    file.write(lambda: HEADER)
    before = path.read_bytes()
    put(ring, 3)
    file.write(lambda: HEADER)
    after = path.read_bytes()
    assert after.startswith(before)
    assert len(after) - len(before) < 3 * ring.size + 2000
    assert [span.began for span in records.read(path).spans] == list(range(1003))


def test_a_file_that_somebody_else_has_changed_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.rank0"
    ring = filled(5, 16)
    file = RecordFile(ring, str(path))
    file.write(lambda: HEADER)
    for change in (path.unlink, lambda: path.write_text("?")):
        change()
        put(ring, 1)
        file.write(lambda: HEADER)
        assert len(records.read(path).spans) == ring.count


def test_an_append_that_fails_leaves_the_blocks_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.rank0"
    ring = filled(5, 16)
    file = RecordFile(ring, str(path))
    file.write(lambda: HEADER)
    before = path.read_bytes()

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[:10])
            raise OSError(28, "No space left on device")

    put(ring, 2)
    with monkeypatch.context() as patch:
        patch.setattr(files, "open", Full, raising=False)
        with pytest.raises(OSError, match="No space left"):
            file.write(lambda: HEADER)
    assert path.read_bytes() == before
    file.write(lambda: HEADER)
    assert [span.began for span in records.read(path).spans] == list(range(7))
