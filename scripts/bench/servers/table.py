"""The table of a serving run, and the problems that refuse its ratios."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.compare import outputs
from bench.compare.installations import SIDES
from bench.compare.machine import settings
from bench.reports.figures import REFUSED, mark, with_mark
from bench.servers.load import CASES, Load
from bench.servers.processes import ENVIRONMENT, MRV2, Setting

#: Figure to its key in a result of `vllm bench serve`. Times are in ms.
FIGURES: Mapping[str, str] = {
    "requests/s": "request_throughput",
    "output tokens/s": "output_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
}
#: The figures that mean nothing where tokens came in bursts.
LATENCIES = tuple(FIGURES)[2:]

#: A cell of the table: text, a number, or a ratio and its mark.
_Cell = str | float | list[float | str]


@dataclass
class CaseResult:
    """The results of one case on one side in one round.

    Attributes:
        side: its side.
        turn: the round, from 1.
        figures: by the names of :data:`FIGURES`.
        counts: received and expected outputs, by kind.
        streams: the outputs, by kind; see :mod:`bench.compare.outputs`.
        errors: the error of the first request that failed.
        bursts: whether most tokens came right behind the one before, because the client or the
            server's front end had no core to run on.
    """

    side: str
    turn: int
    figures: Mapping[str, float]
    counts: Mapping[str, tuple[int, int]]
    streams: Mapping[str, outputs.Stream]
    errors: Sequence[str] = ()
    bursts: bool = False

    @property
    def name(self) -> str:
        """Side and round."""
        return f"{self.side} round {self.turn}"


def read_result(
    result: Mapping[str, Any], case: str, side: str, turn: int, load: Load, generated: bool
) -> CaseResult:
    """Read what the client child wrote of a case.

    Args:
        result: its JSON: "client", the result of `vllm bench serve`, and "single", the server's
            answer to a request that was alone.
        case: the case's name.
        side: the measured side.
        turn: the round.
        load: the requests.
        generated: whether a text has one word for each token.
    """
    client, single = result["client"], result["single"]["choices"][0]
    texts = [text.strip(" ").split(" ") if text else [] for text in client["generated_texts"]]
    expected = load.requests * load.output
    counts = {
        "responses": (client["completed"], load.requests),
        "tokens": (client["total_output_tokens"], expected),
    }
    if generated:
        counts["tokens in the texts"] = (sum(map(len, texts)), expected)
    logprobs: list[str] = []
    if (top := CASES[case].get("logprobs")) is not None:
        given = single["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        logprobs = [
            f"{one!r} {sorted(more.items())!r}"
            for one, more in zip(given["token_logprobs"], given["top_logprobs"], strict=True)
            if one is not None and more and len(more) >= top
        ]
        counts["logprobs of one request"] = (len(logprobs), load.output)
    errors = [
        f"request {n} failed: {error.strip().splitlines()[-1]}"
        for n, error in enumerate(client["errors"])
        if error
    ]
    return CaseResult(
        side,
        turn,
        {figure: float(client[key]) for figure, key in FIGURES.items()},
        counts,
        {
            "texts": texts,
            "token ids of one request alone": [list(map(str, single["token_ids"]))],
            "logprobs of one request alone": [logprobs],
        },
        errors[:1],
        bursts=client["median_itl_ms"] < client["mean_itl_ms"] / 4,
    )


def table(
    results: Mapping[str, Sequence[CaseResult]], setting: Setting, errors: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the part of a run's JSON that holds its results.

    Medians and ratios are of the rounds that every measured side has; problems are of all rounds.

    Args:
        results: case to the results of each side and round.
        setting: of the run.
        errors: what failed besides.
    """
    load = setting.load
    sides = [side for side in (*SIDES, MRV2) if _of(side, *results.values())]
    others = [side for side in sides if side != SIDES[0]]
    rows: list[list[_Cell]] = []
    listed = list(errors)
    details: dict[str, Any] = {}
    numbers: set[int] = set()
    for case, given in results.items():
        common = _common_rounds(given)
        numbers.add(len(common))
        if given and not common:
            listed.append(f"{case}: no round has every side, so there is nothing to compare")
        spoilt = problems(given, sides)
        listed += [f"{case}: {text}" for texts in spoilt.values() for text in texts]
        bursts = [one for one in given if one.bursts]
        text = "tokens came in bursts, so its latencies have no ratio"
        listed += [f"{case}: {one.name}: {text}" for one in bursts]
        for figure in FIGURES:
            values = {
                side: [one.figures[figure] for one in _of(side, given) if one.turn in common]
                for side in sides
            }
            refused = {side for side in sides if spoilt[side]}
            refused |= {one.side for one in bursts if figure in LATENCIES}
            medians = [_median(values[side], bool(_of(side, given))) for side in sides]
            ratios = [
                _ratio(values, side) if not refused & {side, SIDES[0]} else REFUSED
                for side in others
            ]
            rows.append([case, figure, *medians, *ratios])
        for kind in dict.fromkeys(kind for one in given for kind in one.counts):
            received = [_received(_of(side, given), kind) for side in sides]
            rows.append([case, kind, *received, *[""] * len(others)])
        details[case] = {
            "parameters": {"temperature": 0, **CASES[case]},
            "problems": spoilt,
            "rounds": {
                side: [
                    {"round": one.turn, **one.figures, "counts": one.counts}
                    for one in _of(side, given)
                ]
                for side in sides
            },
        }
    model = "generated model" if setting.generated else setting.directory.name
    # Cases have different rounds only where the run was cut off, or a server failed.
    rounds = " or ".join(map(str, sorted(numbers or {0})))
    columns = ["case", "figure", *sides, *(f"{side} / {SIDES[0]}" for side in others)]
    return {
        "title": "`vllm serve`, driven by `vllm bench serve`",
        "note": f"{model}; {load.requests} requests, {load.concurrency} at a time, {load.prompt} "
        f"tokens in and {load.output} out, greedy; times in ms, medians of {rounds} round(s). "
        "Texts are compared whole; token ids and logprobs are those of one request alone.",
        "columns": columns,
        "align": ["l", "l", *["r"] * (len(columns) - 2)],
        "rows": rows,
        "problems": listed,
        "environment": settings(ENVIRONMENT),
        "cases": details,
    }


def problems(given: Sequence[CaseResult], sides: Iterable[str]) -> dict[str, list[str]]:
    """Return, for each side, why it has no ratio to stock.

    Every round of every side must return what stock's first round returned.
    """
    listed: dict[str, list[str]] = {side: [] for side in sides}
    reference = next((one for one in given if one.side == SIDES[0]), None)
    for side, texts in listed.items():
        if not _of(side, given):
            texts.append(f"{side} was not measured")
    for one in given:
        for kind, (received, expected) in one.counts.items():
            if received != expected:
                listed[one.side].append(f"{one.name}: {received} of {expected} {kind}")
        listed[one.side] += [f"{one.name}: {error}" for error in one.errors]
        for kind, stream in one.streams.items():
            before = reference.streams[kind] if reference else stream
            if reference and (where := outputs.first_difference(before, stream)):
                text = f"{kind} of {reference.name} and {one.name} differ: {where}"
                if one.side == SIDES[0]:
                    text += "; batches depend on arrivals, and VLLM_BATCH_INVARIANT=1 avoids it"
                listed[one.side].append(text)
    return listed


def _of(side: str, *given: Sequence[CaseResult]) -> list[CaseResult]:
    return [one for results in given for one in results if one.side == side]


def _common_rounds(given: Sequence[CaseResult]) -> set[int]:
    """Return the rounds that every side has which has any."""
    turns: dict[str, set[int]] = {}
    for one in given:
        turns.setdefault(one.side, set()).add(one.turn)
    return set.intersection(*turns.values()) if turns else set()


def _median(values: Sequence[float], measured: bool) -> _Cell:
    """Return the median of a side's rounds, or why there is none."""
    if values:
        return round(statistics.median(values), 3)
    return "not compared" if measured else "not measured"


def _ratio(values: Mapping[str, Sequence[float]], side: str) -> _Cell:
    """Return the ratio of a side's median to stock's."""
    ours, stocks = values[side], values.get(SIDES[0])
    if not ours or not stocks or not statistics.median(stocks):
        return REFUSED
    ratio = statistics.median(ours) / statistics.median(stocks)
    return with_mark(round(ratio, 3), mark(stocks, ours))


def _received(given: Sequence[CaseResult], kind: str) -> str:
    """Return the counts of the round that lacks most."""
    counts = [one.counts[kind] for one in given if kind in one.counts]
    if not counts:
        return "not measured"
    received, expected = min(counts)
    return f"{received:,} of {expected:,}"
