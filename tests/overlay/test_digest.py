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


CHOICES: Sequence[Sequence[str]] = ([], [LEAVE], ["--extra=mine"])


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


@pytest.mark.parametrize("options", CHOICES, ids=" ".join)
@pytest.mark.parametrize("again", [True, False])
def test_verify_and_exec_require_the_digest(
    tmp_path: Path,
    worded: Overlay,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    again: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    mini.extra(tmp_path / "mine")
    site = stock(tmp_path)
    assert cli.main(["apply", "--site", str(site), *options]) == Exit.DONE
    digest, asked = status(site)["digest"], options if again else []
    target = ["--site", site, *asked, "--digest"]
    capsys.readouterr()
    for command, behind in (("verify", []), ("exec", ["--dry-run", "--", "true"])):
        for given in (digest, digest.upper()):
            assert printed(capsys, command, *target, given, *behind) == ""
        assert cli.main([str(each) for each in (command, *target, "0" * 64, *behind)]) == 10
        (line,) = capsys.readouterr().err.splitlines()
        assert f"its digest is {digest}, not {'0' * 64}; next: apply the version" in line
    report = json.loads(printed(capsys, "verify", *target, "0" * 64, "--json", code=10))
    assert (report["code"], report["error"]["name"]) == (Exit.DIGEST, "digest")
    assert (report["state"], report["digest"]) == ("overlaid", digest)
    assert (report["error"]["expected"], report["error"]["found"]) == (
        f"digest {'0' * 64}",
        f"digest {digest}",
    )


def test_a_digest_of_what_is_not_whole_is_no_matter(
    tmp_path: Path, worded: Overlay, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own exit code has the reason."""
    site = cut(tmp_path)
    for code in (Exit.PARTIAL, Exit.PRISTINE):
        report = status(site)
        printed(capsys, "verify", "--site", site, "--digest", report["digest"], code=code)
        printed(capsys, "revert", "--site", site)


@pytest.mark.parametrize("digest", ["", "0" * 12, "0" * 63, "0" * 65, "g" * 64, "٠" * 64])
def test_a_malformed_digest_is_a_usage_error(
    tmp_path: Path, worded: Overlay, capsys: pytest.CaptureFixture[str], digest: str
) -> None:
    site = whole(tmp_path)
    for command, behind in (("verify", []), ("exec", ["--", "false"])):
        capsys.readouterr()
        assert cli.main([command, "--site", str(site), f"--digest={digest}", *behind]) == Exit.USAGE
        assert f"--digest={digest} is not a digest" in capsys.readouterr().err
    report = printed(capsys, "verify", "--site", site, f"--digest={digest}", "--json", code=2)
    assert json.loads(report)["error"]["name"] == "usage"
