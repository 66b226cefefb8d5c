"""The digest that apply gives: told before the run, of every kind of installation."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from overlay.errors import Exit
from overlay.pin import PACKAGE
from overlay.source import Overlay
from support import mini
from support.sites import run, status

LEAVE = "--leave=vllm/v1/two.py"


def stock(folder: Path) -> Path:
    return mini.install(folder / "site")


def cut(folder: Path) -> Path:
    site = whole(folder)
    (site / PACKAGE / "a.py").unlink()
    return site


def whole(folder: Path) -> Path:
    site = stock(folder)
    run("apply", "--site", site, code=Exit.DONE)
    return site


def part(folder: Path) -> Path:
    site = stock(folder)
    run("apply", "--site", site, LEAVE, code=Exit.DONE)
    return site


CHOICES: Sequence[Sequence[str]] = ([], [LEAVE], ["--extra=mine"])


@pytest.mark.parametrize("options", CHOICES, ids=" ".join)
@pytest.mark.parametrize("laid", [stock, cut, whole, part, mini.older])
def test_dry_run_and_doctor_print_the_digest_that_apply_gives(
    tmp_path: Path,
    worded: Overlay,
    monkeypatch: pytest.MonkeyPatch,
    laid: Callable[[Path], Path],
    options: Sequence[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    mini.extra(tmp_path / "mine")
    site = laid(tmp_path)

    def printed(command: str, *flags: str) -> str:
        return run(command, "--site", site, *options, *flags, code=Exit.DONE).stdout

    before = status(site)["digest"]
    dry = printed("apply", "--dry-run").splitlines()[-1]
    dry_json = json.loads(printed("apply", "--dry-run", "--json"))
    doctor = printed("doctor").splitlines()
    assert status(site)["digest"] == before
    applied = printed("apply").splitlines()[-1]
    digest = status(site)["digest"]
    assert applied == f"digest: {digest}"
    assert dry == f"digest after apply: {digest}"
    assert f"digest    after apply: {digest}" in doctor
    again = json.loads(printed("apply", "--json"))
    assert dry_json["digest_after"] == again["digest_after"] == again["digest"] == digest
    reverted = run("revert", "--site", site, "--json", code=Exit.DONE)
    assert json.loads(reverted.stdout)["digest_after"] is None


@pytest.mark.parametrize("options", CHOICES, ids=" ".join)
@pytest.mark.parametrize("again", [True, False])
def test_verify_and_exec_require_the_digest(
    tmp_path: Path,
    worded: Overlay,
    monkeypatch: pytest.MonkeyPatch,
    options: Sequence[str],
    again: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    mini.extra(tmp_path / "mine")
    site = stock(tmp_path)
    run("apply", "--site", site, *options, code=Exit.DONE)
    digest, asked = status(site)["digest"], options if again else []
    target = ["--site", site, *asked, "--digest"]
    for command, behind in (("verify", []), ("exec", ["--dry-run", "--", "true"])):
        for given in (digest, digest.upper()):
            assert run(command, *target, given, *behind, code=Exit.DONE).stdout == ""
        refused = run(command, *target, "0" * 64, *behind, code=Exit.DIGEST)
        (line,) = refused.stderr.splitlines()
        assert f"its digest is {digest}, not {'0' * 64}; next: apply the version" in line
    report = json.loads(run("verify", *target, "0" * 64, "--json", code=10).stdout)
    assert (report["code"], report["error"]["name"]) == (Exit.DIGEST, "digest")
    assert (report["state"], report["digest"]) == ("overlaid", digest)
    assert (report["error"]["expected"], report["error"]["found"]) == (
        f"digest {'0' * 64}",
        f"digest {digest}",
    )


def test_a_digest_of_what_is_not_whole_is_no_matter(tmp_path: Path, worded: Overlay) -> None:
    """Its own exit code has the reason."""
    site = cut(tmp_path)
    for code in (Exit.PARTIAL, Exit.PRISTINE):
        report = status(site)
        run("verify", "--site", site, "--digest", report["digest"], code=code)
        run("revert", "--site", site, code=Exit.DONE)


@pytest.mark.parametrize("digest", ["", "0" * 12, "0" * 63, "0" * 65, "g" * 64, "٠" * 64])
def test_a_malformed_digest_is_a_usage_error(tmp_path: Path, worded: Overlay, digest: str) -> None:
    site = whole(tmp_path)
    for command, behind in (("verify", []), ("exec", ["--", "false"])):
        refused = run(command, "--site", site, f"--digest={digest}", *behind, code=Exit.USAGE)
        assert f"--digest={digest} is not a digest" in refused.stderr
    report = run("verify", "--site", site, f"--digest={digest}", "--json", code=2)
    assert json.loads(report.stdout)["error"]["name"] == "usage"
