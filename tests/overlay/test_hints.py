"""A message names the command so that it runs as it stands, however the tool was started."""

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
    "module": "PYTHONPATH=scripts python3 -m overlay verify --site={site}",
}


@pytest.mark.parametrize("start", STARTS)
def test_the_advice_runs_as_it_stands(site: Path, tmp_path: Path, start: str) -> None:
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
