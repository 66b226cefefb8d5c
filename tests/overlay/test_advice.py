"""What a message advises is run as it stands, and has to do what the message says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from overlay import cli, hints
from overlay.errors import Exit
from overlay.pin import PACKAGE
from overlay.source import Overlay
from support import mini, sites
from support.sites import REPO, run, snapshot

LEAVE = "--leave=vllm/v1/two.py"
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


class Case(NamedTuple):
    """A command that fails with an advice.

    Attributes:
        laid: the options of the `apply` before, or None for none.
        damage: what happens to the installation then.
        command: the command that fails.
        lays: the options of the `apply` that it should advise.
    """

    laid: Sequence[str] | None
    damage: Callable[[Path], None]
    command: Sequence[str]
    lays: Sequence[str]


EXTRA = "--extra=my own"
CHOICES: Sequence[Sequence[str]] = ([], [LEAVE], [EXTRA], [LEAVE, EXTRA])
CASES = [
    # Nothing is laid, or another part than the one that is asked for.
    *(Case(None, nothing, ["verify", *each], each) for each in CHOICES),
    *(Case([], nothing, ["verify", *each], each) for each in CHOICES[1:]),
    *(Case(each, nothing, ["verify", LEAVE, EXTRA], [LEAVE, EXTRA]) for each in CHOICES[:3]),
    # It was cut off: what is installed, or what is asked for.
    *(Case(each, cut, ["verify"], each) for each in CHOICES),
    *(Case(each, cut, ["status"], each) for each in CHOICES),
    *(Case(each, cut, ["verify", *each], each) for each in CHOICES),
    # A file was edited: vLLM is to be reinstalled first.
    *(Case(each, edit, [command], each) for each in CHOICES for command in ("verify", "revert")),
    *(Case(each, edit, ["verify", *each], each) for each in CHOICES),
    *(Case(each, edit, ["apply", LEAVE], [LEAVE]) for each in CHOICES),
    *(Case(each, edit, ["apply"], []) for each in CHOICES),
    *(Case(each, no_patch, ["verify"], each) for each in CHOICES[1:2]),
]


def advised(text: str, site: Path) -> list[list[str]]:
    """The commands in a text, each as its words behind the program and the target."""
    commands = [shlex.split(command) for command in re.findall(r"`([^`]+)`", text)]
    for words in commands:
        assert words[:2] == ["python3", str(REPO / "scripts" / "overlay")]
        words.remove(f"--site={site}")
    return [words[2:] for words in commands]


def names(case: Case) -> str:
    laid = "nothing" if case.laid is None else " ".join(case.laid) or "whole"
    return f"{laid}, {case.damage.__name__}, {' '.join(case.command)}"


@pytest.mark.parametrize("case", CASES, ids=names)
def test_the_advice_does_what_it_says(
    tmp_path: Path,
    worded: Overlay,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: Case,
) -> None:
    mini.extra(tmp_path / "my own")
    monkeypatch.chdir(tmp_path)
    site = mini.install(tmp_path / "site")
    pristine = snapshot(site)
    expected = mini.install(tmp_path / "expected")
    assert cli.main(["apply", "--site", str(expected), *case.lays]) == Exit.DONE
    if case.laid is not None:
        assert cli.main(["apply", "--site", str(site), *case.laid]) == Exit.DONE
    case.damage(site)
    capsys.readouterr()
    command, *options = case.command
    assert cli.main([command, "--site", str(site), *options]) != Exit.DONE
    text = "".join(capsys.readouterr())
    reverts = False
    commands = advised(text.replace("=DIR", "='my own'"), site)
    for number, words in enumerate(commands):
        assert words[0] in ("apply", "revert"), text
        again = Path(shutil.copytree(site, tmp_path / f"again {number}", symlinks=True))
        if "reinstall vllm" in text:
            shutil.rmtree(again)
            mini.install(again)
        assert cli.main([words[0], "--site", str(again), *words[1:]]) == Exit.DONE, text
        if words[0] == "revert":
            reverts = True
            assert snapshot(again) == pristine
            continue
        assert snapshot(again) == snapshot(expected), text
        asked = [] if command == "revert" else options
        assert cli.main(["verify", "--site", str(again), *asked]) == Exit.DONE
    assert "apply" in {words[0] for words in commands}, text
    assert reverts is (" revert --site=" in text)


TOOL = f"python3 {REPO}/scripts/overlay"
STARTS = {
    "make": "make --no-print-directory --silent verify SITE={site}",
    "python3": TOOL + " verify --site={site}",
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
    (advice,) = re.findall(r"next: run `([^`]+)`", shell(line, REPO).stderr)
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
