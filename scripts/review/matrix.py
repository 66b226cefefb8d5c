"""Several releases in one table: features and fixes down, releases across."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from overlay.errors import Exit, OverlayError, denied
from overlay.pin import Pin
from series.tree import write_file

from review import page, words
from review.markup import code, escape, table
from review.report import word_anchor
from review.review import CODES, CONFLICT, PAGE, Review
from review.runners import V1, V2, Decision

#: The files of a matrix.
MARKDOWN, HTML = "matrix.md", "matrix.html"

_GROUPS = {words.FEATURE: "Features", words.FIX: "Fixes", words.FRAME: "What all need"}


@dataclass(frozen=True)
class Column:
    """A release of the matrix.

    Attributes:
        version: of the release.
        review: of it; None if it could not be reviewed.
        code: the exit code of ``--check`` for it, or of the refusal.
        because: why there is no review, and the next step.
    """

    version: str
    review: Review | None
    code: int
    because: str = ""

    def __str__(self) -> str:
        """Return the outcome in one sentence."""
        said = self.review.headline if self.review else f"not reviewed: {self.because}"
        return f"vLLM {self.version}: {said}"


def column(version: str, attempt: Callable[[], Review]) -> Column:
    """Review one release; if that fails, say why."""
    try:
        review = attempt()
    except OSError as error:
        refused = denied(error, "the review was not written")
    except OverlayError as error:
        refused = error
    except Exception as error:  # a fault in one review does not cost the others
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        refused = OverlayError(Exit.FAULT, reason, next_step="please report it")
    else:
        return Column(review.release.version, review, CODES[review.verdict])
    return Column(version, None, int(refused.code), refused.line)


def worst(columns: Sequence[Column]) -> int:
    """Return the worst exit code; a failure is worse than any verdict."""
    return max((each.code for each in columns), key=lambda code: (code not in CODES.values(), code))


def write(wanted: str, pin: Pin, columns: Sequence[Column], folder: Path) -> Path:
    """Write the matrix as Markdown and as a page.

    Args:
        wanted: the value of ``RELEASES``.
        pin: of the overlay.
        columns: oldest release first.
        folder: that of the reviews.

    Returns:
        The page.
    """
    text = markdown(wanted, pin, columns)
    folder.mkdir(parents=True, exist_ok=True)
    title = f"Releases of vLLM for overlay {pin.overlay}"
    for name, data in ((MARKDOWN, text), (HTML, page.render(title, text))):
        aside = folder / f".{name}"
        write_file(aside, data.encode())
        aside.replace(folder / name)
    return folder / HTML


def markdown(wanted: str, pin: Pin, columns: Sequence[Column]) -> str:
    """Return the matrix as Markdown; see :func:`write`."""
    cells = [_cells(each) for each in columns]
    names = dict.fromkeys(name for each in cells for name in each)
    heads = [
        f"[{escape(each.version)}]({_page(each)})" if each.review else escape(each.version)
        for each in columns
    ]
    failed = [f"- {escape(each.version)}: {escape(each.because)}" for each in columns
              if not each.review]  # fmt: skip
    parts = [
        f"# Releases of vLLM for overlay {escape(pin.overlay)}",
        *summary(columns),
        table([" ", *heads], [[name, *(each.get(name, "") for each in cells)] for name in names]),
        "Each cell leads to its reason. *(V1)*: it serves Model Runner V1 alone.",
        *(["## Not reviewed", "\n".join(failed)] if failed else []),
        f"Made by {code(f'make review RELEASES={wanted}')}.",
    ]
    return "\n\n".join(parts) + "\n"


def summary(columns: Sequence[Column]) -> Iterator[str]:
    """Yield sentences on the whole matrix."""
    reviewed = [each for each in columns if each.review]
    whole = [e.version for e in reviewed if e.review and e.review.verdict != CONFLICT]
    if whole:
        yield f"The newest release without a conflict is {escape(whole[-1])}."
    elif reviewed:
        yield "None of these releases is without a conflict."


def _cells(column: Column) -> dict[str, str]:
    """Return a column's cells by the name of their row."""
    review = column.review
    if review is None:
        return {"**verdict**": f"not reviewed, exit code {column.code}"}
    cells = {
        "**verdict**": escape(review.verdict),
        "**patches that conflict**": str(len(review.conflicts)),
        "**to decide**": str(len(review.decisions)),
        "**model runner**": escape(_runner(review.runners.after)),
    }
    for word in review.words:
        cells[f"**{_GROUPS[word.group]}**"] = ""
        alone = "" if word.on_v2 else " (V1)"
        place = f"{_page(column)}#{word_anchor(word.name)}"
        cells[code(word.name)] = f"[{word.state}]({place}){alone}"
    return cells


def _runner(decision: Decision | None) -> str:
    """Return which example models each runner serves, as far as the decision has been read."""
    if decision is None or decision.reading is None:
        return "not read yet" if decision else ""
    served = decision.reading.served
    parts = []
    for runner in (V2, V1):
        if models := [model for model, by in served.items() if by == runner]:
            parts.append(f"{runner}: {'all' if len(models) == len(served) else ', '.join(models)}")
    return "; ".join(parts)


def _page(column: Column) -> str:
    return f"{quote(column.version)}/{PAGE}"
