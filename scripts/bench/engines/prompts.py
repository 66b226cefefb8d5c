"""The prompts of a case: the same on every side, and new in each round, row and case.

A side that remembers what it has computed for a prompt gains nothing by it: no prompt comes twice
in one process, except where a case needs the outputs of another one's prompts.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import NamedTuple

#: The first token id that may stand in a prompt of a generated model.
_FIRST = 3


class Place(NamedTuple):
    """Where a case stands in a run; a prompt depends on nothing else.

    Attributes:
        round: counted from 1.
        row: its name.
        case: its name.
        warmup: whether it is the warm-up before the case.
    """

    round: int
    row: str
    case: str
    warmup: bool = False


def draw(
    place: Place, count: int, length: int, vocabulary: int, text: Sequence[int] = ()
) -> list[list[int]]:
    """Return the token ids of each request's prompt.

    Args:
        place: of the case.
        count: of the requests.
        length: of each prompt.
        vocabulary: the model's.
        text: token ids to draw from, where the model has a tokenizer; empty: all of them.
    """
    drawn = random.Random(json.dumps(place))  # noqa: S311 (it hides nothing)
    source = text or range(_FIRST, vocabulary)
    return [drawn.choices(source, k=length) for _ in range(count)]


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """Return a digest of prompts."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
