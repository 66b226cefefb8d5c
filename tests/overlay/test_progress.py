"""A slow run says on the terminal what it is doing, and leaves nothing of that behind."""

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from overlay.errors import Exit
from support import sites
from support.sites import REPO

TOOL = [sys.executable, str(REPO / "scripts" / "overlay")]
#: As the page says: nothing in the first second.
SLOW = 1.8


def screen(drawn: str) -> list[str]:
    """The lines that a terminal shows in the end, which knows the one sequence that is used."""
    lines = [re.sub(r"^.*\x1b\[K", "", line.rstrip("\r")) for line in drawn.split("\n")]
    assert not [line for line in lines if "\r" in line or "\x1b" in line]
    return [line for line in lines if line]


def steps(drawn: str) -> list[str]:
    return re.findall(r"\r\x1b\[K([^\r\n]+ \(\d+ s\))", drawn)


class Terminal:
    """A real pseudo-terminal, and the tool that runs in it."""

    def __init__(self, *arguments: object, stderr: int | None = None, columns: int = 300) -> None:
        ours, theirs = pty.openpty()
        subprocess.run(["stty", "columns", str(columns)], stdin=theirs, check=True)
        left_out = (*sites.AMBIENT, "PYTHONUNBUFFERED")
        env = {k: v for k, v in os.environ.items() if k not in left_out} | {"TERM": "xterm"}
        self.child = subprocess.Popen(
            [*TOOL, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if stderr is None else stderr,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self._ours = ours

    def end(self) -> tuple[int, str]:
        """Wait for the tool. Returns: its exit code, and all that was written."""
        written = b""
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # Nobody has the other end any more.
                break
            if not data:
                break
            written += data
        os.close(self._ours)
        return self.child.wait(), written.decode()


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A Python that takes its time."""
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nsleep {SLOW}\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return file


def test_a_slow_run_says_what_it_does_on_one_line(site: Path, slow: Path) -> None:
    code, drawn = Terminal("apply", "--site", site, "--python", slow).end()
    assert code == Exit.DONE
    said = steps(drawn)
    assert any(
        line.startswith(f"overlay apply: querying the import path of {slow}") for line in said
    )
    assert any("compiling 1" in line and "modules with" in line for line in said)
    shown = screen(drawn)
    assert len(shown) == 2
    assert shown[0].startswith(f"{site}: ")
    assert "files overlaid" in shown[1]


def test_a_wait_for_another_run_is_one(site: Path) -> None:
    handle = os.open(site, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    terminal = Terminal("apply", "--site", site, "--wait", SLOW)
    code, drawn = terminal.end()
    os.close(handle)
    assert code == Exit.BUSY
    assert any(f"waiting for another run in {site}" in line for line in steps(drawn))
    assert screen(drawn)[0].startswith(f"overlay apply: {site}: another run holds the lock")


def test_a_quick_run_says_nothing_of_it(site: Path) -> None:
    code, drawn = Terminal("status", "--site", site).end()
    assert code == Exit.DONE
    assert "\x1b" not in drawn


def test_nothing_is_drawn_for_programs(site: Path, slow: Path, tmp_path: Path) -> None:
    command = ("apply", "--site", site, "--python", slow)
    code, drawn = Terminal(*command, "--dry-run", "--json").end()
    assert code == Exit.DONE
    assert drawn.startswith("{")
    with (tmp_path / "stderr").open("w") as file:
        code, drawn = Terminal(*command, stderr=file.fileno()).end()
        assert code == Exit.DONE
        assert "\x1b" not in drawn
    assert (tmp_path / "stderr").read_text() == ""


def test_a_narrow_terminal_wraps_no_line(site: Path, slow: Path) -> None:
    _, drawn = Terminal("verify", "--site", site, "--python", slow, columns=40).end()
    assert steps(drawn)
    assert max(map(len, steps(drawn))) == 39


def test_the_command_of_exec_finds_the_line_gone(site: Path, slow: Path) -> None:
    assert sites.run("apply", "--site", site).returncode == Exit.DONE
    target = ("--site", site, "--python", slow)
    code, drawn = Terminal("exec", *target, "--", "echo", "serves").end()
    assert code == 0
    assert steps(drawn)
    assert drawn.endswith("\r\x1b[Kserves\r\n")


def test_ctrl_c_leaves_one_line(site: Path, slow: Path) -> None:
    terminal = Terminal("apply", "--site", site, "--python", slow)
    time.sleep(1.5)
    terminal.child.send_signal(signal.SIGINT)
    code, drawn = terminal.end()
    assert code == 130
    assert steps(drawn)
    assert screen(drawn) == ["overlay apply: interrupted; `status` shows the state"]
