"""Which installation and which interpreter a comparison is about."""

import argparse
import sys
from pathlib import Path

import pytest
from bench import sides
from support.sites import small


def test_the_interpreter_is_the_one_behind_a_shim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child runs in another directory, where the shim would choose another."""
    site = small(tmp_path / "site")
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\n[ -e .python-version ] && exec {sys.executable} "$@"\nexit 127\n')
    shim.chmod(0o755)
    (tmp_path / ".python-version").write_text("")
    monkeypatch.chdir(tmp_path)
    args = argparse.Namespace(venv=None, site=str(site), python="./python", out=tmp_path)
    sides.target(argparse.ArgumentParser(), args)
    assert (args.site, args.python) == (site, sys.executable)
