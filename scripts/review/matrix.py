"""Several releases in one table: features and fixes down, releases across.

It lies beside the reviews, as ``matrix.html``, ``matrix.md`` and ``matrix.json``.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pages
from overlay.errors import Exit, OverlayError, denied
from overlay.pin import Pin

from review import review, runners, verdicts
from review.markdown import LIMIT
from review.page import visible
from review.pieces import escape
from review.selecting import OTHER

#: The version of matrix.json; docs/review-json.md has its fields, and says what raises it.
SCHEMA = 1
#: The files of a matrix.
JSON, MARKDOWN, PAGE = "matrix.json", "matrix.md", "matrix.html"

#: What became of the review of a release.
REVIEWED, NO_WHEEL, REFUSED, ERROR = "reviewed", "no wheel", "refused", "error"
#: A word that holds, and does nothing on models that Model Runner V2 has taken over.
DEAD = "dead"

#: From the best to the worst; anything that is no verdict comes last.
_RANKS = tuple(review.CODES.values())
#: What a word can be but hold as it is, in the order in which the summary has it.
_STATES = (verdicts.CANNOT, verdicts.DROPPABLE, verdicts.EYES, DEAD)
#: The CSS class of each verdict and outcome.
_MOODS = {
    verdicts.CANNOT: "bad",
    review.CONFLICT: "bad",
    verdicts.EYES: "eyes",
    verdicts.DROPPABLE: "drop",
    verdicts.HOLDS: "good",
    review.CLEAN: "good",
    **dict.fromkeys((NO_WHEEL, REFUSED, ERROR), "none"),
}
_GROUPS = {
    verdicts.FEATURES: "Features",
    verdicts.FIXES: "Fixes",
    verdicts.FRAME: "What all share",
}
#: How the names of architectures end.
_ENDING = re.compile(r"For(CausalLM|ConditionalGeneration)(?= |$)")

Matrix = Mapping[str, Any]


def column(version: str, attempt: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Review one release; if that fails, say why.

    Args:
        version: of the release.
        attempt: returns the contents of its review.json.

    Returns:
        An entry under "releases" in matrix.json, and under "words" the entries of the review.
    """
    entry: dict[str, Any] = {
        "version": version,
        "outcome": REVIEWED,
        "code": 0,
        "verdict": None,
        "because": "",
        "next": "",
        "runners": None,
        "conflicts": None,
        "warnings": None,
        "url": None,
        "words": [],
    }
    try:
        result = attempt()
    except (OverlayError, OSError) as error:
        if isinstance(error, OSError):
            error = denied(error, "the review was not written")
        return entry | {
            "outcome": NO_WHEEL if error.code == Exit.ABSENT else REFUSED,
            "code": int(error.code),
            "because": " ".join(str(error).partition("\n  next ")[0].split()),
            "next": error.next_step,
        }
    except Exception as error:  # a fault in one review does not cost the others
        traceback.print_exc(file=sys.stderr)
        because = " ".join(f"{type(error).__name__}: {error}".split())
        return entry | {
            "outcome": ERROR,
            "code": int(Exit.FAULT),
            "because": because,
            "next": f"make review RELEASE={version} shows it alone; please report it",
        }
    kinds = ("v1", "v2", "unclear")
    after = result["runners"] and result["runners"]["after"]
    return entry | {
        "version": result["release"]["version"],
        "code": review.CODES[result["verdict"]],
        "verdict": result["verdict"],
        "runners": {kind: after[kind] for kind in kinds} if after else None,
        "conflicts": sum(patch["verdict"] == "conflicts" for patch in result["patches"]),
        "warnings": len(result["warnings"]),
        "url": f"{quote(result['release']['version'])}/{review.PAGE}",
        "words": result["words"],
    }


def assemble(wanted: str, pin: Pin, columns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The matrix of some columns.

    Args:
        wanted: the value of ``RELEASES``.
        pin: of the overlay.
        columns: those of :func:`column`, oldest release first.

    Returns:
        The contents of matrix.json.
    """
    names: dict[str, str] = {}
    for each in columns:
        names |= {word["name"]: word["group"] for word in each["words"]}
    words = [_row(name, group, columns) for name, group in names.items()]
    clean = [c["version"] for c in columns if c["verdict"] not in (None, review.CONFLICT)]
    matrix: dict[str, Any] = {
        "schema": SCHEMA,
        "command": f"make review RELEASES={wanted}",
        "date": datetime.date.today().isoformat(),
        "base": {"release": pin.release, "overlay": pin.overlay},
        "newest": clean[-1] if clean else None,
        "summary": [],
        "releases": [{k: v for k, v in each.items() if k != "words"} for each in columns],
        "words": words,
    }
    return matrix | {"summary": [*_overall(matrix), *_losses(matrix)]}


def code(matrix: Matrix) -> int:
    """The worst of the columns' exit codes; a failure is worse than any verdict."""
    codes = [int(each["code"]) for each in matrix["releases"]]
    return max(codes, key=lambda c: (_RANKS.index(c) if c in _RANKS else len(_RANKS), c))


def write(matrix: Matrix, folder: Path) -> None:
    """Write the three files, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (JSON, json.dumps(matrix, indent=1) + "\n"),
        (MARKDOWN, report(matrix)),
        (PAGE, render(matrix)),
    ):
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}-", delete=False) as aside:
            path = Path(aside.name)
            try:
                aside.write(text.encode())
                path.chmod(0o644)
                os.replace(path, folder / name)
            except BaseException:
                path.unlink()
                raise


def title(matrix: Matrix) -> str:
    """The subject of the matrix."""
    return f"Releases of vLLM for overlay {matrix['base']['overlay']}"


# Rows


def _row(name: str, group: str, columns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An entry under "words": one word on every release."""
    cells = []
    for each in columns:
        word = next((word for word in each["words"] if word["name"] == name), None)
        cells.append(
            {
                "release": each["version"],
                "verdict": word and word["verdict"],
                "dead": list(word["dead"]) if word else [],
                "url": word and f"{each['url']}#{verdicts.anchor(name)}",
            }
        )
    lost = [cell for cell in cells if _state(cell) not in (None, verdicts.HOLDS)]
    refused = [cell["release"] for cell in cells if cell["verdict"] == verdicts.CANNOT]
    return {
        "name": name,
        "group": group,
        "first": {"release": lost[0]["release"], "state": _state(lost[0])} if lost else None,
        "cannot": refused[0] if refused else None,
        "cells": cells,
    }


def _state(cell: Mapping[str, Any]) -> str | None:
    """The verdict of a cell; what holds and is dead on some models does not hold as it is."""
    if cell["verdict"] == verdicts.HOLDS and cell["dead"]:
        return DEAD
    verdict: str | None = cell["verdict"]
    return verdict


# Sentences


def _overall(matrix: Matrix) -> Iterator[str]:
    """How far one can move, for people."""
    outcomes = [each["outcome"] for each in matrix["releases"]]
    if matrix["newest"]:
        yield f"the newest release without a conflict is {matrix['newest']}"
    elif REVIEWED in outcomes:
        yield "none of these releases is without a conflict"
    if failed := [each for each in matrix["releases"] if each["outcome"] != REVIEWED]:
        listed = ", ".join(f"{each['version']} ({each['outcome']})" for each in failed)
        yield f"not reviewed: {listed}"


def _losses(matrix: Matrix) -> Iterator[str]:
    """Since when each word does not hold as it is, for people."""
    read = [each for each in matrix["releases"] if each["outcome"] == REVIEWED]
    words = [word for word in matrix["words"] if word["group"] != verdicts.FRAME]
    for each in read:
        states: dict[str, list[str]] = {}
        for word in words:
            if word["first"] and word["first"]["release"] == each["version"]:
                states.setdefault(word["first"]["state"], []).append(word["name"])
        parts = [
            f"{state} ({len(states[state])}): {', '.join(states[state])}"
            for state in _STATES
            if state in states
        ]
        if parts:
            yield f"on {each['version']} these stop holding as they are: {'; '.join(parts)}"
    parts = []
    for each in read:
        if names := [word["name"] for word in words if word["cannot"] == each["version"]]:
            parts.append(f"on {each['version']} for {', '.join(names)}")
    if parts:
        yield f"a patch first conflicts {'; '.join(parts)}"
    if kept := [word["name"] for word in words if not word["first"]]:
        yield f"hold as they are on every release here: {', '.join(kept)}"


def runner(entry: Mapping[str, Any]) -> str:
    """Which model runner a release takes, in a few words."""
    kinds = entry["runners"]
    if kinds is None:
        return "not known" if entry["outcome"] == REVIEWED else ""
    unclear = f"not clear for {_models(kinds['unclear'])}" if kinds["unclear"] else ""
    if OTHER in kinds["unclear"]:
        return unclear
    first, second = ("v2", "v1") if OTHER not in kinds["v1"] else ("v1", "v2")
    parts = []
    for name in (first, second):
        if OTHER in kinds[name]:
            parts.append(name.upper())
        elif kinds[name]:
            parts.append(f"{name.upper()} for {_models(kinds[name])}")
    return "; ".join(filter(None, [*parts, unclear]))


def _models(names: Sequence[str]) -> str:
    return runners.brief([_ENDING.sub("", name) for name in names])


def _dead(cell: Mapping[str, Any]) -> str:
    return f"dead on {_models(cell['dead'])}" if cell["dead"] else ""


# Tables


def _head(matrix: Matrix) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """The first rows: each with its name, and for each release mood, text and address."""
    releases = matrix["releases"]
    yield (
        "verdict",
        [
            (
                _MOODS[each["verdict"] or each["outcome"]],
                each["verdict"] or f"{each['outcome']}, exit code {each['code']}",
                each["url"] or "",
            )
            for each in releases
        ],
    )
    yield "model runner", [("", runner(each), "") for each in releases]
    for name, key in (("patches that conflict", "conflicts"), ("warnings", "warnings")):
        texts = ["" if each[key] is None else f"{each[key]:,}" for each in releases]
        yield name, [("", text, "") for text in texts]


def report(matrix: Matrix) -> str:
    """The matrix as Markdown; its cells are links, unless that is too long for a comment."""
    linked = _markdown(matrix, True)
    return linked if len(linked) <= LIMIT else _markdown(matrix, False)


def _markdown(matrix: Matrix, linked: bool) -> str:
    def cell(text: str, url: str | None, more: str = "") -> str:
        text = f"[{escape(text)}]({url})" if url and linked else escape(text)
        return f"{text}; {escape(more)}" if more else text

    releases = matrix["releases"]
    lines = [
        [" ", *(cell(each["version"], each["url"]) for each in releases)],
        ["---"] * (len(releases) + 1),
        *([name, *(cell(text, "") for _, text, _ in cells)] for name, cells in _head(matrix)),
    ]
    for group, rows in _grouped(matrix["words"]):
        lines.append([f"**{group}**", *[""] * len(releases)])
        for row in rows:
            cells = (cell(c["verdict"] or "", c["url"], _dead(c)) for c in row["cells"])
            lines.append([escape(row["name"]), *cells])
    failed = [
        f"- {escape(each['version'])}: {escape(each['because'])}; next: {escape(each['next'])}"
        for each in releases
        if each["because"]
    ]
    parts = [
        f"# {escape(title(matrix))}",
        "\n".join(f"- {escape(sentence)}" for sentence in matrix["summary"]),
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
        *(["## Not reviewed", "\n".join(failed)] if failed else []),
        f"Made by {escape(matrix['command'])} on {escape(matrix['date'])}.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def render(matrix: Matrix) -> str:
    """The matrix as one HTML page that loads nothing else."""
    template = pages.environment(Path(__file__).parent).get_template("matrix.html.j2")
    groups = [
        (
            group,
            [
                (
                    row["name"],
                    [
                        (_MOODS.get(c["verdict"], "none"), c["verdict"] or "", c["url"], _dead(c))
                        for c in row["cells"]
                    ],
                )
                for row in rows
            ],
        )
        for group, rows in _grouped(matrix["words"])
    ]
    text = template.render(
        matrix=matrix,
        title=title(matrix),
        overall=list(_overall(matrix)),
        losses=list(_losses(matrix)),
        head=_head(matrix),
        groups=groups,
    )
    return visible(text)


def _grouped(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    rows = list(rows)
    for group, heading in _GROUPS.items():
        if within := [row for row in rows if row["group"] == group]:
            yield heading, within
