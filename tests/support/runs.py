"""The JSON of benchmark runs, made up: nothing in it was measured."""

import json
from collections.abc import Sequence
from typing import Any

from bench.compare import outputs
from bench.compare.raw import recorded
from bench.compare.summary import CaseResult, Child, Figures, summarise
from bench.engines import prompts
from bench.engines.prompts import Place

SIDES = ("stock", "overlaid", "mrv2")
#: A name that a page must show as text.
HOSTILE = '<script>alert("x")</script> & $\\frac{1}{2}$ | "quoted"'

#: Milliseconds a step: waiting in sample_tokens and in get_output, and the step.
_TIMES = {"stock": (4.09, 0.02, 6.68), "overlaid": (0.0, 4.01, 6.6), "mrv2": (0.0, 4.05, 6.56)}


def head(kind: str) -> dict[str, Any]:
    """The fields that every run begins with."""
    return {
        "schema": 1,
        "kind": kind,
        "command": "PYTHONPATH=scripts python -m bench.engine --site /opt/site --out DIR",
        "date": "2026-11-21",
        "seconds": 431.0,
        "machine": {
            "device": "NVIDIA H100 80GB HBM3",
            "cpu": "AMD EPYC 9654",
            "cores": 16,
            "memory GiB": 128,
            "driver": "570.124",
            "system": "Ubuntu 24.04, Linux 6.8",
        },
        "versions": {"vllm": "0.22.0", "torch": "2.11.0", "python": "3.12.3", "overlay": "0.5.0"},
        "digests": {"stock": "12ab" * 16, "overlaid": "89ef" * 16},
    }


def engine() -> dict[str, Any]:
    """A complete run with three rows, one of them without Model Runner V2, and no problems."""
    rows = {
        "issue-43450": row(
            "Mixed sampling and logprobs at small batches",
            "vLLM issue 43450",
            ("no history", "mixed, batch 8", "forced immediate consumption of each output"),
            SIDES,
        ),
        "prime-rl-2772": row(
            "Presence penalty 1.5 and long outputs",
            "prime-rl pull request 2772",
            ("none", "presence"),
            SIDES[:2],
        ),
        "cpu-like": row("A worker in a process of its own", "nobody", ("none",), SIDES[:2]),
    }
    unseen(rows["cpu-like"]["cases"]["none"])
    return {
        **head("engine"),
        "complete": True,
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"},
        "sides": list(SIDES),
        "rows": rows,
        "errors": [],
    }


def row(title: str, source: str, cases: Sequence[str], sides: Sequence[str]) -> dict[str, Any]:
    """A row; each case is slower than the one before."""
    return {
        "title": title,
        "source": source,
        "model": {"hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064},
        "batch": 8,
        "prompt": 128,
        "output": 512,
        "scheduling": "async",
        "rounds": 5,
        "compared": [1, 2, 3, 4, 5],
        "sides": list(sides),
        "cases": {name: case(sides, 1 + n / 7) for n, name in enumerate(cases)},
    }


def case(sides: Sequence[str], scale: float) -> dict[str, Any]:
    """A case in which every side returned the same."""
    figures: dict[str, Any] = {}
    for name, of in _figures().items():
        medians = {side: of[side] * scale for side in sides}
        figures[name] = {
            **medians,
            "rounds": {
                side: [medians[side] * one for one in noise(n)] for n, side in enumerate(sides)
            },
            "ratios": {
                side: medians[side] / medians["stock"] if medians["stock"] else None
                for side in sides
                if side != "stock"
            },
        }
    return {
        "parameters": {"temperature": 0.7, "presence_penalty": 0.5, "logprobs": 5},
        "figures": figures,
        "fences": {
            side: [{"history": 512 if side == "stock" else 3, "output": 2}] * 5 for side in sides
        },
        "counts": {
            side: [{"tokens": [4096, 4096], "logprobs": [4096, 4096]}] * 5 for side in sides
        },
        "problems": {side: [] for side in sides},
        "disturbances": {side: [{"run delay": 0.01, "steal": 0.0}] * 5 for side in sides},
    }


def noise(turn: int) -> list[float]:
    """Five rounds around 1, in an order of the side's own; their median is 1."""
    values = [0.991, 1.0, 1.013, 1.004, 0.995]
    return values[turn:] + values[:turn]


def _figures() -> dict[str, dict[str, float]]:
    step = {side: times[2] for side, times in _TIMES.items()}
    sampling = {side: times[0] + 0.88 for side, times in _TIMES.items()}
    output = {side: times[1] + 0.03 for side, times in _TIMES.items()}
    return {
        "tokens/s": {side: 8e3 / each for side, each in step.items()},
        "ITL p50": step,
        "ITL p99": {side: each * 1.06 for side, each in step.items()},
        "step p50": step,
        "sample_tokens p50": sampling,
        "sample_tokens p99": {side: each * 1.3 for side, each in sampling.items()},
        "get_output p50": output,
        "get_output p99": {side: each * 1.2 for side, each in output.items()},
        "fences, a step": {"stock": 1.004, "overlaid": 0.0098, "mrv2": 0.0},
        "fence p50": {"stock": 4.05, "overlaid": 0.011, "mrv2": 0.0},
        "fence, ms a step": {"stock": 4.09, "overlaid": 0.0001, "mrv2": 0.0},
        "waiting in sample_tokens, ms a step": {side: t[0] for side, t in _TIMES.items()},
        "waiting in get_output, ms a step": {side: t[1] for side, t in _TIMES.items()},
    }


def unseen(case: dict[str, Any]) -> None:
    """Remove from a case all that only the worker's process can see."""
    for name, values in case["figures"].items():
        if name != "tokens/s" and not name.startswith("ITL"):
            for side in values["rounds"]:
                values[side] = None
                values["rounds"][side] = [None] * 5
            values["ratios"] = dict.fromkeys(values["ratios"])
    case["fences"] = {side: [{}] * 5 for side in case["fences"]}


def refuse(case: dict[str, Any], side: str, problem: str) -> None:
    """Add a problem to a case, which refuses the side's ratios."""
    case["problems"][side].append(problem)
    for values in case["figures"].values():
        for other in values["ratios"]:
            if side in ("stock", other):
                values["ratios"][other] = None


def table() -> dict[str, Any]:
    """A table of a micro-benchmark."""
    return {
        **head("table"),
        "title": "One step's penalties, batch 128, vocabulary 151,936; ms, median of 3 rounds",
        "note": "The logits are random.",
        "columns": ["what", "output tokens", "stock", "overlaid", "stock / overlaid"],
        "align": ["l", "r", "r", "r", "r"],
        "rows": [
            ["penalties", 1024, 7.16234, 0.14512, 49.35459],
            ["penalties", 4096, 20.487, 0.14, 146.33571],
            ["penalties", 12288, 59.602, 0.1404, "refused"],
        ],
        "problems": ["penalties, 12288: the logits differ"],
    }


def packed(*words: object) -> str:
    """One request's output of these words, packed."""
    return outputs.pack([[str(word) for word in words]])


def child(side: str, number: int, row: str, speed: float) -> Child:
    """A child with two cases of 8 requests, each of 4 tokens."""
    cases: dict[str, CaseResult] = {}
    for name in ("none", "presence"):
        place = Place(number, row, name)
        figures: Figures = {"tokens/s": speed, "ITL p50": 8e3 / speed}
        cases[name] = CaseResult(
            figures,
            {"tokens": packed(number, name, 5, 6), "logprobs": packed(number, name, "-0.5")},
            {"tokens": [32, 32]},
            speeds=[],
            disturbance={"run delay": 0.01, "steal": 0.0},
            prompts=prompts.digest(prompts.draw(place, 8, 16, 1024)),
            clock=[round(32 / speed * 1e9) + late for late in (0, 2_000, 1_000)],
        )
    return Child(side, number, cases)


def measured() -> dict[str, Any]:
    """A run with the raw figures of its children, as it is read from its file."""
    children = [
        child(side, number, "row", 32e9 / round(32e9 / (speed * factor)))
        for number, (one, other) in enumerate(zip(noise(0), noise(1), strict=True), 1)
        for side, speed, factor in (("stock", 100.0, one), ("overlaid", 380.0, other))
    ]
    cases: dict[str, Any] = {
        name: {"parameters": [{}], "batch": None} for name in ("none", "presence")
    }
    about = {
        **{"title": "A penalty.", "source": "nobody", "model": {}, "thinking": False},
        **{"batch": 8, "prompt": 16, "output": 4, "scheduling": "sync", "baseline": "none"},
        "children": [recorded(one) for one in children],
    }
    row = about | summarise(cases, SIDES[:2], children, "none")
    run = {
        **head("engine"),
        **{"schema": 2, "complete": True, "environment": {}, "errors": [], "rows": {"row": row}},
    }
    run["manifest"] = {
        **{"command": run["command"], "commit": "ab" * 20, "changed": [], "rounds": 5},
        "digests": run["digests"],
        "rows": {"row": {"sides": list(SIDES[:2]), "cases": list(cases)}},
    }
    read: dict[str, Any] = json.loads(json.dumps(run))
    return read
