"""Sides that are measured by turns, each time in a new process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare.installations import SIDES, Installations, log_tail, work_beside
from bench.errors import Failure


def in_turn(turn: int, sides: Sequence[str] = SIDES) -> tuple[str, ...]:
    """Return the order of the sides in a round, counted from 0; each is first by turns."""
    first = turn % len(sides)
    return (*sides[first:], *sides[:first])


def by_turns(
    module: str, site: Path, argv: Sequence[str], rounds: int, timeout: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run a program on both sides by turns.

    Args:
        module: with ``argv`` and --child FILE it measures the vLLM that it imports, and writes
            JSON with the imported directory as "package".
        site: an installation.
        argv: the program's arguments.
        rounds: the number of measurements of each side.
        timeout: seconds for one child.

    Returns:
        For each round, side to the JSON; and side to the installation's digest.

    Raises:
        Failure: there is no such installation, or a side failed or changed the installation.
    """
    work = work_beside(site)
    try:
        installations = Installations(site, work, sys.executable)
        results = [
            {side: _child(installations, side, work, module, argv, timeout) for side in in_turn(n)}
            for n in range(rounds)
        ]
        installations.check_untouched()
        return results, installations.digests
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _child(
    installations: Installations,
    side: str,
    work: Path,
    module: str,
    argv: Sequence[str],
    timeout: float,
) -> dict[str, Any]:
    out, log = work / "out.json", work / "log"
    command = [sys.executable, "-m", module, *argv, "--child", str(out)]
    code = installations.run(side, command, log, timeout, {})
    if code != 0:
        raise Failure("\n".join([f"{side} failed ({code}):", *log_tail(log)]))
    result: dict[str, Any] = json.loads(out.read_text())
    installations.check_import(side, result["package"])
    return result
