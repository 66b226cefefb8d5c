"""The digest that apply gives: told before the run, of every kind of installation."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from overlay import cli
from overlay.errors import Exit
from overlay.pin import PACKAGE
from overlay.source import Overlay
from support import mini
from support.sites import status

LEAVE = "--leave=vllm/v1/two.py"


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """The standard output of a command, which has to exit with ``code``."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == code
    return capsys.readouterr().out


def stock(folder: Path) -> Path:
    return mini.install(folder / "site")


def cut(folder: Path) -> Path:
    site = whole(folder)
    (site / PACKAGE / "a.py").unlink()
    return site


def whole(folder: Path) -> Path:
    site = stock(folder)
    assert cli.main(["apply", "--site", str(site)]) == Exit.DONE
    return site


def part(folder: Path) -> Path:
    site = stock(folder)
    assert cli.main(["apply", "--site", str(site), LEAVE]) == Exit.DONE
    return site


CHOICES: Sequence[Sequence[str]] = ([], [LEAVE], ["--extra=mine"], [LEAVE, "--extra=mine"])


@pytest.mark.parametrize("options", CHOICES, ids=" ".join)
@pytest.mark.parametrize("laid", [stock, cut, whole, part, mini.older])
def test_dry_run_and_doctor_print_the_digest_that_apply_gives(
    tmp_path: Path,
    worded: Overlay,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    laid: Callable[[Path], Path],
    options: Sequence[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    mini.extra(tmp_path / "mine")
    site = laid(tmp_path)
    target = ["--site", site, *options]
    before = status(site)["digest"]
    dry = printed(capsys, "apply", *target, "--dry-run").splitlines()[-1]
    dry_json = json.loads(printed(capsys, "apply", *target, "--dry-run", "--json"))
    doctor = printed(capsys, "doctor", *target).splitlines()
    assert status(site)["digest"] == before
    applied = printed(capsys, "apply", *target).splitlines()[-1]
    digest = status(site)["digest"]
    assert applied == f"digest: {digest}"
    assert dry == f"digest after apply: {digest}"
    assert f"digest    after apply: {digest}" in doctor
    again = json.loads(printed(capsys, "apply", *target, "--json"))
    assert dry_json["digest_after"] == again["digest_after"] == again["digest"] == digest
    reverted = json.loads(printed(capsys, "revert", "--site", site, "--json"))
    assert reverted["digest_after"] is None
