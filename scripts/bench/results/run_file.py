"""Run files: JSON, compressed where they are committed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from bench.errors import Failure
from bench.harness.files import replace
from bench.harness.machine import SCHEMA

Json = Mapping[str, Any]

_FIELDS = ("command", "date", "seconds", "machine", "versions", "digests", "complete", "title")


def load(path: Path) -> dict[str, Any]:
    """Read a run, compressed or not.

    Raises:
        Failure: the file is missing, or is not a whole run of the schema.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        run = json.loads(text, parse_constant=_refuse)
    except (OSError, ValueError, EOFError) as error:
        raise Failure(f"{path} cannot be read as a run: {error}") from error
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise Failure(f"{path} is not a run of schema {SCHEMA}; name the JSON of a program")
    if lacking := [name for name in (*_FIELDS, "slices", "problems") if name not in run]:
        raise Failure(f"{path} is not a whole run: it lacks {', '.join(lacking)}")
    return run


def save(path: Path, run: Json) -> None:
    """Write a run; compressed, with the same bytes each time, if the name ends in ".gz"."""
    data = json.dumps(run, indent=1).encode()
    replace(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
