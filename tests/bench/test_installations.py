"""The installations of a comparison, and the interpreter that runs them."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from bench.compare import command_line
from bench.compare.installations import Installations
from bench.compare.turns import in_turn
from support import sites


def test_the_interpreter_is_the_one_behind_a_shim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child runs in another directory, where the shim would choose another."""
    site = sites.small(tmp_path / "site")
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\n[ -e .python-version ] && exec {sys.executable} "$@"\nexit 127\n')
    shim.chmod(0o755)
    (tmp_path / ".python-version").write_text("")
    monkeypatch.chdir(tmp_path)
    args = argparse.Namespace(venv=None, site=str(site), python="./python", out=None, model=None)
    command_line.resolve_target(argparse.ArgumentParser(), args)
    assert (args.site, args.python) == (site, sys.executable)
    assert args.out.parent.name == "bench"


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file's size and time of change."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_an_overlaid_installation_is_measured_against_its_pristine_self(tmp_path: Path) -> None:
    site = sites.whole(tmp_path / "site")
    overlay = [sys.executable, str(sites.REPO / "scripts" / "overlay"), "apply", "--force"]
    subprocess.run([*overlay, "--site", str(site), "--python", sys.executable], check=True)
    before = contents(site)
    views = Installations(site, tmp_path / "work", sys.executable)
    pristine = Installations(sites.whole(tmp_path / "other"), tmp_path / "more", sys.executable)
    assert views.digests == pristine.digests
    assert contents(site) == before


def test_sides_take_turns_at_being_first() -> None:
    orders = [in_turn(turn, ["a", "b", "c"])[0] for turn in range(4)]
    assert orders == ["a", "b", "c", "a"]
