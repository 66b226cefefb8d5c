"""The JSON file that holds a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bench.compare.machine import SCHEMA
from bench.errors import Failure

#: A run, or a row, case or figure of it.
Json = Mapping[str, Any]

_COMMON = ("command", "date", "seconds", "machine", "versions", "digests")
#: Kind of a run to the fields that it has.
_FIELDS: Mapping[str, Sequence[str]] = {
    "engine": (*_COMMON, "complete", "rows", "errors"),
    "table": (*_COMMON, "title", "columns", "align", "rows", "problems"),
}


def load(path: Path) -> dict[str, Any]:
    """Read a run.

    Raises:
        Failure: the file is missing, or is not a whole run of a known schema.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read as a run: {error}") from error
    known = range(1, SCHEMA + 1)
    if (
        not isinstance(run, dict)
        or run.get("schema") not in known
        or run.get("kind") not in _FIELDS
    ):
        raise Failure(
            f"{path} is not a run of schema 1 to {SCHEMA}; name the JSON that a program wrote"
        )
    if lacking := [name for name in _FIELDS[run["kind"]] if name not in run]:
        raise Failure(f"{path} is not a whole run: it lacks {', '.join(lacking)}")
    return run


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def replace(path: Path, text: str) -> None:
    """Write a file such that an interruption leaves the former one."""
    staged = path.with_name(path.name + ".tmp")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, path)
