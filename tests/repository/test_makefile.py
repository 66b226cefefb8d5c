"""The Makefile, as a person uses it."""

import json
import sys
import venv
from pathlib import Path

import pytest
from overlay.errors import Exit
from support import sites
from support.checkouts import checkout, library, make
from support.sites import REPO

#: Characters in a path that the shell and make treat specially.
ODD = "a 'site' of $HOME `x` $(shell touch made) \"#;&*"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return sites.small(tmp_path / ODD)


def test_the_round_trip(site: Path) -> None:
    before = sites.snapshot(site)
    for target in ("apply", "status", "verify", "diff", "revert"):
        done = make(target, f"SITE={site}")
        assert done.returncode == 0, done.stderr
    assert sites.snapshot(site) == before
    assert make("verify", f"SITE={site}").returncode != 0


def test_arguments_reach_the_tool(site: Path) -> None:
    done = make("apply", f"SITE={site}", "ARGS=--json --dry-run")
    assert '"dry_run": true' in done.stdout
    assert make("status", f"SITE={site}", "ARGS=--json").stdout.count("pristine") > 2


def test_the_active_environment_is_the_target(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    site = sites.small(tmp_path / "venv/lib/python3.12/site-packages")
    assert make("apply", VIRTUAL_ENV=str(tmp_path / "venv")).returncode == 0
    assert sites.run("verify", "--site", site).returncode == Exit.DONE


@pytest.mark.parametrize("by", ["command line", "environment"])
def test_every_value_is_taken_as_it_stands(site: Path, by: str) -> None:
    folder = site.parent / f"venv {ODD}"
    venv.create(folder)
    sites.small(library(folder))
    python = folder / "bin" / "python"
    for name, value in (
        ("VENV", folder),
        ("SITE", library(folder)),
        ("PYTHON", python),
        ("VIRTUAL_ENV", folder),
    ):
        if by == "environment" or name == "VIRTUAL_ENV":
            done = make("status", **{name: str(value)})
        else:
            done = make("status", f"{name}={value}")
        assert done.returncode == 0, done.stderr
        assert f"{library(folder)}: " in done.stdout
    assert make("status", f"PYTHON3={python}", f"VENV={folder}").returncode == 0
    missing = folder / "missing.whl"
    for target, name in (("dist", "WHEEL"), ("probe", "FILE")):
        refused = make(target, f"{name}={missing}")
        assert str(missing) in refused.stderr
    assert not (REPO / "made").exists()


def test_a_value_that_is_empty_is_refused_where_it_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    sites.small(library(tmp_path / "venv"))
    active = {"VIRTUAL_ENV": str(tmp_path / "venv")}
    for name in ("VENV", "SITE", "PYTHON", "WHEEL"):
        refused = make("status", f"{name}=", **active)
        assert refused.returncode != 0
        assert f"{name}= is empty" in refused.stderr
        done = make("status", **active, **{name: ""})
        assert done.returncode == 0, done.stderr


def test_an_ambient_interpreter_does_not_join_a_named_directory(tmp_path: Path) -> None:
    named = f"SITE={sites.small(tmp_path / 'site')}"
    command = ("status", "ARGS=--json", named)
    report = json.loads(make(*command, PYTHON=sys.executable).stdout)
    assert report["interpreter"] is None
    report = json.loads(make(*command, f"PYTHON={sys.executable}").stdout)
    assert report["interpreter"] == sys.executable


def test_apply_without_a_target_makes_its_own_environment(tmp_path: Path) -> None:
    """From an unpacked archive, whose path says "test": no git, no pyproject.toml."""
    root = checkout(tmp_path / "latest")
    for done in ("files overlaid", "nothing to do"):
        applied = make("apply", "-C", str(root), UV=str(Path(sys.executable).parent / "uv"))
        assert applied.returncode == 0, applied.stderr
        assert done in applied.stdout
    assert make("verify", "-C", str(root)).returncode == 0
    assert (root / ".venv" / "bin" / "python").exists()
    refused = make("lint", "-C", str(root))
    assert refused.returncode != 0
    assert "tests are run from a checkout" in refused.stderr


def test_a_refusal_is_make_s_failure(tmp_path: Path) -> None:
    refused = make("apply", f"VENV={tmp_path / 'missing'}")
    assert refused.returncode != 0
    assert "does not exist" in refused.stderr
