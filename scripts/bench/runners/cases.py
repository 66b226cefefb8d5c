"""Engines whose steps are interleaved, and their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.models import HALF_B

#: Tokens of a prompt. In a changing batch, prompts have 1 token to so many.
PROMPT = 16
#: Steps before the measured ones.
WARMUP = 8
#: Size to fields of config.json that differ from the demo's model.
SIZES: Mapping[str, Mapping[str, Any]] = {"0.5B": HALF_B, "tiny": {}}


class Side(NamedTuple):
    """An engine's model runner.

    Attributes:
        stock: whether its modules are stock's, and not those of the process.
        version: of the runner.
    """

    stock: bool
    version: int = 1


#: In the order in which they are made. The first and the last differ by noise alone.
SIDES: Mapping[str, Side] = {
    "stock": Side(stock=True),
    "overlaid": Side(stock=False),
    "mrv2": Side(stock=True, version=2),
    "again": Side(stock=True),
}


class Kind(NamedTuple):
    """How all engines of a process are made.

    Attributes:
        asynchronous: whether they schedule asynchronously.
        drafts: tokens that ngram proposes for each request; Model Runner V2 has no ngram.
        length: max_model_len in tokens, which gives the block table its width. Texts are short.
    """

    asynchronous: bool
    drafts: int
    length: int

    def sides(self, gpu: bool) -> tuple[str, ...]:
        """Return the names of the engines that there are on this kind of device."""
        return tuple(
            name for name, side in SIDES.items() if side.version == 1 or (gpu and not self.drafts)
        )


#: Those with the bars come first.
KINDS: Mapping[str, Kind] = {
    f"{name} {length // 1024}k": Kind(asynchronous, drafts, length)
    for name, asynchronous, drafts in (("async", True, 0), ("ngram", False, 3), ("sync", False, 0))
    for length in (1024, 131072)
}


class Case(NamedTuple):
    """A batch of plain greedy requests.

    Attributes:
        batch: requests at a time.
        changing: whether at each step a request ends and another begins.
    """

    batch: int
    changing: bool = False

    @property
    def name(self) -> str:
        """For the report."""
        return f"batch {self.batch}{', changing' * self.changing}"


class Load(NamedTuple):
    """Measurement of one process.

    Attributes:
        kind: a name of :data:`KINDS`.
        size: a name of :data:`SIZES`.
        batches: of the cases; the first changes as well.
        steps: of each case.
        stock: the pristine site-packages directory.
        reverse: whether the last engine is made first. One that is made earlier is slower.
    """

    kind: str
    size: str
    batches: Sequence[int]
    steps: int
    stock: str
    reverse: bool = False

    @property
    def cases(self) -> list[Case]:
        """Return the cases in order."""
        first, *others = self.batches
        cases = [Case(first), *(Case(batch) for batch in others)]
        cases.insert(min(3, len(cases)), Case(first, changing=True))
        return cases

    @property
    def output(self) -> int:
        """Tokens of each request: it outlasts what is measured."""
        return (WARMUP + self.steps + 4) * (1 + KINDS[self.kind].drafts)

    @property
    def blocks(self) -> int:
        """Blocks of 16 tokens: for all requests, and for one as long as the model's length."""
        each = -(-(PROMPT + self.output) // 16) + 1
        return max(max(self.batches) * each, KINDS[self.kind].length // 16) + 2


def prompt(case: Case, request: int) -> list[int]:
    """Return the token ids of a request's prompt."""
    start = request * PROMPT
    length = 1 + request % PROMPT if case.changing else PROMPT
    return [3 + 7919 * k % 1000 for k in range(start, start + length)]


def lifetime(case: Case, load: Load, request: int) -> int:
    """Return the tokens that a request generates.

    In a changing batch the first ones end one by one, and later ones live as many steps as there
    are requests, so that one ends at each step (if drafts are accepted).
    """
    if case.changing:
        return min(request + 1, case.batch) * (1 + KINDS[load.kind].drafts)
    return load.output


def order(turn: int, names: Sequence[str]) -> list[str]:
    """Return the order of the engines in a step, counted from 0.

    Each is first equally often, and follows no other one more often than it goes before it.
    """
    cycle, first = divmod(turn, len(names))
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if cycle % 2 else turned
