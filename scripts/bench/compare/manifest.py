"""What a run is going to measure, written before anything is measured.

Rows that turn out badly cannot be left out of a run afterwards: what is published is compared with
what was decided.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.compare.installations import ROOT

#: The file beside run.json.
NAME = "manifest.json"


def decide(
    command: str,
    rounds: int,
    digests: Mapping[str, str],
    rows: Mapping[str, Any],
    limit: float | None = None,
) -> dict[str, Any]:
    """Return the JSON of what a run is going to measure.

    Args:
        command: that starts the run.
        rounds: of each side.
        digests: side to its installation's digest.
        rows: name to its sides and the names of its cases.
        limit: seconds after which no round ends; None for as many rounds as are named.
    """
    return {
        "command": command,
        **_commit(ROOT),
        "digests": dict(digests),
        "rounds": rounds,
        **({} if limit is None else {"limit": limit}),
        "rows": {name: dict(row) for name, row in rows.items()},
    }


def digest(decided: Mapping[str, Any]) -> str:
    """Return a digest to publish before the run."""
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


def differences(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield where a run is not what its manifest decided."""
    decided = run["manifest"]
    for name, row in decided["rows"].items():
        if name not in run["rows"]:
            yield f"the row {name} was left out"
            continue
        measured = run["rows"][name]
        for kind, wanted, there in (
            ("sides", row["sides"], measured["sides"]),
            ("cases", row["cases"], list(measured["cases"])),
            ("rounds", decided["rounds"], measured["rounds"]),
        ):
            if kind == "rounds" and _ended_by_limit(run, measured["rounds"]):
                continue
            if wanted != there:
                yield f"{name} has the {kind} {_words(there)}, not {_words(wanted)}"
    for name in run["rows"]:
        if name not in decided["rows"]:
            yield f"the row {name} was not decided"
    for side, wanted in decided["digests"].items():
        if run["digests"].get(side) != wanted:
            yield f"the digest of {side} is not the one that was decided"


def _ended_by_limit(run: Mapping[str, Any], rounds: int) -> bool:
    """Whether a run has fewer rounds than it might because the time decided on was over."""
    decided, seconds = run["manifest"], run["seconds"]
    limit = decided.get("limit")
    if limit is None or not 0 < rounds < decided["rounds"]:
        return False
    return bool(seconds + seconds / rounds > limit)  # another round would have ended too late


def uncommitted(run: Mapping[str, Any]) -> str | None:
    """Return why no commit holds what was measured with; None if one does."""
    decided = run["manifest"]
    if decided["commit"] is None:
        return "it was not measured from a commit"
    if decided["changed"]:
        return f"files differed from commit {decided['commit'][:12]}: {_words(decided['changed'])}"
    return None


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _commit(root: Path) -> dict[str, Any]:
    """Return the commit that is checked out, and the tracked files that differ from it."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.splitlines()

    try:
        (commit,) = git("rev-parse", "HEAD")
        changed = git("diff", "--name-only", "HEAD")
    except (OSError, ValueError, subprocess.SubprocessError):
        return {"commit": None, "changed": []}
    return {"commit": commit, "changed": changed}
