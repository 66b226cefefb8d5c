"""Run files: JSON, compressed where they are committed. Older schemas are read as the newest."""

from __future__ import annotations

import gzip
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from bench.errors import Failure
from bench.harness import disturbance
from bench.harness.machine import SCHEMA

Json = Mapping[str, Any]

_FIELDS = ("command", "date", "seconds", "machine", "versions", "digests", "complete", "title")
#: Figures of older runs that are made of others, or of the benchmark itself.
_MADE = ("copies", "copy,", "ITL max", "ITL p50 of the last", "fence", "waiting", "outside")
#: Sides that are compared of older runs.
_PAIRS = (("overlaid", "stock"), ("overlaid", "mrv2"), ("stock again", "stock"))


def load(path: Path) -> dict[str, Any]:
    """Read a run, compressed or not, as a run of the newest schema.

    Raises:
        Failure: the file is missing, or is not a whole run of a known schema.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        run = json.loads(text, parse_constant=_refuse)
    except (OSError, ValueError, EOFError) as error:
        raise Failure(f"{path} cannot be read as a run: {error}") from error
    if not isinstance(run, dict) or run.get("schema") not in range(2, SCHEMA + 1):
        raise Failure(
            f"{path} is not a run of schema 2 to {SCHEMA}; name the JSON that a program wrote"
        )
    try:
        run = _newest(run) if run["schema"] < SCHEMA else run
    except (KeyError, TypeError) as error:
        raise Failure(f"{path} is not a whole run: {error!r}") from error
    if lacking := [name for name in (*_FIELDS, "slices", "problems") if name not in run]:
        raise Failure(f"{path} is not a whole run: it lacks {', '.join(lacking)}")
    return run


def save(path: Path, run: Json) -> None:
    """Write a run; compressed, with the same bytes each time, if the name ends in ".gz"."""
    data = json.dumps(run, indent=1).encode()
    replace(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def replace(path: Path, data: bytes) -> None:
    """Write a file such that an interruption leaves the former one."""
    staged = path.with_name(path.name + ".tmp")
    staged.write_bytes(data)
    os.replace(staged, path)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _newest(run: Json) -> dict[str, Any]:
    """Return a run of schema 2 as one of the newest schema."""
    kept = {name: value for name, value in run.items() if name not in ("rows", "rounds")}
    if run["kind"] == "engine":
        slices = [one for name, row in run["rows"].items() for one in _of_row(name, row)]
        manifest = dict(run["manifest"])
        manifest["groups"] = [
            [name, _case(case), list(sides)]
            for name, row in manifest.pop("rows").items()
            for case in row["cases"]
            for sides in _PAIRS
            if {*sides} <= {*row["sides"]}
        ]
        title = "; ".join(f"{name}: {row['title']}" for name, row in run["rows"].items())
        kept |= {"title": title, "manifest": manifest, "problems": run["errors"]}
    elif isinstance(run["rounds"], list):
        slices = [{"problems": [], "disturbed": [], **one} for one in run["rounds"]]
    else:
        slices = [one for n, of in enumerate(run["rounds"].values(), 1) for one in _of_host(n, of)]
    return {**kept, "slices": slices}


def _case(name: str) -> str:
    return "plain" if name == "none" else name


def _of_row(name: str, row: Json) -> Iterator[dict[str, Any]]:
    """Yield the slices of a row of bench.engine or bench.serving, whose rounds stand alone."""
    for label, case in row["cases"].items():
        for sides in _PAIRS:
            for n, number in enumerate(row["compared"] if {*sides} <= {*row["sides"]} else ()):
                disturbed = [
                    f"{each}: {text}"
                    for each in sides
                    for text in disturbance.reasons(case["disturbances"][each][n])
                ]
                yield {
                    **{"round": number, "order": None, "engine": name, "case": _case(label)},
                    "sides": list(sides),
                    "figures": {each: _figures(case, each, sides, n) for each in sides},
                    "problems": [
                        f"{each}: {text}" for each in sides for text in case["problems"][each]
                    ],
                    "disturbed": disturbed,
                }


def _figures(case: Json, side: str, sides: tuple[str, str], number: int) -> dict[str, Any]:
    found = {
        name: values["rounds"][side][number]
        for name, values in case["figures"].items()
        if not name.startswith(_MADE) and " / " not in name and "fastest" not in name
    }
    speeds = [case["speeds"][each] for each in sides]
    if all(len(of) > number and of[number] for of in speeds):
        # Slices of both sides took turns: the ratio of the means is the mean of their ratios.
        common = min(len(of[number]) for of in speeds)
        found["steps/s"] = statistics.geometric_mean(case["speeds"][side][number][:common])
    return found


def _of_host(number: int, one: Json) -> Iterator[dict[str, Any]]:
    """Yield the slices of a process of bench.host."""
    for label, case in one["cases"].items():
        for sides in _PAIRS:
            figures: dict[str, dict[str, float]] = {
                side: {
                    f"{part} {quantile}, us": value
                    for part, of in case["parts"].items()
                    for quantile, value in of.get(side, {}).items()
                }
                for side in sides
            }
            if all(figures.values()):
                yield {
                    **{"round": number, "order": None, "engine": one["kind"], "case": label},
                    **{"sides": list(sides), "figures": figures, "problems": [], "disturbed": []},
                }
