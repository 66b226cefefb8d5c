"""RECORD is restored byte for byte, whatever it contained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overlay import record
from overlay.pin import PACKAGE
from support.sites import INFO, UPSTREAM

OLD, NEW = record.row("vllm/envs.py", b"old"), record.row("vllm/envs.py", b"newer")
CHANGED = {OLD: NEW}
ADDED = [record.row(f"{PACKAGE}/a.py", b"a"), f"{PACKAGE}/__pycache__/a.cpython-311.pyc,,".encode()]

ROWS = st.sampled_from(
    [
        OLD,
        b"vllm/envs.py,,",
        b'"vllm/envs.py",sha256=x,1',
        b"vllm/envs.py,sha512=abc,3",
        b"./vllm/envs.py,,",
        b"/abs/vllm/envs.py,,",
        b"",
        b"\xff\xfe,sha256=,",
        b'"a,b",,',
        b"vllm/other.py,sha256=y,2",
        b"lone\rcarriage",
        b"ends in return\r",
    ]
)
RECORDS = st.builds(
    lambda rows, end, last: end.join(rows) + (end if last else b""),
    st.lists(ROWS),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
)


@given(RECORDS | st.binary())
def test_restore_undoes_overlay(data: bytes) -> None:
    overlaid = record.overlay(data, CHANGED, ADDED)
    assert record.restore(overlaid, CHANGED) == data
    assert record.overlay(overlaid, CHANGED, ADDED) == overlaid
    assert record.rows_of_ours(overlaid) == ADDED
    assert record.restore(data, CHANGED) == data


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_rows_that_are_added_end_as_the_others_do(end: bytes) -> None:
    overlaid = record.overlay(OLD + end, CHANGED, ADDED)
    assert overlaid == b"".join(row + end for row in (NEW, *ADDED))


def test_the_real_record_changes_in_the_rows_of_our_files_only() -> None:
    data = (UPSTREAM / INFO / "RECORD").read_bytes()
    envs = (UPSTREAM / "vllm" / "envs.py").read_bytes()
    old, new = record.row("vllm/envs.py", envs), record.row("vllm/envs.py", b"changed")
    before = data.splitlines()
    after = record.overlay(data, {old: new}, ADDED).splitlines()
    assert old in before
    assert after == [new if line == old else line for line in before] + ADDED
