"""The upstream names that the overlay uses, and a small release with one module of ours."""

import fcntl
import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path

from review import review
from review.drift import changed_lines
from review.uses import Use, upstream_uses
from series.upstream import Upstream

from support.series import replaced, upstream
from support.sites import OVERLAY, REPO

#: The results of :func:`overlay_uses`, which take minutes.
_INFERRED = REPO / "build" / "uses"

PACKAGE = "vllm/v1/readiness"
BATCH, HELPERS, EXTRA = "vllm/v1/batch.py", "vllm/v1/helpers.py", "vllm/v1/extra.py"
OURS = f"{PACKAGE}/ours.py"

#: Upstream's, in the base release.
BASE = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    EXTRA: "from vllm.v1.helpers import shift\n",
    BATCH: '''\
"""Batches."""

from dataclasses import dataclass
from enum import Enum

from vllm.v1.helpers import scale


class Colour(Enum):
    RED = 1


@dataclass
class Item:
    key: str
    size: int = 0


class Root:
    def drop(self, index: int) -> None:
        self.gone = index


class Batch(Root):
    """Items in rows."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[Item] = []
        self.left, self.right = width, width

    @property
    def full(self) -> bool:
        """Whether there is no room."""
        return len(self.rows) >= self.width

    def push(self, item: Item, front: bool = False) -> None:
        """Take one more."""
        # In order.
        self.rows.append(item)
        self.width = scale(self.width)


class Runner:
    def launch(self) -> int:
        return 1

    def copy(self) -> int:  # our state.copy() is a dictionary's
        return 2

    def rest(self) -> dict[str, int]:
        state = {"budget": 3}
        return state
''',
    HELPERS: '''\
import os

LIMIT = 8


def scale(value: int, factor: int = 2, *, exact: bool = True) -> int:
    """Make it larger."""
    total = value * factor
    return total


def shift(value: int) -> int:
    return value + 1


class Holder:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def update(self, steps: int) -> int:
        """Count."""
        return steps + len(self.tokens)

    def reset(self) -> None:
        self.tokens.clear()
''',
}

#: One of our modules, which uses it.
USER = """\
import json
from typing import TYPE_CHECKING, Any

from vllm.v1 import helpers
from vllm.v1.extra import shift
from vllm.v1.helpers import LIMIT, Holder, scale

if TYPE_CHECKING:
    from vllm.v1.batch import Batch, Colour, Item, Runner

WATCHED = ("launch",)
MODULE = "vllm.v1.batch"


class Mine(Holder):
    def update(self, steps: int) -> int:
        self.own = json.dumps([])
        return super().update(steps) + len(self.tokens)


def use(batch: "Batch", item: "Item", colour: "Colour") -> int:
    if batch.full or item.size > LIMIT:
        return batch.left
    batch.push(item, front=True)
    batch.drop(1)
    batch.width = scale(2, factor=3, exact=False)
    return len(batch.rows) + helpers.shift(1) + shift(2)


def watch(thing: Any, state: Any) -> Any:
    for name in WATCHED:
        replace(thing, name)
    state["budget"] = state.copy()
    return thing.rest()


def replace(thing: Any, name: str) -> None:
    setattr(thing, name, getattr(thing, name))
"""

#: What the patch puts in, before and into a function.
SEAMS = {
    "from vllm.v1.helpers import scale\n": "from vllm.v1.readiness.ours import use\n",
    "        self.rows.append(item)\n": (
        "        if use(self, item, None) and self.right:\n            return\n"
    ),
}


def changed(path: str, *edits: tuple[str, str]) -> dict[str, str]:
    """The release with texts of one file replaced."""
    return {**BASE, path: replaced(BASE[path], *edits)}


def lay_out(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files into a folder."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def uses_of_release(folder: Path) -> list[Use]:
    """The uses of the release's names by our module and the seams."""
    seams = [(before, seam + before) for before, seam in SEAMS.items()]
    overlaid = replaced(BASE[BATCH], *seams)
    files = {**BASE, BATCH: overlaid, f"{PACKAGE}/__init__.py": "", OURS: USER}
    lines = changed_lines(BASE[BATCH].encode(), overlaid.encode())
    return upstream_uses(lay_out(folder / "tree", files), upstream(BASE), {BATCH: lines})


def overlay_uses(base: Upstream) -> list[Use]:
    """The uses of the pinned release's names, inferred once for all workers and runs.

    They are kept by the checksum of everything that they depend on but the release, which is
    pinned.
    """
    digest = hashlib.sha256()
    for folder in ("patches", "vendor_overlay/vllm/v1/readiness", "scripts/review"):
        for file in sorted((REPO / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(
                    f"{file.name} {hashlib.sha256(file.read_bytes()).digest()!r}\n".encode()
                )
    _INFERRED.mkdir(parents=True, exist_ok=True)
    kept = _INFERRED / f"{OVERLAY.pin.release}-{digest.hexdigest()[:16]}"
    with (_INFERRED / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            overlaid = {p: OVERLAY.overlaid_bytes(p, base.read(p)) for p in OVERLAY.targets}
            unfinished = kept.with_suffix(".new")
            unfinished.write_bytes(pickle.dumps(review.uses_of(OVERLAY, base, overlaid)))
            unfinished.rename(kept)
        uses: list[Use] = pickle.loads(kept.read_bytes())
    return uses


def line_of(text: str, part: str) -> int:
    """The one-based line on which a part of a text begins."""
    return text[: text.index(part)].count("\n") + 1
