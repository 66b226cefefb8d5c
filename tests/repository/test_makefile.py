"""The front door, as a person uses it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from overlay.errors import Exit
from support import sites
from support.sites import REPO


def make(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    named = ("VENV", "SITE", "PYTHON", "VIRTUAL_ENV", "FORCE", "MAKEFLAGS", "MAKELEVEL")
    env = {k: v for k, v in os.environ.items() if k not in named}
    return subprocess.run(
        ["make", "--no-print-directory", f"PYTHON3={sys.executable}", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env=env | environment,
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An installation whose path holds what shells trip over."""
    return sites.small(tmp_path / "a 'site' of $HOME")


def quoted(site: Path) -> str:
    """For make's own command line, where a dollar is doubled."""
    return str(site).replace("$", "$$")


def test_the_round_trip(site: Path) -> None:
    before = sites.snapshot(site)
    for target in ("apply", "status", "verify", "diff", "revert"):
        done = make(target, f"SITE={quoted(site)}")
        assert done.returncode == 0, done.stderr
    assert sites.snapshot(site) == before
    assert make("verify", f"SITE={quoted(site)}").returncode != 0


def test_arguments_reach_the_tool(site: Path) -> None:
    done = make("apply", f"SITE={quoted(site)}", "ARGS=--json --dry-run")
    assert '"dry_run": true' in done.stdout
    assert make("status", f"SITE={quoted(site)}", "ARGS=--json").stdout.count("pristine") > 2


def test_the_active_environment_is_the_target(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    site = sites.small(tmp_path / "venv/lib/python3.12/site-packages")
    assert make("apply", VIRTUAL_ENV=str(tmp_path / "venv")).returncode == 0
    assert sites.run("verify", "--site", site).returncode == Exit.DONE


def test_apply_without_a_target_makes_its_own_environment(tmp_path: Path) -> None:
    """From an unpacked archive, whose path says "test": no git, no pyproject.toml."""
    root = tmp_path / "latest"
    for name in ("Makefile", "VERSION_PIN", "patches", "scripts", "vendor_overlay"):
        copy = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        copy(REPO / name, root / name)
    for done in ("files overlaid", "nothing to do"):
        applied = make("apply", "-C", str(root), UV=str(Path(sys.executable).parent / "uv"))
        assert applied.returncode == 0, applied.stderr
        assert done in applied.stdout
    assert make("verify", "-C", str(root)).returncode == 0
    assert (root / ".venv" / "bin" / "python").exists()
    refused = make("lint", "-C", str(root))
    assert refused.returncode != 0
    assert "tests are run from a checkout" in refused.stderr


def test_help_is_the_default_and_lists_the_targets() -> None:
    text = make().stdout
    for target in ("apply", "revert", "status", "verify", "diff", "vendor", "edit", "refresh"):
        assert f"\n  {target} " in text
    for target in ("dist", "demo", "test", "help"):
        assert f"\n  {target} " in text


def test_a_refusal_is_make_s_failure(tmp_path: Path) -> None:
    refused = make("apply", f"VENV={tmp_path / 'missing'}")
    assert refused.returncode != 0
    assert "does not exist" in refused.stderr
