"""`overlay exec`: verify, then become the command."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from overlay import cli
from overlay.errors import Exit
from support import mini
from support.sites import REPO, run, script

TOOL = [sys.executable, str(REPO / "scripts" / "overlay")]
SHOW = "import os, sys; print(os.getpid(), sys.argv[1:], sys.stdin.read(), os.environ.get('A'))"


@pytest.fixture
def overlaid(site: Path) -> Path:
    assert run("apply", "--site", site).returncode == Exit.DONE
    return site


def execute(site: Path, *command: str, flags: tuple[str, ...] = (), **options: Any) -> Any:
    line = [*TOOL, "exec", "--site", str(site), *flags, "--", *command]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_the_command_takes_the_process_its_streams_and_its_arguments(overlaid: Path) -> None:
    """Signals and the exit code are therefore the command's."""
    arguments = ("--json", "--venv", "x y", "--", "*")
    child = execute(
        overlaid,
        *(sys.executable, "-c", SHOW, *arguments),
        flags=("--json",),
        stdin=subprocess.PIPE,
        env=os.environ | {"A": "b"},
    )
    out, err = child.communicate("input")
    assert (out, err) == (f"{child.pid} {list(arguments)} input b\n", "")


def test_without_a_command_it_says_how_to_name_one(overlaid: Path, tmp_path: Path) -> None:
    """As it stands, from any directory, and for the installation that was named."""
    for words in (["--"], []):
        command = [*TOOL, "exec", "--site", str(overlaid), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == Exit.USAGE
    (line,) = re.findall("`(.* -- vllm serve MODEL)`$", done.stderr.strip())
    script(tmp_path / "vllm", 'echo served "$@"')
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    served = subprocess.check_output(line, shell=True, text=True, cwd=tmp_path, env=env)
    assert served == "served serve MODEL\n"


def test_no_signal_is_ignored_that_was_not(overlaid: Path) -> None:
    command = ["grep", "SigIgn", "/proc/self/status"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert execute(overlaid, *command).communicate() == (alone, "")


@pytest.mark.parametrize("command", ["no-such-command-here", "/etc/hostname", "/"])
def test_a_command_that_cannot_be_started_is_named(overlaid: Path, command: str) -> None:
    child = execute(overlaid, command)
    out, err = child.communicate()
    assert (child.returncode, out) == (Exit.USAGE, "")
    assert f"{command}: cannot be started: " in err


@pytest.mark.parametrize("interpreter", ["/nonexistent/python", "/usr/bin/env -S nonexistent"])
def test_the_first_command_on_path_is_started_or_none(
    overlaid: Path, tmp_path: Path, interpreter: str
) -> None:
    """A dead one is not passed over for that of another environment."""
    dead = script(tmp_path / "first" / "serve", "")
    dead.write_text(f"#!{interpreter}\n")
    script(tmp_path / "second" / "serve", f"touch {tmp_path / 'started'}")
    path = f"{dead.parent}:{tmp_path / 'second'}:{os.environ['PATH']}"
    child = execute(overlaid, "serve", env=os.environ | {"PATH": path})
    _, err = child.communicate()
    assert not (tmp_path / "started").exists()
    if "env" in interpreter:  # It was started, and says so itself.
        assert child.returncode == 127
        return
    assert child.returncode == Exit.USAGE
    assert f"{dead}: cannot be started: the interpreter in its first line does not exist" in err


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
    child = execute(overlaid, "serve", env=os.environ | {"PATH": path})
    assert child.communicate() == (shell.stdout, "")


def test_a_command_of_the_verified_environment_goes_before_path(tmp_path: Path, site: Path) -> None:
    assert run("apply", "--site", site, "--force").returncode == Exit.DONE
    python = script(tmp_path / "own" / "serve", "echo own").with_name("python")
    python.symlink_to(sys.executable)
    script(tmp_path / "first" / "serve", "echo other")
    env = os.environ | {"PATH": f"{tmp_path / 'first'}:{os.environ['PATH']}"}
    for flags, output in (((), "other\n"), (("--python", str(python)), "own\n")):
        assert execute(site, "serve", flags=flags, env=env).communicate() == (output, "")


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_READINESS", "-penalities"), ("VLLM_READINESS_SLOTS", "many")]
)
def test_a_wrong_variable_is_refused_in_one_line_before_the_command(
    overlaid: Path, tmp_path: Path, name: str, value: str
) -> None:
    started = tmp_path / "started"
    env = os.environ | {name: value}
    for flags in ((), ("--dry-run",), ("--json",)):
        child = execute(overlaid, "touch", str(started), flags=flags, env=env)
        out, err = child.communicate(timeout=30)
        assert (child.returncode, out) == (Exit.USAGE, "")
        assert err.startswith(f"overlay exec: {name}={value!r}: ")
        assert err.count("\n") == 1
        assert not started.exists()
    assert "Did you mean VLLM_READINESS=-penalties?" in err or name != "VLLM_READINESS"


def test_a_dry_run_verifies_and_starts_nothing(overlaid: Path, tmp_path: Path) -> None:
    child = execute(overlaid, "touch", str(tmp_path / "started"), flags=("--dry-run",))
    assert child.communicate() == ("", "")
    assert child.returncode == Exit.DONE
    assert not (tmp_path / "started").exists()


def test_what_was_started_is_seen_as_serving(tmp_path: Path) -> None:
    """A process that exec became is the command, and no longer a run of the tool."""
    overlay, site = mini.overlay(tmp_path / "ours"), mini.install(tmp_path / "site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "ROOT", overlay.root)
        assert cli.main(["apply", "--site", str(site)]) == Exit.DONE
        start = "import sys; sys.path.insert(0, sys.argv[1]); from overlay import cli; "
        start += "from pathlib import Path; cli.ROOT = Path(sys.argv[2]); cli.main(sys.argv[3:])"
        tool = [sys.executable, "-c", start, str(REPO / "scripts"), str(overlay.root)]
        held = f"open({str(site / 'vllm/one.py')!r})"
        serve = f"import time; held = {held}; print('up', flush=True); time.sleep(60)"
        command = ["exec", "--site", str(site), "--", sys.executable, "-c", serve]
        child = subprocess.Popen([*tool, *command], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            assert cli.main(["revert", "--site", str(site)]) == Exit.BUSY
        finally:
            child.kill()
            child.communicate()
