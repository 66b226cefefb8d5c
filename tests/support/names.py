"""A small release, one module of ours that uses it, and a patch that stands in it."""

from support.series import replaced

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
