"""The manifest of a run, written before anything is measured.

Cases that turn out badly cannot be left out of a run afterwards: a run is published only if it is
as its manifest decided.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.installations import ROOT
from bench.results.slices import Group, grouped

#: The file next to run.json.
NAME = "manifest.json"


def decide(
    command: str,
    rounds: int,
    digests: Mapping[str, str],
    groups: Sequence[Group],
    limit: float | None = None,
) -> dict[str, Any]:
    """Return the JSON of a manifest.

    Args:
        command: that starts the run.
        rounds: of each group.
        digests: side to its installation's digest.
        groups: engines, cases and sides.
        limit: seconds after which no round ends; None for no limit.
    """
    return {
        "command": command,
        **_commit(ROOT),
        "digests": dict(digests),
        "rounds": rounds,
        "limit": limit,
        "groups": [[engine, case, list(sides)] for engine, case, sides in groups],
    }


def joined(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest of runs that are joined; empty if one of them has none.

    Each group has the rounds of all manifests that decided on it.
    """
    if not all(manifests):
        return {}
    groups = {json.dumps(group): group for one in manifests for group in one["groups"]}
    return {
        **manifests[0],
        "command": "; ".join(one["command"] for one in manifests),
        "changed": sorted({name for one in manifests for name in one["changed"]}),
        "digests": {name: value for one in manifests for name, value in one["digests"].items()},
        "groups": list(groups.values()),
        "rounds": {
            key: sum(rounds_of(one, group) for one in manifests) for key, group in groups.items()
        },
        "limit": sum(one["limit"] or 0.0 for one in manifests) or None,
    }


def rounds_of(decided: Mapping[str, Any], group: Sequence[Any]) -> int:
    """Return the rounds that a manifest decided for a group."""
    rounds = decided["rounds"]
    if isinstance(rounds, dict):
        return int(rounds.get(json.dumps(group), 0))
    return int(rounds) if group in decided["groups"] else 0


def digest(decided: Mapping[str, Any]) -> str:
    """Return a digest to publish before the run."""
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


def differences(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between a run and its manifest."""
    decided, measured = run["manifest"], grouped(run["slices"])
    for group in decided["groups"]:
        engine, case, sides = group
        slices = measured.pop((engine, case, tuple(sides)), [])
        rounds, name = len({one["round"] for one in slices}), f"{engine}, {case}, {'/'.join(sides)}"
        wanted = rounds_of(decided, group)
        if not rounds:
            yield f"{name} was left out"
        elif rounds != wanted and not _ended_by_limit(run, rounds, wanted):
            yield f"{name} has {rounds} rounds, not {wanted}"
    for engine, case, sides in measured:
        yield f"{engine}, {case}, {'/'.join(sides)} was not decided"
    for side, wanted in decided["digests"].items():
        if run["digests"].get(side) != wanted:
            yield f"the digest of {side} is not the one that was decided"


def uncommitted(run: Mapping[str, Any]) -> str:
    """Return the files that differed from the commit, as a sentence; empty if none did."""
    commit, changed = (run["manifest"][key] for key in ("commit", "changed"))
    return f"files differed from {(commit or 'no commit')[:12]}: {', '.join(changed)}" * bool(
        changed
    )


def _ended_by_limit(run: Mapping[str, Any], rounds: int, wanted: int) -> bool:
    """Return whether one more round would have ended after the limit."""
    limit, seconds = run["manifest"].get("limit"), run["seconds"]
    return limit is not None and rounds < wanted and bool(seconds + seconds / rounds > limit)


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
