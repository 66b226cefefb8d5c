"""An older version over a newer one: refused, unless a flag says so."""

import json
from pathlib import Path

import pytest
from overlay import cli
from overlay.errors import Exit
from overlay.pin import PACKAGE
from support import mini
from support.sites import run, snapshot


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An installation that version 0.0.10 was laid over."""
    site = mini.install(tmp_path / "site")
    mini.lay(mini.overlay(tmp_path / "newer", ours=mini.MORE, version="0.0.10"), site)
    return site


@pytest.fixture(params=["0.0.9", "0.0.9+g1a2b3c4"])
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An older version, which the command line lays."""
    version = str(request.param)
    monkeypatch.setattr(cli, "ROOT", mini.overlay(tmp_path / "older", version=version).root)
    return version


@pytest.mark.parametrize("partial", [False, True])
def test_a_newer_version_is_replaced_with_the_flag_alone(
    site: Path, older: str, partial: bool
) -> None:
    if partial:
        (site / PACKAGE / "a.py").unlink()
    before = snapshot(site)
    for command in (["apply"], ["apply", "--dry-run"], ["verify"]):
        message = run(*command, "--site", site, code=Exit.FOREIGN).stderr
        assert f"by overlay 0.0.10; this is {older}, which is older" in message
        assert " --allow-downgrade` replaces it with this one" in message
        assert snapshot(site) == before
    for name in ("status", "doctor"):
        assert "--allow-downgrade`" in run(name, "--site", site, code=Exit.FOREIGN).stdout
    report = json.loads(run("apply", "--site", site, "--json").stdout)
    assert report["error"]["name"] == "foreign"
    run("apply", "--site", site, "--allow-downgrade", "--dry-run", code=Exit.DONE)
    assert snapshot(site) == before
    done = run("apply", "--site", site, "--allow-downgrade", code=Exit.DONE)
    assert f"replaces overlay 0.0.10 with overlay {older}" in done.stdout
    for name in ("verify", "apply"):
        run(name, "--site", site, code=Exit.DONE)


def test_a_newer_version_is_taken_off_without_it(site: Path, older: str) -> None:
    run("revert", "--site", site, code=Exit.DONE)
    run("apply", "--site", site, code=Exit.DONE)


@pytest.mark.parametrize("version", ["0.0.10+g1a2b3c4", "0.0.10", "0.1"])
@pytest.mark.parametrize("installed", ["0.0.10", "0.0.10+g9"])
def test_another_commit_of_a_version_and_a_newer_one_need_no_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, version: str
) -> None:
    site = mini.install(tmp_path / "site")
    for number, one in enumerate((installed, version)):
        ours = mini.overlay(tmp_path / f"{number}", version=one)
        monkeypatch.setattr(cli, "ROOT", ours.root)
        run("apply", "--site", site, code=Exit.DONE)
