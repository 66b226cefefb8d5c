"""The environments that make creates, and those that it must not change."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from overlay.errors import Exit
from support import checkouts, sites
from support.checkouts import checkout, library
from support.sites import REPO, run, snapshot

UV = Path(sys.executable).parent / "uv"
COMPLETE = "readiness-overlay.complete"
Make = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return checkout(tmp_path / "clone")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """A file with the arguments of each run of uv, a line each."""
    (tmp_path / "asked").write_text("")
    return tmp_path / "asked"


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A file with the name of the uv command at which the run is killed."""
    (tmp_path / "cut").write_text("")
    return tmp_path / "cut"


@pytest.fixture
def make(root: Path, tmp_path: Path, asked: Path, cut: Path) -> Make:
    """Runs make in ``root``, with a uv that installs a few files instead of gigabytes."""
    wheel = sites.small(tmp_path / "wheel")
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
        echo "$@" >> {asked}
        [ "$1" != "$(cat {cut})" ] || {{ kill -9 $PPID; exit; }}
        [ "$1" != venv ] || exec {UV} "$@"
        [ "$1 $2 $3" = "pip install --python" ] || exit
        cp -r {wheel}/. "${{4%/bin/python}}"/lib/python*/site-packages/"""
    )
    program.chmod(0o755)

    def run(
        *arguments: str, root: Path = root, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        return checkouts.make("-C", str(root), *arguments, UV=str(program), **environment)

    return run


def pristine(folder: Path, holds: bool = True) -> Path:
    """Create somebody else's environment, with a vLLM or without."""
    venv.create(folder)
    if holds:
        sites.small(library(folder))
    return folder


def stale(folder: Path) -> None:
    """Make an environment look as if it had been made from other inputs."""
    (folder / COMPLETE).write_text((folder / COMPLETE).read_text() + "more\n")


@pytest.mark.parametrize("linked", [False, True])
def test_somebody_s_environment_is_overlaid_as_it_is(
    root: Path, make: Make, asked: Path, tmp_path: Path, linked: bool
) -> None:
    own = pristine(tmp_path / "own" if linked else root / ".venv")
    if linked:
        (root / ".venv").symlink_to(own)
    before = snapshot(own)
    done = make("apply")
    assert done.returncode == 0, done.stderr
    assert ".venv was not made here; the vLLM in it is taken as it is" in done.stderr
    assert run("verify", "--venv", own).returncode == Exit.DONE
    assert make("revert").returncode == 0
    assert snapshot(own) == before
    assert asked.read_text() == ""


def plain_file(place: Path, _: Path) -> None:
    place.write_text("VIRTUAL_ENV=x\n")


def dangling_link(place: Path, elsewhere: Path) -> None:
    place.symlink_to(elsewhere)


def other_directory(place: Path, _: Path) -> None:
    place.mkdir()
    (place / "notes").write_text("mine")


def without_vllm(place: Path, _: Path) -> None:
    pristine(place, holds=False)


def link_to_one_without_vllm(place: Path, elsewhere: Path) -> None:
    place.symlink_to(pristine(elsewhere, holds=False))


@pytest.mark.parametrize(
    "put",
    [plain_file, dangling_link, other_directory, without_vllm, link_to_one_without_vllm],
)
def test_what_is_no_target_is_refused_and_stays(
    root: Path, make: Make, asked: Path, tmp_path: Path, put: Callable[[Path, Path], None]
) -> None:
    put(root / ".venv", tmp_path / "elsewhere")
    before = snapshot(root), snapshot(tmp_path / "elsewhere")
    refused = make("apply")
    assert refused.returncode != 0
    assert "VENV=dir" in refused.stderr
    assert (snapshot(root), snapshot(tmp_path / "elsewhere")) == before
    assert asked.read_text() == ""


@pytest.mark.parametrize("linked", [False, True])
def test_a_directory_of_nothing_is_used(
    root: Path, make: Make, tmp_path: Path, linked: bool
) -> None:
    """It is empty, or has half a mark, because a run was cut off at its first write."""
    (tmp_path / "big").mkdir()
    if linked:
        (root / ".venv").symlink_to(tmp_path / "big")
    else:
        (root / ".venv").mkdir()
        (root / ".venv" / "readiness-overlay.made").write_text("vllm-c")
    assert make("apply").returncode == 0
    stale(root / ".venv")
    assert make("apply").returncode == 0
    assert (root / ".venv" / COMPLETE).read_text().splitlines()[-1] != "more"


@pytest.mark.parametrize("at", ["venv", "pip"])
def test_one_that_was_cut_off_is_made_again_but_not_its_copy(
    root: Path, make: Make, cut: Path, tmp_path: Path, at: str
) -> None:
    cut.write_text(at)
    assert make("apply").returncode != 0
    cut.write_text("")
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, symlinks=True)
    before = snapshot(copy)
    if at == "pip":
        refused = make("apply", root=copy)
        assert refused.returncode != 0
        assert f"was made as {root / '.venv'}, and moved or copied" in refused.stderr
        assert snapshot(copy) == before
    done = make("apply")
    assert done.returncode == 0, done.stderr
    assert make("verify").returncode == 0


def test_a_copy_is_never_remade(root: Path, make: Make, asked: Path, tmp_path: Path) -> None:
    assert make("apply").returncode == 0
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, symlinks=True)
    (tmp_path / "linking").mkdir()
    linking = checkout(tmp_path / "linking" / "clone")
    (linking / ".venv").symlink_to(root / ".venv")
    asked.write_text("")
    for other in (copy, linking):
        before = snapshot(other / ".venv")
        for said in ("", "moved or copied; the vLLM in it is taken as it is"):
            done = make("apply", root=other)
            assert done.returncode == 0, done.stderr
            assert "nothing to do" in done.stdout
            assert said in done.stderr
            assert snapshot(other / ".venv") == before
            stale(other / ".venv")
            before = snapshot(other / ".venv")
    assert asked.read_text() == ""


def test_one_of_an_earlier_release_is_known_by_its_only_mark(
    root: Path, make: Make, asked: Path, tmp_path: Path
) -> None:
    assert make("apply").returncode == 0
    (root / ".venv" / "readiness-overlay.made").unlink()
    stale(root / ".venv")
    linking = checkout(tmp_path / "linking" / "clone")
    (linking / ".venv").symlink_to(root / ".venv")
    asked.write_text("")
    assert "taken as it is" in make("apply", root=linking).stderr
    assert asked.read_text() == ""
    assert make("apply").returncode == 0
    assert "pip install" in asked.read_text()


def test_somebody_s_environment_in_the_place_of_one_that_was_cut_off(
    root: Path, make: Make, cut: Path, asked: Path
) -> None:
    """Python's venv leaves our mark there."""
    cut.write_text("venv")
    make("apply")
    cut.write_text("")
    asked.write_text("")
    pristine(root / ".venv")
    done = make("apply")
    assert done.returncode == 0, done.stderr
    assert ".venv was made anew by something else; the vLLM in it is taken as it is" in done.stderr
    assert asked.read_text() == ""


def test_words_that_reach_nobody_stop_nothing(root: Path, make: Make, tmp_path: Path) -> None:
    pristine(root / ".venv")
    with Path("/dev/full").open("w") as full:
        command = ["make", "-s", "-C", str(root), "apply", f"PYTHON3={sys.executable}"]
        code = subprocess.run(
            command, stderr=full, stdout=full, env=clean(), check=False
        ).returncode
    assert code == 0
    assert run("verify", "--venv", root / ".venv").returncode == Exit.DONE


def clean() -> dict[str, str]:
    """This process's variables without an active environment."""
    return {k: v for k, v in os.environ.items() if k not in (*sites.AMBIENT, "MAKEFLAGS")}


def test_a_uv_that_fails_is_named(root: Path, make: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    refused = checkouts.make("-C", str(root), "apply", UV=str(broken))
    assert f"{broken} failed, and has said why; run it again" in refused.stderr


def test_diff_with_arguments_needs_a_vllm(make: Make) -> None:
    refused = make("diff", "ARGS=--json")
    assert "diff: no vLLM is named; ARGS needs one: VENV=dir" in refused.stderr
    assert refused.stdout == ""


def test_ours_for_another_python_is_refused(root: Path, make: Make, cut: Path) -> None:
    cut.write_text("pip")
    make("apply")
    cut.write_text("")
    (library(root / ".venv").parent).rename(root / ".venv" / "lib" / "python3.9")
    before = snapshot(root)
    refused = make("apply")
    assert refused.returncode != 0
    assert "was made with python3.9" in refused.stderr
    assert snapshot(root) == before


def test_the_tests_environment_is_not_taken_from_anybody(root: Path, make: Make) -> None:
    shutil.copy(REPO / "pyproject.toml", root)
    pristine(root / "build" / "env")
    before = snapshot(root)
    refused = make("lint")
    assert refused.returncode != 0
    assert "build/env was not made here; delete it or move it away" in refused.stderr
    assert snapshot(root) == before


def test_packages_go_nowhere_else(root: Path, make: Make) -> None:
    """Uv asks the environment's Python, which may print at its start, and else guesses."""
    shutil.copy(REPO / "pyproject.toml", root)
    assert make("tools").returncode == 0
    stale(root / "build" / "env")
    (library(root / "build" / "env") / "sitecustomize.py").write_text("print('hello')\n")
    before = snapshot(pristine(root / ".venv", holds=False))
    done = checkouts.make("-C", str(root), "tools", UV=str(UV), UV_OFFLINE="1")
    assert done.returncode != 0
    assert "build/env/bin/python" in done.stderr
    assert snapshot(root / ".venv") == before


@pytest.mark.parametrize("flag", ["--dry-run", "--dry", "'--dry-run'"])
def test_a_dry_run_makes_nothing(root: Path, make: Make, asked: Path, flag: str) -> None:
    before = snapshot(root)
    for target in ("apply", "demo"):
        done = make(target, f"ARGS={flag}")
        assert done.returncode == 0, done.stderr
        assert "would make .venv with vllm" in done.stderr
    assert snapshot(root) == before
    assert asked.read_text() == ""
    pristine(root / ".venv")
    before = snapshot(root)
    assert "files would be overlaid" in make("apply", f"ARGS={flag}").stdout
    assert snapshot(root) == before


def test_diff_shows_the_text_and_makes_nothing(root: Path, make: Make, asked: Path) -> None:
    shutil.copy(REPO / "pyproject.toml", root)
    before = snapshot(root)
    done = make("diff")
    assert done.returncode == 0, done.stderr
    patches = (root / "patches" / "series").read_text().split()
    assert done.stdout == "".join((root / "patches" / name).read_text() for name in patches)
    assert "`make tools`" in done.stderr
    pristine(root / ".venv")
    before = snapshot(root)
    done = make("diff")
    assert done.returncode == 0, done.stderr
    assert "\n@@" in done.stdout
    assert "\n " in done.stdout
    assert "`make tools`" in done.stderr
    assert snapshot(root) == before
    assert asked.read_text() == ""


def test_a_vllm_in_condas_base_environment_is_mentioned(
    root: Path, make: Make, tmp_path: Path
) -> None:
    sites.small(tmp_path / "conda/lib/python3.12/site-packages")
    for prefix, mentioned in ((tmp_path / "conda", True), (tmp_path, False)):
        active = {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": "base"}
        done = make("apply", "ARGS=--dry-run", **active)
        assert done.returncode == 0, done.stderr
        assert (f"VENV={prefix} names it" in done.stderr) is mentioned


def test_an_active_conda_environment_is_the_target(root: Path, make: Make, tmp_path: Path) -> None:
    prefix = tmp_path / "conda"
    site = sites.small(library(prefix))
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)
    before = snapshot(root)
    done = make("apply", "ARGS=--dry-run", CONDA_PREFIX=str(prefix), CONDA_DEFAULT_ENV="mine")
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout
    assert snapshot(root) == before


@pytest.mark.parametrize("name", ["VENV", "SITE", "PYTHON"])
def test_a_target_that_the_environment_names_is_said_to_be_its(
    make: Make, tmp_path: Path, name: str
) -> None:
    gone = str(tmp_path / "gone")
    refused = make("status", **{name: gone})
    assert f"named by  {name}" in refused.stderr
    assert f"or unset {name}" in refused.stderr
    assert "named by" not in make("status", f"{name}={gone}").stderr
