"""A run, the one type of result: its file, its slices and the comparison of their sides."""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.errors import Failure

#: Engine, case and sides.
Group = tuple[str, str, tuple[str, str]]

#: The chance that an interval misses 1 although both sides are equal.
LEVEL = 0.05
#: Fewer pairs make no claim: four of two equal sides all point one way once in eight times.
LEAST = 5
#: Marks of ratios that are no claims.
NOISE, FEW, DISTURBED = "~", "?", "!"
#: A figure without a ratio: a busier device has more to do, or does it more slowly.
BUSY = "device busy, %"


@dataclass(frozen=True)
class Slice:
    """One measurement of two sides.

    Attributes:
        round: two slices of a round are a pair.
        order: 0, or 1 after the sides have exchanged places; None for a pair by itself.
        engine: the model and its settings.
        case: the requests, and their number at a time.
        sides: the two; ratios are first / second.
        figures: of each side. Times are in ms, unless the name says "us".
        disturbed: reasons why the slice counts for no interval.
    """

    round: int
    order: int | None
    engine: str
    case: str
    sides: tuple[str, str]
    figures: Sequence[Mapping[str, float]]
    disturbed: Sequence[str] = ()

    @property
    def group(self) -> Group:
        """Engine, case and sides."""
        return self.engine, self.case, self.sides

    def ratio(self, figure: str) -> float | None:
        """Divide the sides' values; None if one is missing or not above 0."""
        # Where all tokens of most requests come at once, vLLM's client has a TPOT just below 0.
        first, second = (side.get(figure, 0.0) for side in self.figures)
        return first / second if first > 0 < second else None


class Comparison(NamedTuple):
    """Comparison of both sides in one figure.

    Attributes:
        first: median of the first side; None if not measured.
        second: median of the second side.
        ratio: first / second over all pairs; None without a ratio.
        low: lower bound of the interval.
        high: upper bound of the interval.
        pairs: number of pairs in the interval.
        mark: of a ratio that is no claim; empty for a claim.
    """

    first: float | None
    second: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    mark: str = ""


@dataclass
class Run:
    """A run.

    Attributes:
        command: repeats it.
        commit: of this repository; ends with "-dirty" if files differed from it.
        date: of its end.
        device: "CPU", or torch's name of the GPU.
        host: the cores and the versions.
        digests: side to the digest of its installation.
        environment: variables that influence the measured processes.
        load: "traffic", "steps", "streams" or "own".
        title: a sentence on the load.
        slices: measured so far.
        seconds: that it took.
        complete: False while it runs, and if it was cut off.
        problems: errors.
    """

    command: str
    commit: str
    date: str
    device: str
    host: str
    digests: Mapping[str, str]
    environment: Mapping[str, str]
    load: str
    title: str
    slices: list[Slice] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    problems: list[str] = field(default_factory=list)

    def groups(self) -> dict[Group, list[Slice]]:
        """Return the slices of each engine, case and pair of sides."""
        groups: dict[Group, list[Slice]] = {}
        for one in self.slices:
            groups.setdefault(one.group, []).append(one)
        return groups

    def compare(self, group: Group, figure: str, claims: int = 1) -> Comparison:
        """Compare the sides of a group.

        Values of the sides are divided, such as p99 by p99, and never values of single steps. The
        ratio of a pair is the geometric mean of its slices' ratios, and the ratio that is shown is
        that of all pairs; where slices have no order, it is the ratio of the medians.

        Args:
            group: engine, case and sides.
            figure: its name.
            claims: number of ratios shown together; see :func:`interval`.
        """
        of = self.groups()[group]
        values = [[s.figures[n][figure] for s in of if figure in s.figures[n]] for n in (0, 1)]
        first, second = (statistics.median(side) if side else None for side in values)
        pairs = _pairs(of, figure)
        undisturbed = _pairs([one for one in of if not one.disturbed], figure)
        if figure == BUSY or not pairs:
            return Comparison(first, second)
        ratio = statistics.geometric_mean(undisturbed or pairs)
        if of[0].order is None and first and second:
            ratio = first / second
        if (bounds := interval(undisturbed, claims)) is None:
            mark = DISTURBED if len(undisturbed) < LEAST <= len(pairs) else FEW
            return Comparison(first, second, ratio, None, None, len(undisturbed), mark)
        low, high = bounds
        # Stock against itself; the ratio of the medians may be on the other side of 1.
        same = self.groups().get((group[0], group[1], ("again", "stock")), ())
        floor = max((max(one, 1 / one) for one in _pairs(same, figure)), default=1.0)
        claim = (low > 1 < ratio or high < 1 > ratio) and max(ratio, 1 / ratio) > floor
        mark = "" if claim else NOISE
        return Comparison(first, second, ratio, low, high, len(undisturbed), mark)


def figures(slices: Iterable[Slice]) -> list[str]:
    """Return the names of the figures of slices."""
    return list(dict.fromkeys(name for one in slices for side in one.figures for name in side))


def loss(figure: str, ratio: float) -> float:
    """Return how many times worse the first side is; below 1 where it is better."""
    return 1 / ratio if figure.endswith("/s") else ratio


def interval(ratios: Sequence[float], claims: int = 1) -> tuple[float, float] | None:
    """Return Student's interval of a ratio, over the logarithms of the pairs' ratios.

    A bootstrap over five pairs is too narrow: it missed in 11% of simulated runs at a level of 5%.

    Args:
        ratios: one per pair.
        claims: number of intervals shown together; corrects the level (Bonferroni).

    Returns:
        The bounds; None for fewer than :data:`LEAST` pairs, or on a host without scipy.
    """
    if len(ratios) < LEAST:
        return None
    try:
        from scipy import stats  # type: ignore[import-untyped]
    except ImportError:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    reach = float(stats.t.ppf(1 - LEVEL / claims / 2, len(logs) - 1) * stats.sem(logs))
    return math.exp(statistics.fmean(logs) - reach), math.exp(statistics.fmean(logs) + reach)


def load(path: Path) -> Run:
    """Read a run, compressed or not.

    Raises:
        Failure: the file is missing, or is not a whole run.
    """
    try:
        data = path.read_bytes()
        raw = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
        slices = [Slice(**{**one, "sides": tuple(one["sides"])}) for one in raw["slices"]]
        return Run(**{**raw, "slices": slices})
    except (OSError, ValueError, EOFError, TypeError, KeyError) as error:
        raise Failure(f"{path} cannot be read as a run: {error}") from error


def save(path: Path, run: Run) -> None:
    """Write a run; compressed, with the same bytes each time, if the name ends in ".gz"."""
    data = json.dumps(asdict(run), indent=1).encode()
    replace(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def replace(path: Path, data: bytes) -> None:
    """Write a file such that an interruption leaves the former one."""
    staged = path.with_name(path.name + ".tmp")
    staged.write_bytes(data)
    os.replace(staged, path)


def _pairs(slices: Iterable[Slice], figure: str) -> list[float]:
    """Return the ratio of each pair whose slices both have one."""
    rounds: dict[int, dict[int | None, float]] = {}
    for one in slices:
        if ratio := one.ratio(figure):
            rounds.setdefault(one.round, {})[one.order] = ratio
    whole = [of for of in rounds.values() if len(of) == 2 or None in of]
    return [statistics.geometric_mean(of.values()) for of in whole]
