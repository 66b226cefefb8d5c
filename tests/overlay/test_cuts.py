"""A run that is killed or fails at any call can be carried on or undone."""

import errno
import itertools
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from overlay import cli, commands
from overlay.commands import Options
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.parts import recognise
from overlay.source import Overlay
from overlay.state import State
from support import mini, sites
from support.faults import Call, calls, cut, digest


class Case:
    """Commands over copies of an installation, and the two whole states that they lead to.

    They start from ``site``, which is pristine, or from ``older``, which has another version of the
    overlay. Every ``step``-th cut is tried. ``choice`` has the options of ``apply`` for a part.
    """

    def __init__(
        self,
        folder: Path,
        site: Path,
        overlay: Overlay,
        python: str | None = None,
        step: int = 1,
        older: Path | None = None,
        choice: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.overlay = overlay
        self.step = step
        self._choice = choice
        self._options = ["--force", *(["--python", python] if python else [])]
        overlaid = folder / "overlaid"
        shutil.copytree(site, overlaid, symlinks=True)
        assert self.run("apply", overlaid) == Exit.DONE
        self.whole = {State.PRISTINE: tree(site), State.OVERLAID: tree(overlaid)}
        self.start = {"apply": older or site, "revert": older or overlaid}
        #: The state that only an unfinished run leaves.
        self.between = State.FOREIGN if older else State.PARTIAL
        self._states: dict[str, State] = {}

    def arguments(self, command: str, site: Path) -> list[str]:
        """The command line of a run over ``site``."""
        choice = self._choice if command == "apply" else ()
        return [command, "--site", str(site), *self._options, *choice]

    def run(self, command: str, site: Path) -> int:
        """Run the tool over ``site``. Returns: its exit code."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "ROOT", self.overlay.root)
            return cli.main(self.arguments(command, site))

    def calls(self, command: str) -> list[Call]:
        """The calls of a whole run."""
        with self.copy(self.start[command], "cut") as site:
            return calls(self.arguments(command, site), self.overlay.root, site)

    def cut(self, command: str, at: int, error: int = 0) -> tuple[int | None, State]:
        """Cut a run off, and check what it leaves. Returns: its status, and the state."""
        with self.copy(self.start[command], "cut") as site:
            status = cut(self.arguments(command, site), self.overlay.root, at, error)
            return status, self.recovered(site, f"{command}, cut {at}")

    @contextmanager
    def copy(self, site: Path, name: str) -> Iterator[Path]:
        """A copy of ``site``, removed after use.

        Copies have the same path, because bytecode contains it.
        """
        copied = self.folder / name
        shutil.copytree(site, copied, symlinks=True)
        yield copied
        shutil.rmtree(copied)

    def recovered(self, site: Path, cut: str) -> State:
        """The state of ``site``, if apply and revert both lead from there to a whole one."""
        disk = digest(site)
        if disk not in self._states:  # An earlier cut may have left the same disk.
            self._states[disk] = self._recover(site, cut)
        return self._states[disk]

    def _recover(self, site: Path, cut: str) -> State:
        inspection = recognise(locate(site=str(site)), self.overlay)
        state, laid = inspection.state, inspection.overlay
        overlaid = {file.path for file in inspection.files if file.state is State.OVERLAID}
        if overlaid & set(laid.targets) and state is not State.FOREIGN:
            assert set(laid.added) <= overlaid, f"{cut}: a seam calls what is not there"
        if self._choice and state is State.OVERLAID and not laid.base:
            state = State.FOREIGN  # It is the whole, which this part was to replace.
        if state is not self.between and state is not State.PARTIAL:
            entries, paths = tree(site)
            whole, every = self.whole[state]
            assert entries == whole, f"{cut} is not {state}"
            # A run that failed may leave overlaid files without some of their bytecode.
            lacking = {path for path in every - paths if "/__pycache__" in path}
            assert paths == (every if state is State.PRISTINE else every - lacking), cut
            return state
        for command, goal in GOAL.items():
            with self.copy(site, "again") as again:
                assert self.run(command, again) == Exit.DONE, f"{cut}, then {command}"
                assert tree(again) == self.whole[goal], f"{cut}, then {command}"
        return state


def tree(site: Path) -> tuple[sites.Snapshot, set[str]]:
    """A snapshot without bytecode, and the paths of all files."""
    return sites.snapshot(site), set(sites.snapshot(site, bytecode=True))


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """Create files with the modes of the usual umask, which the tool then has to keep."""
    umask = os.umask(0o022)
    yield
    os.umask(umask)


@pytest.fixture
def case(request: pytest.FixtureRequest, scratch: Path, usual_umask: None) -> Case:
    """An installation of the synthetic or of the real files, by the test's parameter."""
    files, python, step = request.param
    if files == "real":
        site = sites.small(scratch / "site")
        sites.shorten_record(site)
        return Case(scratch, site, sites.OVERLAY, python, step)
    older = None
    if files == "older":
        older = mini.older(scratch / "older")
    if files == "fewer":  # The other version changes files in fewer directories.
        path = "vllm/v1/two.py"
        one = mini.overlay(
            scratch / "other", {path: mini.PRISTINE[path]}, {path: mini.OVERLAID[path]}
        )
        older = mini.install(scratch / "older")
        mini.lay(one, older)
    if files in ("part", "part of whole", "extra"):
        overlay = mini.worded(scratch / "overlay")
        choice = ["--leave=vllm/v1/two.py"]
        if files == "extra":
            choice = [f"--extra={mini.extra(scratch / 'extra')}"]
        if files == "part of whole":
            older = mini.install(scratch / "older")
            mini.lay(overlay, older)
        site = mini.install(scratch / "site")
        case = Case(scratch, site, overlay, python, step, older, choice)
        # Until the extra patch is on disk, nothing tells what was chosen.
        case.between = State.FOREIGN if files == "extra" else case.between
        return case
    overlay = mini.overlay(scratch / "overlay", version="0.0.2")
    return Case(scratch, mini.install(scratch / "site"), overlay, python, step, older)


GOAL = {"apply": State.OVERLAID, "revert": State.PRISTINE}
COMMANDS = pytest.mark.parametrize("command", GOAL)
SMALL = [
    pytest.param(("small", None, 1), id="small files"),
    pytest.param(("small", sys.executable, 1), id="with bytecode", marks=pytest.mark.slow),
]
MORE = [
    # Each of the 234 files is changed by the same four calls: every 47th meets each of them.
    pytest.param(("real", None, 47), id="real files", marks=pytest.mark.slow),
    pytest.param(("small", sys.executable, 7), id="some cuts with bytecode"),
    pytest.param(("older", None, 3), id="some cuts in another version"),
    pytest.param(("older", None, 1), id="another version", marks=pytest.mark.slow),
    pytest.param(("fewer", None, 3), id="some cuts in another version of fewer directories"),
    pytest.param(
        ("fewer", None, 1), id="another version of fewer directories", marks=pytest.mark.slow
    ),
    pytest.param(("part", None, 3), id="some cuts in a part"),
    pytest.param(("part", None, 1), id="a part", marks=pytest.mark.slow),
    pytest.param(("part of whole", None, 5), id="some cuts in a part over the whole"),
    pytest.param(("part of whole", None, 1), id="a part over the whole", marks=pytest.mark.slow),
    pytest.param(("extra", None, 5), id="some cuts in an extra patch"),
    pytest.param(("extra", None, 1), id="an extra patch", marks=pytest.mark.slow),
    pytest.param(
        ("older", sys.executable, 1), id="another version with bytecode", marks=pytest.mark.slow
    ),
]


@COMMANDS
@pytest.mark.parametrize("case", [*SMALL, *MORE], indirect=True)
def test_killed_at_every_change(case: Case, command: str) -> None:
    seen = set()
    for at in itertools.count(1, case.step):
        status, state = case.cut(command, at)
        seen.add(state)
        if status is None:
            break
        assert os.WIFSIGNALED(status)
    assert at > 15, "the run made hardly any change: the cuts do not reach it"
    assert state is GOAL[command]
    assert GOAL[command] in seen
    assert seen & {case.between, State.PARTIAL}


@pytest.mark.parametrize("case", SMALL[:1], indirect=True)
def test_another_version_completes_what_was_cut_off(case: Case, tmp_path: Path) -> None:
    other = mini.overlay(tmp_path / "other", ours=mini.MORE, version="0.0.1")
    case.between = State.FOREIGN
    for at in itertools.count(1):
        with case.copy(case.start["apply"], "cut") as site:
            status = cut(case.arguments("apply", site), other.root, at)
            case.recovered(site, f"apply of 0.0.1, cut {at}")
        if status is None:
            break
    assert at > 30


@COMMANDS
@pytest.mark.parametrize("case", SMALL, indirect=True)
def test_the_disk_changes_at_no_other_call(case: Case, command: str) -> None:
    """Otherwise the test above would lack cuts."""
    listed = case.calls(command)
    assert len(listed) > 80
    for number, (call, then) in enumerate(itertools.pairwise(listed), 1):
        assert call.changes or call.disk == then.disk, f"call {number}: {call.name}"
    assert len({call.disk for call in listed}) > 20
    for file in " ".join(call.name for call in listed).split("open"):
        assert "write" not in file or "fsync" in file


@COMMANDS
@pytest.mark.parametrize("case", SMALL, indirect=True)
def test_failed_at_every_call(case: Case, command: str) -> None:
    refused = 0
    for at in itertools.count(1):
        status, state = case.cut(command, at, errno.ENOSPC)
        if status is None:
            break
        assert os.WIFEXITED(status)
        code = os.WEXITSTATUS(status)
        # FAULT: our own copy could not be read. USAGE: an interpreter could not be started.
        # DONE: metadata that is only shown could not be read.
        assert code in (Exit.DENIED, Exit.FAULT, Exit.USAGE, Exit.DONE), f"call {at}"
        refused += code == Exit.DENIED
        assert code != Exit.DONE or state is GOAL[command], f"call {at}"
    assert refused > 30


@pytest.mark.parametrize("at", [1, 8])
def test_a_failure_before_the_first_rename_leaves_no_trace(
    site: Path, worded: Overlay, at: int
) -> None:
    """The staged file is one of vLLM's, or one of ours in a new directory."""
    before = sites.snapshot(site, bytecode=True)
    installation = locate(site=str(site))
    numbers, original = itertools.count(1), os.fsync

    def full(file: int) -> None:
        if next(numbers) == at:
            raise OSError(errno.ENOSPC, "No space left on device", str(site))
        original(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OverlayError, match="nothing was written") as caught:
            commands.apply(installation, worded, Options(force=True, wait=5))
    assert caught.value.code is Exit.DENIED
    assert "free some space" in caught.value.next_step
    assert sites.snapshot(site, bytecode=True) == before


def test_a_mount_that_cannot_sync_directories_is_served(site: Path, worded: Overlay) -> None:
    refused, original = [], os.fsync

    def refusing(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            refused.append(file)
            raise OSError(errno.EINVAL, "Invalid argument", str(site))
        original(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", refusing)
        commands.apply(locate(site=str(site)), worded, Options(force=True, wait=5))
    assert refused
    assert cli.main(["verify", "--site", str(site)]) == Exit.DONE
