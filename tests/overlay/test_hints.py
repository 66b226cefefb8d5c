"""A message names the command as the user started the tool, and runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from overlay import hints
from overlay.errors import Exit
from support import sites
from support.sites import REPO, run

TOOL = f"python3 {REPO}/scripts/overlay"
STARTS = {
    "make": "make --no-print-directory --silent verify SITE={site}",
    "python3": TOOL + " verify --site={site}",
    "module": "python3 -m overlay verify --site={site}",
}


@pytest.mark.parametrize("start", STARTS)
def test_the_advice_runs_as_it_stands(site: Path, start: str) -> None:
    env = {k: v for k, v in os.environ.items() if k not in sites.AMBIENT}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    env |= {"PYTHONPATH": str(REPO / "scripts")} if start == "module" else {}

    def shell(line: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-c", line], cwd=REPO, env=env, capture_output=True, text=True, check=False
        )

    line = STARTS[start].format(site=site)
    (advice,) = re.findall(r"next: run `([^`]+)`", shell(line).stderr)
    assert advice.partition(" ")[0] == line.partition(" ")[0]
    done = shell(advice)
    assert done.returncode == 0, done.stderr
    assert run("verify", "--site", site).returncode == Exit.DONE


@pytest.mark.parametrize(
    ("started_by", "text", "expected"),
    [
        ("", "`apply --leave=a`", f"`{TOOL} apply --venv=d --leave=a`"),
        ("", "`apply --venv=DIR`", f"`{TOOL} apply --venv=DIR`"),
        ("", "omit --extra=", "omit --extra="),
        (
            "make",
            "`apply --leave=a --extra='my own'`",
            "`make apply VENV=d LEAVE=a 'EXTRA=my own'`",
        ),
        ("make", "`apply --leave=a --leave=b`", "`make apply VENV=d 'ARGS=--leave=a --leave=b'`"),
        ("make", "`status --verbose`", "`make status VENV=d ARGS=--verbose`"),
        ("make", "name it: --site=DIR, or use --force", "name it: SITE=DIR, or use FORCE=1"),
        ("make .venv", "`revert`", "`make revert`"),
        ("make", "`exec`", f"`{TOOL} exec --venv=d`"),
        ("make", "`patch -p1`", "`patch -p1`"),
    ],
)
def test_commands_and_options_are_written_for_the_user(
    monkeypatch: pytest.MonkeyPatch, started_by: str, text: str, expected: str
) -> None:
    monkeypatch.setenv(hints.STARTED_BY, started_by)
    monkeypatch.setattr(hints, "target", ["--venv=d"])
    assert hints.written(text) == expected
