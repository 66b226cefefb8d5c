"""The Chromium of the tests is found or installed, or the error tells how to."""

from pathlib import Path

import pytest
from environment import chromium
from environment.chromium import Failure


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH, with the programs that the tests need."""
    for name in ("sh", "cp", "cat"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return tmp_path


def test_the_first_that_starts_is_taken(folder: Path) -> None:
    program(folder / "chromium", "exit 1  # a stub that asks for a package")
    program(folder / "google-chrome", "exit 0")
    assert chromium.ensure() == str(folder / "google-chrome")


def test_the_named_one_goes_before_and_must_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(folder / "chromium", "exit 0")
    own = program(folder / "own", "exit 0")
    monkeypatch.setenv("CHROMIUM", str(own))
    assert chromium.ensure() == str(own)
    own.unlink()
    with pytest.raises(Failure, match="own does not start"):
        chromium.ensure()


@pytest.fixture
def apt(folder: Path) -> Path:
    """Makes an apt-get that has chromium after an update; the file of its arguments."""
    program(folder / "made", "exit 0")
    program(
        folder / "apt-get",
        f"""echo "$@" >> {folder}/asked
        case "$*" in
          *update) echo > {folder}/lists;;
          *install*chromium) cat {folder}/lists && cp {folder}/made {folder}/chromium;;
        esac""",
    )
    return folder / "asked"


def test_root_gets_one_installed_by_apt(folder: Path, apt: Path) -> None:
    assert chromium.ensure() == str(folder / "chromium")
    asked = [line.split()[2:] for line in apt.read_text().splitlines()]
    install = ["install", "-y", "--no-install-recommends", "chromium"]
    assert asked == [install, ["update"], install]
    chromium.ensure()
    assert len(apt.read_text().splitlines()) == 3


def test_anyone_else_is_told_the_next_step(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(Failure, match="apt-get install chromium"):
        chromium.ensure()
    assert not apt.exists()


def test_without_apt_the_next_step_is_said(folder: Path) -> None:
    with pytest.raises(Failure, match="CHROMIUM="):
        chromium.ensure()
