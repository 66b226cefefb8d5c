"""The JSON of benchmark runs, made up: nothing in it was measured."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

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
        "rounds": 3,
        "sides": list(sides),
        "cases": {name: case(sides, 1 + n / 7) for n, name in enumerate(cases)},
    }


def case(sides: Sequence[str], scale: float) -> dict[str, Any]:
    """A case in which every side returned the same."""
    figures: dict[str, Any] = {}
    for name, of in _figures().items():
        noise = cycle((0.991, 1.0, 1.013))
        medians = {side: of[side] * scale for side in sides}
        figures[name] = {
            **medians,
            "rounds": {side: [medians[side] * next(noise) for _ in range(3)] for side in sides},
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
            side: [{"history": 512 if side == "stock" else 3, "output": 2}] * 3 for side in sides
        },
        "counts": {
            side: [{"tokens": [4096, 4096], "logprobs": [4096, 4096]}] * 3 for side in sides
        },
        "problems": {side: [] for side in sides},
    }


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
                values["rounds"][side] = [None] * 3
            values["ratios"] = dict.fromkeys(values["ratios"])
    case["fences"] = {side: [{}] * 3 for side in case["fences"]}


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
