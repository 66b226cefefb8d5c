"""A run that is killed or fails at any call can be carried on or undone."""

import errno
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from overlay import cli, commands
from overlay.commands import Options
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.source import Overlay
from overlay.state import State, inspect
from support import mini, mounts, sites
from support.faults import Call, calls, digest, failed, killed

NOW = Options(force=True, wait=5)


class Case:
    """An installation, its two whole states, and runs over copies of it."""

    def __init__(self, folder: Path, site: Path, overlay: Overlay, python: str | None) -> None:
        self.folder = folder
        self.overlay = overlay
        self.python = python
        self.start = {"apply": site, "revert": folder / "overlaid"}
        shutil.copytree(site, self.start["revert"], symlinks=True)
        self.run("apply", self.start["revert"])
        self.whole = {
            State.PRISTINE: sites.snapshot(site),
            State.OVERLAID: sites.snapshot(self.start["revert"]),
        }
        self._states: dict[str, State] = {}
        self._checked: dict[str, State] = {}

    def arguments(self, name: str, site: Path) -> list[str]:
        """The command line of a run over ``site``."""
        python = ["--python", self.python] if self.python else []
        return [name, "--site", str(site), "--force", *python]

    def run(self, name: str, site: Path) -> int:
        """Run the tool over ``site``, and give its exit code."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "ROOT", self.overlay.root)
            return cli.main(self.arguments(name, site))

    def calls(self, name: str) -> list[Call]:
        """The calls of a whole run."""
        with self.copy(self.start[name], "cut") as site:
            return calls(self.arguments(name, site), self.overlay.root, site)

    def state(self, site: Path) -> State:
        """The state of ``site``; each disk is inspected once."""
        disk = digest(site)
        if disk not in self._states:
            inspection = inspect(locate(site=str(site), python=self.python), self.overlay)
            self._states[disk] = inspection.state
        return self._states[disk]

    @contextmanager
    def copy(self, site: Path, name: str) -> Iterator[Path]:
        """A copy of ``site``, removed after use.

        Copies have the same path, because bytecode contains it.
        """
        copied = self.folder / name
        shutil.copytree(site, copied, symlinks=True)
        yield copied
        shutil.rmtree(copied)

    def check_recovery(self, site: Path, at: int) -> State:
        """Check the state of ``site``, and that apply and revert both lead to a whole state.

        A disk that an earlier cut left as well is not checked again.
        """
        disk = digest(site)
        if disk not in self._checked:
            self._checked[disk] = self._recover(site, at)
        return self._checked[disk]

    def _recover(self, site: Path, at: int) -> State:
        inspection = inspect(locate(site=str(site)), self.overlay)
        state = inspection.state
        overlaid = {file.path for file in inspection.files if file.state is State.OVERLAID}
        if overlaid & set(self.overlay.targets):
            assert set(self.overlay.added) <= overlaid, f"cut {at}: a seam calls what is not there"
        assert state in (State.PRISTINE, State.OVERLAID, State.PARTIAL), f"cut {at}: {state}"
        if state is not State.PARTIAL:
            assert sites.snapshot(site) == self.whole[state], f"cut {at} is not {state}"
            assert not [n for n in sites.snapshot(site, bytecode=True) if ".readiness-" in n]
            return state
        for name, goal in (("apply", State.OVERLAID), ("revert", State.PRISTINE)):
            with self.copy(site, "again") as again:
                assert self.run(name, again) == Exit.DONE, f"cut {at}, then {name}"
                assert self.state(again) is goal, f"cut {at}, then {name}"
                assert sites.snapshot(again) == self.whole[goal], f"cut {at}, then {name}"
                bytecode = [n for n in sites.snapshot(again, bytecode=True) if ".readiness-" in n]
                assert bytecode == [], f"cut {at}, then {name}"
        return state


@pytest.fixture(params=["real files", "with bytecode"])
def case(request: pytest.FixtureRequest, scratch: Path) -> Case:
    """The real files without an interpreter, and small ones with one.

    Compiling the real files at each of several hundred cuts would take minutes and
    would cut at the same calls.
    """
    if request.param == "real files":
        site = sites.small(scratch / "site")
        sites.shorten_record(site)
        return Case(scratch, site, sites.OVERLAY, None)
    site = mini.install(scratch / "site")
    return Case(scratch, site, mini.overlay(scratch / "overlay"), sys.executable)


GOAL = {"apply": State.OVERLAID, "revert": State.PRISTINE}


@pytest.mark.parametrize("name", ["apply", "revert"])
def test_killed_at_every_change(case: Case, name: str) -> None:
    seen = set()
    for at in itertools.count(1):
        with case.copy(case.start[name], "cut") as site:
            status = killed(case.arguments(name, site), case.overlay.root, at)
            state = case.check_recovery(site, at)
        seen.add(state)
        if status is None:
            assert at > 25, "the run made hardly any change: the cuts do not reach it"
            assert state is GOAL[name]
            break
        assert os.WIFSIGNALED(status)
    # There were cuts before, within and after the change.
    assert seen == {State.PRISTINE, State.OVERLAID, State.PARTIAL}


@pytest.mark.parametrize("name", ["apply", "revert"])
def test_the_disk_changes_at_no_other_call(case: Case, name: str) -> None:
    """Otherwise the test above would lack cuts."""
    listed = case.calls(name)
    assert len(listed) > 80
    for call, then in itertools.pairwise(listed):
        assert call.changes or call.disk == then.disk, f"{call.name} at {call.stack}"
    assert len({call.disk for call in listed}) > 20


@pytest.mark.parametrize("name", ["apply", "revert"])
def test_failed_at_every_call(case: Case, name: str) -> None:
    """At every call that changes the disk, syncs or closes, and at distinct reads.

    If a read from the same lines and the same disk has ended a run already, it would again,
    and is skipped.
    """
    refused = 0
    ended: set[Call] = set()
    listed = case.calls(name)
    for at, call in enumerate(listed, 1):
        if call in ended:
            continue
        with case.copy(case.start[name], "cut") as site:
            status = failed(case.arguments(name, site), case.overlay.root, at, errno.ENOSPC)
            state = case.check_recovery(site, at)
        assert status is not None, f"call {at} was not reached"
        assert os.WIFEXITED(status)
        code = os.WEXITSTATUS(status)
        # FAULT: our own copy could not be read. USAGE: an interpreter could not be started.
        # DONE: metadata that is only shown could not be read.
        assert code in (Exit.DENIED, Exit.FAULT, Exit.USAGE, Exit.DONE), f"call {at}"
        refused += code == Exit.DENIED
        if code == Exit.DONE:
            assert state is GOAL[name], f"call {at}"
        elif call.looks:
            ended.add(call)
    assert refused > 30
    with case.copy(case.start[name], "cut") as site:
        more = failed(case.arguments(name, site), case.overlay.root, len(listed) + 1, errno.ENOSPC)
        assert more is None, "there are calls that were not listed"


def test_a_failure_before_the_first_rename_leaves_no_trace(tmp_path: Path) -> None:
    site = sites.small(tmp_path / "site")
    before = sites.snapshot(site, bytecode=True)
    installation = locate(site=str(site))

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(site))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OverlayError, match="nothing was written") as caught:
            commands.apply(installation, sites.OVERLAY, NOW)
    assert caught.value.code is Exit.DENIED
    assert "free some space" in caught.value.next_step
    assert sites.snapshot(site, bytecode=True) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system to fill")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounts.mounted(disk, "-t", "tmpfs", "-o", "size=12m", "tmpfs"):
        site = sites.small(disk / "site")
        before = sites.snapshot(site, bytecode=True)
        (disk / "ballast").write_bytes(b"x" * os.statvfs(disk).f_bavail * 4096)
        done = sites.run("apply", "--site", site, "--python", sys.executable)
        assert done.returncode == Exit.DENIED
        assert "No space left" in done.stderr
        assert "nothing was written" in done.stderr
        assert sites.snapshot(site, bytecode=True) == before
        (disk / "ballast").unlink()
        assert sites.run("apply", "--site", site, "--python", sys.executable).returncode == 0
