"""The messages: what is wrong, where, and the next step."""

import json
import os
from pathlib import Path

import pytest
from overlay import cli
from overlay.errors import Exit
from overlay.pin import PACKAGE
from overlay.source import Overlay
from support import mini
from support.mini import RELEASE
from support.sites import OVERLAY, run, snapshot

ONE, TWO = mini.PRISTINE


def test_the_first_foreign_file_is_named_and_the_others_are_counted(site: Path) -> None:
    for path in (ONE, TWO):
        (site / path).write_text("")
    refused = run("apply", "--site", site, code=Exit.FOREIGN)
    reason = "is neither upstream's nor the overlay's (and 1 more)"
    assert f"{site / ONE}: {reason}" in refused.stderr


def test_another_release_is_refused_unless_its_files_are_the_same(site: Path) -> None:
    mini.state_version(site, "99.1")
    assert run("apply", "--site", site, "--dry-run").returncode == Exit.DONE
    (site / ONE).write_text("")
    for command in ("apply", "verify"):
        refused = run(command, "--site", site, code=Exit.RELEASE)
        assert f"is not the file of vLLM {RELEASE}; this is vllm 99.1" in refused.stderr


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["verify", "--json"]])
def test_a_name_that_is_no_text_is_named_all_the_same(site: Path, command: list[str]) -> None:
    run("apply", "--site", site)
    (site / PACKAGE / os.fsdecode(b"\xff")).touch()
    done = run(*command, "--site", site, code=Exit.FOREIGN)
    assert "xff" in done.stdout or "udcff" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["revert", "--wait="], "argument --wait: invalid float value: ''"),
        (["apply", "--extra=a", "--extra=b"], "argument --extra: is given twice: a and b"),
        (["status", "--site=a", "--site", "a"], "argument --site: is given twice: a and a"),
        (["apply", "--venv=a", "--venv=b"], "argument --venv: is given twice: a and b"),
        (["apply", "--python=a", "--python=b"], "argument --python: is given twice: a and b"),
    ],
)
def test_wrong_arguments_are_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == Exit.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--version"], ["--version", "status"]])
def test_the_version_of_this_copy_is_printed(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(given)
    assert not caught.value.code
    assert (
        capsys.readouterr().out == f"overlay {OVERLAY.pin.overlay} for vLLM {OVERLAY.pin.release}\n"
    )


def test_a_damaged_copy_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == Exit.FAULT
    assert f"{tmp_path}/VERSION_PIN: cannot be read" in capsys.readouterr().err


def findings(site: Path) -> dict[str, str]:
    """Return doctor's findings by subject; where a subject has several, the last."""
    done = run("doctor", "--site", site, "--json")
    message = json.loads(done.stdout)
    assert message["code"] == done.returncode
    return {each["about"]: each["text"] for each in message["findings"]}


def test_doctor_says_what_apply_would_do_and_does_nothing(site: Path, worded: Overlay) -> None:
    before = snapshot(site)
    count = len(worded.targets) + len(worded.added)
    found = findings(site)
    assert found["apply"] == f"of overlay {worded.pin.overlay} would change {count} files"
    assert str(site) in found["vLLM"]
    assert snapshot(site) == before
    run("apply", "--site", site)
    assert findings(site)["apply"].endswith("has nothing to do")


def test_doctor_ends_as_apply_would_and_names_the_file(site: Path) -> None:
    (site / ONE).write_bytes(b"# mine\n")
    done = run("doctor", "--site", site)
    assert done.returncode == run("apply", "--site", site).returncode == Exit.FOREIGN
    assert ONE in done.stdout.splitlines()[-1]
    assert done.stderr == ""
