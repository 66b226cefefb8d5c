"""What a message advises is run as it stands, and has to do what the message says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from overlay import hints
from overlay.errors import Exit
from overlay.pin import PACKAGE
from overlay.source import Overlay
from support import mini, sites
from support.sites import REPO, run, snapshot

LEAVE = "--leave=vllm/v1/two.py"
TOOL = f"python3 {REPO}/scripts/overlay"
ONE = "vllm/one.py"


def nothing(site: Path) -> None:
    """Leave it as it is."""


def cut(site: Path) -> None:
    (site / PACKAGE / "a.py").unlink()


def edit(site: Path) -> None:
    with (site / ONE).open("ab") as file:
        file.write(b"# mine\n")


def no_patch(site: Path) -> None:
    edit(site)
    shutil.rmtree(site / PACKAGE / "provenance" / "patches")


#: Options of the `apply` before, if any, the damage then, and the commands that fail.
CASES: list[tuple[list[str] | None, Callable[[Path], None], list[str]]] = [
    (None, nothing, ["verify"]),
    ([], cut, ["verify", "status"]),
    ([], edit, ["apply", "verify", "revert"]),
    ([], no_patch, ["verify"]),
    ([LEAVE], cut, ["verify"]),
    ([LEAVE], edit, ["verify", "revert"]),
]


@pytest.mark.parametrize(("laid", "damage", "commands"), CASES)
def test_the_advice_does_what_it_says(
    tmp_path: Path,
    worded: Overlay,
    laid: list[str] | None,
    damage: Callable[[Path], None],
    commands: list[str],
) -> None:
    """With the options of the installed part, of which the advice reminds."""
    site = mini.install(tmp_path / "site")
    states = {"revert": snapshot(site)}
    options = laid or []
    if laid is not None:
        run("apply", "--site", site, *options, code=Exit.DONE)
        states["apply"] = snapshot(site)
    damage(site)
    for number, command in enumerate(commands):
        done = run(command, "--site", site)
        assert done.returncode != Exit.DONE
        text = done.stdout + done.stderr
        advised = [shlex.split(line) for line in re.findall(r"`([^`]+)`", text)]
        assert "apply" in {words[2] for words in advised}, text
        assert (" with its --leave or --extra" in text) is bool(options)
        for program, tool, name, *rest in advised:
            assert (program, tool, rest) == ("python3", TOOL.split()[1], [f"--site={site}"])
            again = Path(shutil.copytree(site, tmp_path / f"{number} {name}", symlinks=True))
            if "reinstall vllm" in text:
                shutil.rmtree(again)
                mini.install(again)
            more = options if name == "apply" else []
            run(name, "--site", again, *more, code=Exit.DONE)
            assert snapshot(again) == states.get(name, snapshot(again)), text


#: From the directory of the checkout.
STARTS = {
    "make": "make --no-print-directory --silent verify SITE={site}",
    "python3": "python3 scripts/overlay verify --site={site}",
    "module": "PYTHONPATH=scripts python3 -m overlay verify --site={site}",
}


@pytest.mark.parametrize("start", STARTS)
def test_the_advice_runs_however_it_was_started(site: Path, tmp_path: Path, start: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in sites.AMBIENT}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}

    def shell(line: str, where: Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-c", line], cwd=where, env=env, capture_output=True, text=True, check=False
        )

    line = STARTS[start].format(site=site)
    (advice,) = re.findall(r"next: run `([^`]+)`", shell(line, sites.tool().parents[1]).stderr)
    done = shell(advice, tmp_path)
    assert done.returncode == 0, done.stderr
    assert run("verify", "--site", site).returncode == Exit.DONE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`apply --leave=a`", f"`{TOOL} apply --venv=d --leave=a`"),
        ("`apply --venv=DIR`", f"`{TOOL} apply --venv=DIR`"),
        ("omit --extra=", "omit --extra="),
        ("`patch -p1`", "`patch -p1`"),
    ],
)
def test_commands_are_written_for_the_user(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setattr(hints, "target", ["--venv=d"])
    assert hints.written(text) == expected
