"""apply, revert, edits, reinstalls and kills in any order.

The expected state is computed from the bytes on disk, without the tool.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from overlay import cli
from overlay.errors import Exit
from overlay.installation import locate
from overlay.state import State, inspect
from support import faults, mini
from support.sites import Snapshot, snapshot

TOUCHED = [*mini.PRISTINE, "vllm/v1/readiness/a.py", "vllm/v1/readiness/__init__.py"]
RECORD = f"{mini.INFO}/RECORD"


class Commands(RuleBasedStateMachine):
    """Commands and accidents in one installation."""

    @initialize()
    def install(self) -> None:
        """Install, and take snapshots of the pristine and the overlaid state."""
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.patch = pytest.MonkeyPatch()
        self.overlay = mini.overlay(self.folder / "overlay")
        self.patch.setattr(cli, "ROOT", self.overlay.root)
        self.site = mini.install(self.folder / "site")
        reference = mini.install(self.folder / "reference")
        self.pristine = snapshot(reference)
        assert cli.main(["apply", "--site", str(reference)]) == Exit.DONE
        self.overlaid = snapshot(reference)
        self.edited: set[str] = set()

    def teardown(self) -> None:
        """Remove the installation."""
        if hasattr(self, "patch"):
            self.patch.undo()
            shutil.rmtree(self.folder)

    def run(self, command: str) -> int:
        """Run the tool; a refusal must not change anything."""
        before = self.files()
        code = cli.main([command, "--site", str(self.site)])
        if code != Exit.DONE:
            assert code == Exit.FOREIGN
            assert self.edited
            assert self.files() == before
        return code

    def files(self) -> Snapshot:
        """The installation's files and directories."""
        return snapshot(self.site)

    def mended(self) -> None:
        """Forget edits that were undone."""
        now = self.files()
        known = {path: {self.pristine.get(path), self.overlaid.get(path)} for path in self.edited}
        self.edited = {path for path in self.edited if now.get(path) not in known[path]}

    @rule()
    def apply(self) -> None:
        """Apply."""
        if self.run("apply") == Exit.DONE:
            assert self.files() == self.overlaid

    @rule()
    def revert(self) -> None:
        """Revert."""
        if self.run("revert") == Exit.DONE:
            assert self.files() == self.pristine

    @rule(command=st.sampled_from(["apply", "revert"]), at=st.integers(1, 45))
    def cut(self, command: str, at: int) -> None:
        """Kill a run somewhere."""
        faults.cut([command, "--site", str(self.site)], self.overlay.root, at)

    @rule(path=st.sampled_from(TOUCHED), data=st.binary(max_size=4))
    def edit(self, path: str, data: bytes) -> None:
        """Change a file by hand."""
        if (self.site / path).is_file():
            with (self.site / path).open("ab") as file:
                file.write(data + b"#")
            self.edited.add(path)

    @rule(path=st.sampled_from(TOUCHED))
    def delete(self, path: str) -> None:
        """Delete a file by hand."""
        if (self.site / path).is_file():
            (self.site / path).unlink()
            self.edited.add(path)
            self.mended()

    @precondition(lambda self: self.edited)
    @rule(overlaid=st.booleans())
    def restore(self, overlaid: bool) -> None:
        """Restore edited files to their overlaid or pristine bytes."""
        for path in self.edited:
            kept = (self.overlaid if overlaid else self.pristine).get(path)
            (self.site / path).unlink(missing_ok=True)
            if kept and (self.site / path).parent.is_dir():
                assert isinstance(kept[1], bytes)
                (self.site / path).write_bytes(kept[1])
        self.mended()

    @rule(overlaid=st.booleans())
    def swap_record(self, overlaid: bool) -> None:
        """Replace RECORD by its overlaid or pristine bytes."""
        kept = (self.overlaid if overlaid else self.pristine)[RECORD][1]
        assert isinstance(kept, bytes)
        (self.site / RECORD).write_bytes(kept)

    @rule()
    def reinstall(self) -> None:
        """An installer writes upstream's files and RECORD anew, and removes nothing."""
        mini.install(self.site)
        self.mended()

    @invariant()
    def status_is_true(self) -> None:
        """Status is pristine or overlaid exactly for those bytes."""
        if not hasattr(self, "site"):
            return
        state = inspect(locate(site=str(self.site)), self.overlay).state
        now = self.files()
        assert (state is State.PRISTINE) == (now == self.pristine)
        assert (state is State.OVERLAID) == (now == self.overlaid)
        foreign = any(path in now or path in mini.PRISTINE for path in self.edited)
        assert (state is State.FOREIGN) == foreign


TestCommands = Commands.TestCase
TestCommands.settings = settings(max_examples=12, stateful_step_count=12)


@pytest.mark.slow
def test_many_orders() -> None:
    many = settings(max_examples=100, stateful_step_count=12)
    run_state_machine_as_test(Commands, settings=many)  # type: ignore[no-untyped-call]
