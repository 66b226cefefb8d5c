"""The benchmark of one step, run small on the real vLLM, stock and overlaid."""

import re
import subprocess
import sys

from support.sites import REPO

PROGRAM = REPO / "scripts" / "bench" / "step.py"
SMALL = ["--batch", "2", "--vocab", "64", "--lengths", "8", "24", "--steps", "2", "--rounds", "1"]


def test_both_sides_are_measured_and_make_the_same_of_the_logits() -> None:
    command = [sys.executable, str(PROGRAM), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", done.stdout, re.M)
    assert [row[0] for row in rows] == ["8", "24"]
    assert all(float(number) > 0 for row in rows for number in row)


def test_an_installation_that_is_not_there_is_named() -> None:
    command = [sys.executable, str(PROGRAM), *SMALL, "--site", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr
