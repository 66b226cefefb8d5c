"""Beside a program that edits the same installation, on files of ours and on others.

NVIDIA Dynamo ships patches for vLLM 0.22.0 to the scheduler, to NIXL's worker and to the helpers of
Mamba's states. The edits here are stand-ins of our own on the same files: the first of them is one
that the overlay changes.
"""

import itertools
import shutil
from pathlib import Path

import pytest
from overlay import refusal
from overlay.errors import Exit
from support import sites
from support.sites import OVERLAY, UPSTREAM, run, snapshot

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
OTHERS = (
    "vllm/distributed/kv_transfer/kv_connector/v1/nixl/worker.py",
    "vllm/v1/worker/mamba_utils.py",
)
MARK = b"# patched by another program\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The real installation, cut down, with the files that the other program edits."""
    site = sites.small(tmp_path / "site")
    for path in OTHERS:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(UPSTREAM / path, site / path)
    return site


def edit(site: Path, *paths: str) -> None:
    """Do what the other program does: to each file, and not to RECORD."""
    for path in paths:
        (site / path).write_bytes((site / path).read_bytes() + MARK)


def undo(site: Path, *paths: str) -> None:
    """Take the other program's edits off again."""
    for path in paths:
        (site / path).write_bytes((site / path).read_bytes().removesuffix(MARK))


def test_the_files_are_ours_and_not_ours_as_the_stand_in_needs() -> None:
    assert SCHEDULER in OVERLAY.targets
    assert not {*OTHERS} & {*OVERLAY.targets, *OVERLAY.added}
    assert not [p for p in OVERLAY.targets if list(refusal._marks((UPSTREAM / p).read_bytes()))]


@pytest.mark.parametrize(
    ("first", "last"), itertools.product(("theirs", "ours"), repeat=2), ids=lambda each: each
)
def test_files_of_theirs_alone_are_none_of_our_business(site: Path, first: str, last: str) -> None:
    """Laid over in either order, and taken off in either order."""
    pristine = snapshot(site)
    for name in sorted(("theirs", "ours"), key=lambda name: name != first):
        if name == "theirs":
            edit(site, *OTHERS)
        else:
            assert run("apply", "--site", site).returncode == Exit.DONE
    assert run("verify", "--site", site).returncode == Exit.DONE
    for name in sorted(("theirs", "ours"), key=lambda name: name == last):
        if name == "theirs":
            undo(site, *OTHERS)
        else:
            assert run("revert", "--site", site).returncode == Exit.DONE
    assert snapshot(site) == pristine


def test_files_that_we_do_not_change_are_not_read(site: Path) -> None:
    for path in OTHERS:
        (site / path).unlink()
        (site / path).symlink_to("/nonexistent/file")
    for command in ("apply", "verify", "status", "revert"):
        assert run(command, "--site", site).returncode == Exit.DONE, command


def test_an_edit_of_a_file_of_ours_is_named_and_survives(site: Path) -> None:
    edit(site, SCHEDULER)
    before = snapshot(site)
    refused = run("apply", "--site", site)
    assert refused.returncode == Exit.FOREIGN
    assert str(site / SCHEDULER) in refused.stderr
    assert "next" in refused.stderr
    shown = run("status", "--site", site).stdout
    assert f"says: {MARK.decode().strip()}" in shown
    assert "no package's RECORD lists these bytes" in shown
    assert snapshot(site) == before
    undo(site, SCHEDULER)
    assert run("apply", "--site", site).returncode == Exit.DONE
