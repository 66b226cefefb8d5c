"""The tool's output and exit code, wherever the output goes."""

import json
import os
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from overlay.errors import Exit
from overlay.pin import PACKAGE
from overlay.source import Overlay
from support import interrupts, mini, sites
from support.sites import run, snapshot

COMMANDS = ["apply", "status --json", "revert", "--help"]


def shell(command: str, site: Path) -> "subprocess.CompletedProcess[bytes]":
    """The tool with shell redirections around it, and SITE for the installation."""
    tool = shlex.join([sys.executable, str(sites.tool())])
    env = {k: v for k, v in os.environ.items() if k not in sites.AMBIENT}
    return subprocess.run(
        ["/bin/bash", "-c", command.replace("overlay", tool, 1)],
        capture_output=True,
        check=False,
        env=env | {"SITE": str(site)},
    )


@pytest.mark.parametrize(
    "locale",
    [
        {"PYTHONIOENCODING": "ascii:strict"},
        {"PYTHONIOENCODING": "utf-8:strict"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_no_encoding_is_too_small(tmp_path: Path, worded: Overlay, locale: dict[str, str]) -> None:
    folder = tmp_path / os.fsdecode("größer …\N{SNOWMAN} ".encode() + b"\xff")
    site = mini.install(folder / "site")
    for command in ("apply", "apply", "status", "revert"):
        done = run(command, "--site", site, env=locale, errors="replace")
        assert (done.returncode, done.stderr) == (Exit.DONE, "")
        assert done.stdout.count("/site: vllm") == 1
    refused = run("status", "--site", folder / "none", env=locale, errors="replace")
    assert refused.returncode == Exit.USAGE
    assert "does not exist" in refused.stderr
    done = json.loads(run("status", "--site", site, "--json", env=locale).stdout)
    assert os.fsencode(done["site"]) == os.fsencode(site)


def test_a_diff_is_the_bytes_of_the_files(site: Path) -> None:
    plain = run("diff", "--site", site).stdout
    small = shell('PYTHONIOENCODING=ascii overlay diff --site "$SITE"', site)
    assert (small.returncode, small.stderr) == (0, b"")
    assert small.stdout == plain.encode()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", [">&-", ">/dev/full", "1</dev/null"])
def test_a_report_that_cannot_be_printed_changes_no_exit_code(
    site: Path, command: str, where: str
) -> None:
    if command == "revert":
        run("apply", "--site", site)
    target = "" if command == "--help" else '--site "$SITE"'
    done = shell(f"overlay {command} {target} {where}", site)
    assert done.returncode == Exit.DONE, done.stderr
    assert done.stderr.startswith(b"overlay: the output could not be written: ")
    assert done.stderr.count(b"\n") == 1
    if command in ("apply", "revert"):
        done_so = Exit.PRISTINE if command == "revert" else Exit.DONE
        assert run("verify", "--site", site).returncode == done_so


def test_the_code_of_a_refusal_holds_too(site: Path) -> None:
    (site / "vllm" / "one.py").write_text("")
    for command in ("status", "verify", "verify --json", "apply --json"):
        for where in (">/dev/full", "2>/dev/full", ">&- 2>&-", "| true; exit ${PIPESTATUS[0]}"):
            done = shell(f'overlay {command} --site "$SITE" {where}', site)
            assert done.returncode == Exit.FOREIGN, (command, where, done.stderr)
            assert b"Traceback" not in done.stderr
            assert b"Exception" not in done.stderr


def test_a_diff_that_cannot_be_written_is_not_done(site: Path) -> None:
    """The output is the whole result of `diff`."""
    for more in ("", "--json"):
        done = shell(f'overlay diff {more} --site "$SITE" >/dev/full', site)
        assert done.returncode == Exit.DENIED
        assert done.stderr.count(b"\n") == 1
        seen = shell(
            f'overlay diff {more} --site "$SITE" | head -c 9; exit ${{PIPESTATUS[0]}}', site
        )
        assert (seen.returncode, seen.stderr) == (Exit.DONE, b"")
        assert len(seen.stdout) == 9


def test_no_file_of_the_installation_takes_the_place_of_a_closed_stream(
    site: Path, tmp_path: Path
) -> None:
    """Otherwise the program's output would be written into it."""
    other = mini.install(tmp_path / "other")
    # Another test may serve by this interpreter, and the installation seem to be in use.
    apply = f'overlay apply --force --site "$SITE" --python {shlex.quote(sys.executable)}'
    assert shell(apply, other).returncode == 0
    closed = shell(f"{apply} <&- >&- 2>&-", site)
    assert closed.returncode == 0
    assert snapshot(site) == snapshot(other)
    assert set(snapshot(site, bytecode=True)) == set(snapshot(other, bytecode=True))


def test_a_slow_reader_that_does_not_block_gets_everything(real: Path) -> None:
    whole = run("diff", "--site", real).stdout.encode()
    assert len(whole) > 1 << 16, "the pipe is never full"
    read, write = os.pipe()
    os.set_blocking(write, False)
    command = [sys.executable, str(sites.tool()), "diff", "--site", str(real)]
    with subprocess.Popen(command, stdout=write) as child:
        os.close(write)
        with os.fdopen(read, "rb") as file:
            select.select([file], [], [])
            time.sleep(0.5)  # The pipe is full by then.
            got = file.read()
    assert child.returncode == 0
    assert got == whole


def test_names_cannot_fake_a_report(tmp_path: Path, worded: Overlay) -> None:
    forged = "x\n  overlaid  vllm/one.py\r\x1b[2J\x9b2J\u202e\u2028\x07"
    site = mini.install(tmp_path / f"site{forged.replace('/', '')}")
    metadata = site / mini.INFO / "METADATA"
    version = f"Version: {mini.RELEASE}"
    text = metadata.read_text().replace(version, f"{version}\x1b[2J\x9b\u202e")
    metadata.write_text(text.replace("Name: vllm", "Name: vllm\x1b]0;\x07", 1))
    run("apply", "--site", site)
    stranger = site / PACKAGE / forged.replace("/", "")
    stranger.write_text("")
    for arguments in (
        ["status"],
        ["status", "--verbose"],
        ["verify"],
        ["apply"],
        ["revert"],
        ["status", "--python", forged],
    ):
        done = run(*arguments, *(["--site", site] if "--python" not in arguments else []))
        assert done.returncode == (Exit.USAGE if "--python" in arguments else Exit.FOREIGN)
        printed = done.stdout + done.stderr
        assert "\\x1b[2J" in printed
        assert printed.replace("\n", "").isprintable()
        assert printed.count("\n  overlaid  vllm/one.py") == ("--verbose" in arguments)
    exact = sites.status(site)
    assert str(stranger.relative_to(site)) in [file["path"] for file in exact["files"]]
    assert exact["distribution"] == "vllm\x1b]0;\x07"
    stranger.unlink()
    done = run("revert", "--site", site, code=Exit.DONE)
    assert done.stdout.replace("\n", "").isprintable()


def test_ctrl_c_at_any_import_is_told_in_one_line(site: Path, tmp_path: Path) -> None:
    before = snapshot(site)
    cut = 0
    for at in (*range(1, 8), *range(8, 500, 25)):
        done = run("status", "--site", site, env=interrupts.environment(tmp_path, at))
        if done.returncode == 0:
            break
        cut += 1
        assert done.returncode == 130
        assert done.stderr == "overlay: interrupted\n"
    assert cut > 7
    assert snapshot(site) == before


def test_ctrl_c_during_a_command_is_told_in_one_line(tmp_path: Path) -> None:
    python = sites.script(tmp_path / "python", "kill -INT $PPID; sleep 60")
    done = run("status", "--python", python, cwd="/")
    assert (done.returncode, done.stderr) == (130, "overlay: interrupted\n")
