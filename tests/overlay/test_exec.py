"""`overlay exec`: verify, then become the command."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit
from support.sites import run, script, tool

SHOW = "import os, sys; print(os.getpid(), sys.argv[1:], sys.stdin.read(), os.environ.get('A'))"


@pytest.fixture
def overlaid(site: Path) -> Path:
    assert run("apply", "--site", site).returncode == Exit.DONE
    return site


def execute(site: Path, *command: str, flags: tuple[str, ...] = (), **env: str) -> Any:
    """Run a command by `exec`, in a process with these variables."""
    return run("exec", "--site", site, *flags, "--", *command, env=env)


def printed(site: Path, *command: str, flags: tuple[str, ...] = (), **env: str) -> str:
    """The output of a command that has to print nothing on stderr."""
    done = execute(site, *command, flags=flags, **env)
    assert done.stderr == ""
    return str(done.stdout)


def test_the_command_takes_the_process_its_streams_and_its_arguments(overlaid: Path) -> None:
    """Signals and the exit code are therefore the command's."""
    arguments = ("--json", "--venv", "x y", "--", "*")
    line = [
        sys.executable,
        str(tool()),
        "exec",
        "--site",
        str(overlaid),
        "--json",
        "--",
        sys.executable,
        "-c",
        SHOW,
    ]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen([*line, *arguments], text=True, env=os.environ | {"A": "b"}, **pipes)
    assert child.communicate("input") == (f"{child.pid} {list(arguments)} input b\n", "")


def test_without_a_command_it_says_how_to_name_one(overlaid: Path, tmp_path: Path) -> None:
    """As it stands, from any directory, and for the installation that was named."""
    for words in (["--"], []):
        done = run("exec", "--site", overlaid, *words, cwd=tmp_path, code=Exit.USAGE)
    (line,) = re.findall("`(.* -- vllm serve MODEL)`$", done.stderr.strip())
    script(tmp_path / "vllm", 'echo served "$@"')
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    served = subprocess.check_output(line, shell=True, text=True, cwd=tmp_path, env=env)
    assert served == "served serve MODEL\n"


def test_no_signal_is_ignored_that_was_not(overlaid: Path) -> None:
    command = ["grep", "SigIgn", "/proc/self/status"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed(overlaid, *command) == alone


@pytest.mark.parametrize("command", ["no-such-command-here", "/etc/hostname", "/"])
def test_a_command_that_cannot_be_started_is_named(overlaid: Path, command: str) -> None:
    done = execute(overlaid, command)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert f"{command}: cannot be started: " in done.stderr


@pytest.mark.parametrize("interpreter", ["/nonexistent/python", "/usr/bin/env -S nonexistent"])
def test_the_first_command_on_path_is_started_or_none(
    overlaid: Path, tmp_path: Path, interpreter: str
) -> None:
    """A dead one is not passed over for that of another environment."""
    dead = script(tmp_path / "first" / "serve", "")
    dead.write_text(f"#!{interpreter}\n")
    script(tmp_path / "second" / "serve", f"touch {tmp_path / 'started'}")
    path = f"{dead.parent}:{tmp_path / 'second'}:{os.environ['PATH']}"
    done = execute(overlaid, "serve", PATH=path)
    assert not (tmp_path / "started").exists()
    if "env" in interpreter:  # It was started, and says so itself.
        assert done.returncode == 127
        return
    assert done.returncode == Exit.USAGE
    reason = "cannot be started: the interpreter in its first line does not exist"
    assert f"{dead}: {reason}" in done.stderr


def test_what_is_no_command_is_passed_over_as_a_shell_does(overlaid: Path, tmp_path: Path) -> None:
    data = script(tmp_path / "first" / "serve", "data")
    data.chmod(0o644)
    (tmp_path / "folder" / "serve").mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "serve").symlink_to("nowhere")
    good = script(tmp_path / "second" / "serve", "echo started")
    folders = [tmp_path / "none", data.parent, tmp_path / "folder", tmp_path / "link", good.parent]
    path = ":".join(map(str, folders))
    shell = subprocess.run(
        ["/bin/sh", "-c", "serve"], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert printed(overlaid, "serve", PATH=path) == shell.stdout


def test_a_command_of_the_verified_environment_goes_before_path(tmp_path: Path, site: Path) -> None:
    assert run("apply", "--site", site, "--force").returncode == Exit.DONE
    python = script(tmp_path / "own" / "serve", "echo own").with_name("python")
    python.symlink_to(sys.executable)
    script(tmp_path / "first" / "serve", "echo other")
    path = f"{tmp_path / 'first'}:{os.environ['PATH']}"
    for flags, output in (((), "other\n"), (("--python", str(python)), "own\n")):
        assert printed(site, "serve", flags=flags, PATH=path) == output


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_READINESS", "-penalities"), ("VLLM_READINESS_SLOTS", "many")]
)
def test_a_wrong_variable_is_refused_in_one_line_before_the_command(
    real: Path, tmp_path: Path, name: str, value: str
) -> None:
    run("apply", "--site", real, code=Exit.DONE)
    started = tmp_path / "started"
    for flags in ((), ("--dry-run",), ("--json",)):
        done = execute(real, "touch", str(started), flags=flags, **{name: value})
        assert (done.returncode, done.stdout) == (Exit.USAGE, "")
        assert done.stderr.startswith(f"overlay exec: {name}={value!r}: ")
        assert done.stderr.count("\n") == 1
        assert not started.exists()
    assert "Did you mean VLLM_READINESS=-penalties?" in done.stderr or name != "VLLM_READINESS"


def test_a_dry_run_verifies_and_starts_nothing(overlaid: Path, tmp_path: Path) -> None:
    done = execute(overlaid, "touch", str(tmp_path / "started"), flags=("--dry-run",))
    assert (done.returncode, done.stdout, done.stderr) == (Exit.DONE, "", "")
    assert not (tmp_path / "started").exists()
