"""Another version of the overlay is installed: it is recognised, replaced, or taken off."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from overlay import cli, commands
from overlay import pin as pins
from overlay.commands import Options
from overlay.errors import Exit
from overlay.installation import locate
from overlay.pin import PACKAGE, Pin, sha256
from overlay.source import Overlay
from overlay.state import inspect
from support import mini, sites
from support.sites import OVERLAY, REPO, run, snapshot, status
from vllm.v1.readiness.engine import identity

PROVENANCE = f"{PACKAGE}/provenance"
PATCH = f"{PROVENANCE}/patches/0001-all.patch"


@pytest.fixture
def older(tmp_path: Path, ours: Overlay) -> Path:
    """An installation that version 0.0.1 was laid over; the command line lays 0.0.2."""
    return mini.older(tmp_path)


def test_another_version_is_named_and_replaced(older: Path) -> None:
    named = "is overlaid by overlay 0.0.1; this is 0.0.2"
    assert named in report("status", older)["error"]["reason"]
    for command in ("verify", "diff"):
        assert named in run(command, "--site", older, code=Exit.FOREIGN).stderr
    lines = run("status", "--site", older, code=Exit.FOREIGN).stdout.splitlines()
    assert lines[0] == f"{older}: vllm {mini.RELEASE}, overlaid by overlay 0.0.1"
    tool = f"python3 {REPO}/scripts/overlay"
    apply, revert = (f"`{tool} {name} --site={older}`" for name in ("apply", "revert"))
    assert lines[-1] == f"next: {apply} replaces it with this one, {revert} removes it"
    before = snapshot(older)
    for command in ("apply", "revert"):
        run(command, "--site", older, "--dry-run", code=Exit.DONE)
        assert snapshot(older) == before
    replaced = "replaces overlay 0.0.1 with overlay 0.0.2\n"
    assert replaced in run("apply", "--site", older, code=Exit.DONE).stdout
    run("verify", "--site", older, code=Exit.DONE)
    assert (older / "vllm" / "one.py").read_bytes() == mini.OVERLAID["vllm/one.py"]


def report(command: str, site: Path) -> Any:
    """JSON report of a command."""
    return json.loads(run(command, "--site", site, "--json").stdout)


@pytest.mark.parametrize("state", ["overlaid", "partial"])
@pytest.mark.parametrize("command", ["status", "verify", "doctor"])
def test_another_version_is_a_state_with_its_own_version_and_digest(
    older: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, state: str
) -> None:
    """The digest is the one that its own status prints and its engine logs."""
    if state == "partial":
        (older / PACKAGE / "a.py").unlink()
    seen = report(command, older)
    shown = run("status", "--site", older).stdout.splitlines()
    with monkeypatch.context() as patch:
        patch.setattr(cli, "ROOT", tmp_path / "other")
        own = status(older)
    assert own["state"] == state
    assert own["digest"] == identity.digest(older / PROVENANCE, older)
    assert seen["state"] == "other"
    installed = {"version": "0.0.1", "digest": own["digest"], "state": state}
    assert seen["installed"] == own["installed"] == installed
    assert seen["digest"] == own["digest"]
    assert (seen["overlay"], seen["code"]) == ("0.0.2", 0 if command == "doctor" else 5)
    assert f"overlay 0.0.1, digest {own['digest']}" in shown
    if command != "doctor":
        for key in ("files", "leftovers", "stale", "record"):
            assert seen[key] == own[key]
    run("apply", "--site", older, code=Exit.DONE)
    now = status(older)
    assert (now["state"], now["installed"]["version"]) == ("overlaid", "0.0.2")
    assert now["installed"]["digest"] == now["digest"] != own["digest"]
    run("revert", "--site", older, code=Exit.DONE)
    assert status(older)["installed"] is None


def test_doctor_names_the_state_and_the_installed_version(older: Path) -> None:
    def lines() -> list[str]:
        return run("doctor", "--site", older).stdout.splitlines()

    assert "state     overlaid by overlay 0.0.1" in lines()
    (older / PACKAGE / "a.py").unlink()
    assert "state     partial by overlay 0.0.1" in lines()
    run("apply", "--site", older, code=Exit.DONE)
    (older / PACKAGE / "a.py").unlink()
    assert "state     partial" in lines()


@pytest.mark.parametrize("extended", [False, True])
def test_a_file_that_only_this_version_changes_makes_another_version_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:
    """`apply` could not replace it: the advice is about the file."""
    site = mini.install(tmp_path / "site")
    one = "vllm/one.py"
    first = mini.overlay(
        tmp_path / "first", {one: mini.PRISTINE[one]}, {one: mini.OVERLAID[one]}, mini.OURS
    )
    mini.lay(first, site)
    newer = mini.overlay(tmp_path / "newer", version="0.0.2")
    monkeypatch.setattr(cli, "ROOT", newer.root)
    assert status(site)["state"] == "other"
    two = site / "vllm/v1/two.py"
    two.write_bytes(two.read_bytes() + b"# mine\n") if extended else two.unlink()
    for command in ("status", "verify", "doctor"):
        seen = report(command, site)
        assert (seen["state"], seen["installed"], seen["code"]) == ("foreign", None, 5)
        assert seen["error"]["subject"] == str(two)
    lines = run("status", "--site", site).stdout.splitlines()
    assert lines[0].endswith(", overlaid by overlay 0.0.1, foreign to overlay 0.0.2")
    assert f"why: {two}: is neither upstream's nor the overlay's" in lines
    run("apply", "--site", site, code=Exit.FOREIGN)
    run("revert", "--site", site, code=Exit.DONE)


def test_another_version_that_is_partial_is_named(older: Path) -> None:
    (older / PACKAGE / "a.py").unlink()
    refused = run("diff", "--site", older, code=Exit.FOREIGN)
    assert "is overlaid in part by overlay 0.0.1" in refused.stderr
    shown = run("status", "--site", older, code=Exit.FOREIGN)
    assert f"{mini.RELEASE}, partial by overlay 0.0.1\n" in shown.stdout


def test_another_state_of_this_version_is_named_as_one(older: Path, ours: Overlay) -> None:
    mini.overlay(ours.root, ours={**mini.OURS, f"{PACKAGE}/c.py": b""}, version="0.0.1")
    done = run("apply", "--site", older, code=Exit.DONE)
    assert "replaces overlay 0.0.1 (another state) with overlay 0.0.1\n" in done.stdout


def test_another_version_is_taken_off(older: Path, tmp_path: Path) -> None:
    run("revert", "--site", older, code=Exit.DONE)
    assert snapshot(older) == snapshot(mini.install(tmp_path / "fresh"))


def a_foreign_file(site: Path) -> None:
    (site / "vllm" / "one.py").write_text("evil\n")


def a_forged_checksum_of_upstream(site: Path) -> None:
    pin = site / PROVENANCE / "VERSION_PIN"
    honest = sha256(mini.PRISTINE["vllm/one.py"])
    pin.write_text(pin.read_text().replace(honest, sha256(b"evil")))


def a_forged_patch(site: Path) -> None:
    """It must not decide what upstream's bytes are."""
    patch, pin = site / PATCH, site / PROVENANCE / "VERSION_PIN"
    honest = patch.read_bytes()
    patch.write_bytes(honest.replace(b"-B = 2\n", b"-B = 9\n"))
    pin.write_text(pin.read_text().replace(sha256(honest), sha256(patch.read_bytes())))


@pytest.mark.parametrize("tamper", [a_foreign_file, a_forged_checksum_of_upstream, a_forged_patch])
def test_another_version_that_was_tampered_with_is_refused(
    older: Path, tamper: Callable[[Path], None]
) -> None:
    tamper(older)
    for command in ("status", "verify", "doctor"):
        seen = report(command, older)
        assert (seen["state"], seen["installed"]) == ("foreign", None)
    before = snapshot(older)
    for command in ("apply", "revert"):
        run(command, "--site", older, code=Exit.FOREIGN)
    assert snapshot(older) == before


def test_another_version_is_not_taken_off_for_nothing(older: Path, ours: Overlay) -> None:
    before = snapshot(older)
    module = ours.root / "vendor_overlay" / PACKAGE / "b.py"
    module.write_text("stale\n")
    run("apply", "--site", older, code=Exit.FAULT)
    assert snapshot(older) == before


def test_a_replacement_that_fails_says_what_was_removed(
    older: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, for example, that is written in a newer Python. Upstream's files are back then."""
    changed = {**mini.OVERLAID, "vllm/one.py": b"A = 1\nreturn\n"}
    newer = mini.overlay(tmp_path / "newer", overlaid=changed, version="0.0.3")
    monkeypatch.setattr(cli, "ROOT", newer.root)
    message = run("apply", "--site", older, "--python", sys.executable, code=Exit.USAGE).stderr
    for part in ("0.0.1 was removed, and this one is not applied: ", "'return' outside"):
        assert part in message
    assert "nothing was written" not in message
    assert snapshot(older) == snapshot(mini.install(tmp_path / "fresh"))


def history() -> dict[str, Pin]:
    """Commit to VERSION_PIN, oldest first, of every commit that changed it."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=REPO, text=True)

    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a shallow clone does not have the pins of earlier commits")
    commits = git("log", "--reverse", "--format=%H", "--", pins.NAME).split()
    return {commit: pins.loads(git("show", f"{commit}:{pins.NAME}")) for commit in commits}


def test_every_file_that_a_version_in_the_history_changed_is_known() -> None:
    changed = {pair for pin in history().values() for pair in pin.upstream.items()}
    assert changed == {*pins.EARLIER.items(), *OVERLAY.pin.upstream.items()}


def test_every_version_is_recognised_and_taken_off(tmp_path: Path) -> None:
    """Each version is taken from the last commit that changed it."""
    site = sites.small(tmp_path / "site")
    sites.shorten_record(site)
    before = snapshot(site)
    installation = locate(site=str(site))
    last = {pin.overlay: commit for commit, pin in history().items()}
    last.pop(OVERLAY.pin.overlay, None)  # It may still change.
    assert len(last) > 5
    for version, commit in last.items():
        command = ["git", "archive", commit, pins.NAME, "patches", "vendor_overlay"]
        packed = subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(tmp_path / "other", filter="data")
        mini.lay(Overlay.load(tmp_path / "other"), site)
        assert inspect(installation, OVERLAY).installed_version == version
        commands.revert(installation, OVERLAY, Options(force=True))
        assert snapshot(site) == before
        shutil.rmtree(tmp_path / "other")


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_another_version_that_cannot_be_taken_off_is_reinstalled(
    older: Path, recorded: bool, damage: Callable[[Path], None]
) -> None:
    if not recorded:
        (older / mini.INFO / "RECORD").unlink()
    damage(older / PATCH)
    before = snapshot(older)
    for command in ("status", "verify", "apply", "revert"):
        done = run(command, "--site", older, "--dry-run", code=Exit.FOREIGN)
        message = done.stdout + done.stderr
        for part in ("0.0.1", f"{PROVENANCE}/patches", f"reinstall vllm {mini.RELEASE}"):
            assert part in message
        for part in ("or nothing", "make refresh", " revert --site="):
            assert part not in message
    assert snapshot(older) == before


@pytest.mark.parametrize("path", ["vllm/one.py", f"{PACKAGE}/a.py"])
def test_a_file_that_is_foreign_to_another_version_is_shown_alone(older: Path, path: str) -> None:
    kept = (older / path).read_bytes()
    (older / path).write_bytes(kept + b"# mine\n")
    before = snapshot(older)
    shown = run("status", "--site", older, code=Exit.FOREIGN).stdout
    assert f"{mini.RELEASE}, foreign to overlay 0.0.1\n" in shown
    assert [line.split()[1] for line in shown.splitlines() if "  foreign " in line] == [path]
    assert sha256(kept) in shown
    for command in ("apply", "revert"):
        message = run(command, "--site", older, code=Exit.FOREIGN).stderr
        assert f"{older / path}: is " in message
        assert "overlay 0.0.1" in message
        assert "more)" not in message
    assert snapshot(older) == before
    (older / path).write_bytes(kept)
    run("apply", "--site", older, code=Exit.DONE)
