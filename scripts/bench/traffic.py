"""Measure closed-loop traffic: vLLM's AsyncLLM with its engine core in a process of its own.

    PYTHONPATH=scripts python -m bench.traffic [--site SITE] [--pairs A/B...] [--shapes NAME...] ...

A fixed number of requests is in flight, and each that ends is followed by another. Two sides are
measured at a time, and exchange places (:mod:`bench.harness.pairs`). They are views of one
installation, and perhaps of another release's. DIR gets run.json and run.md, written again after
each slice.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from overlay import output

from bench.harness import command_line, pairs
from bench.harness.installations import Installations
from bench.harness.pairs import Plan, Start
from bench.loops.arguments import DRAFTS, GRAPHS, write
from bench.loops.rows import ENGINES, ROWS, SHAPES

#: Noise first: two processes of one view.
PAIRS = ("again/stock", "overlaid/stock", "overlaid/mrv2", "overlaid/overlaid=-fixes")
ENVIRONMENT: Mapping[str, str] = {
    # With the eager backend vLLM stores no AOT-compiled model, and computes the hash of its
    # configuration again for each step with piecewise graphs: 1 to 4 ms.
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
#: Variables of directories for compiled code.
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def plan(args: argparse.Namespace, installations: Installations, timed: bool) -> Plan:
    """Return the plan of a run.

    Args:
        args: of the program.
        installations: of the run, whose directory gets the models.
        timed: whether the engine core is in the child's process, and its steps are timed.
    """
    models = installations.work / "models"
    for name in {SHAPES[shape].engine for shape in args.shapes}:
        write(models / name, name)
    how = "at the same time" if args.places == 2 else "in turns"
    title = f"Closed-loop traffic, {args.seconds:g} s each, both sides {how}."
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": f"{not timed:d}"}
    if timed:  # a peer's, too: its Model Runner V2 may have other parts
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    spec = {
        "kind": "timed" if timed else "served",
        "models": str(models),
        "drafts": args.drafts,
        "seconds": args.seconds,
        "ramp": min(args.seconds / 4, 2.0),
    }
    load = "steps" if timed else "traffic"
    return Plan(load, title, environment, list(starts(args, spec)), caches=CACHES)


def starts(args: argparse.Namespace, spec: Mapping[str, Any]) -> Iterator[Start]:
    """Yield the starts of a round: pairs in the order given, the engines of each.

    Rows and engines that Model Runner V2 does not support are left out of its pairs. With drafts,
    so are rows that vLLM refuses, of every pair.
    """
    drafts = args.drafts != "none"
    chosen: dict[str, list[str]] = {}
    for shape in args.shapes:
        chosen.setdefault(SHAPES[shape].engine, []).append(shape)
    for pair in args.pairs:
        for name, shapes in chosen.items():
            engine = ENGINES[name]
            for thinking in (False, True):
                of = [
                    row
                    for row in args.rows or engine.rows
                    if ROWS[row].thinking == thinking and (ROWS[row].takes_drafts or not drafts)
                ]
                unsupported = any("mrv2" in side for side in pair) and (
                    thinking or not engine.mrv2 or args.drafts.startswith("ngram")
                )
                cases = {
                    f"{row}, {SHAPES[shape].concurrency}": (shape, row)
                    for shape in shapes
                    for row in of
                }
                usual = engine.graphs if args.gpus else ["none"]
                for graphs in args.graphs or usual if cases and not unsupported else ():
                    label = f"{engine.label}, {graphs}"
                    label += f", {args.drafts} drafts" * drafts
                    label += ", thinking budget configured" * thinking
                    own = {**spec, "engine": name, "graphs": graphs, "thinking": thinking}
                    yield Start(label, pair, cases, own)


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.harness.pairs.measure`."""
    return measure(argv, __doc__ or "", timed=False)


def measure(argv: Sequence[str], description: str, timed: bool) -> int:
    """Make a run, and execute it.

    Args:
        argv: of the program.
        description: of the program, in its first line.
        timed: see :func:`plan`.
    """
    devices = command_line.gpus()
    options = command_line.parser(description, PAIRS)
    large = [shape for shape in SHAPES if SHAPES[shape].engine not in ("small", "tiny")]
    shapes = large if devices else ["small-8"]
    options.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=shapes)
    options.add_argument("--rows", nargs="+", choices=list(ROWS), help="(the shape's own)")
    text = "CUDA graphs (the shape's own; none without a GPU)"
    options.add_argument("--graphs", nargs="+", choices=list(GRAPHS), help=text)
    text = "speculative decoding of both sides, 3 tokens at a time (%(default)s)"
    options.add_argument("--drafts", choices=list(DRAFTS), default="none", help=text)
    text = "seconds of each slice (%(default)s), without its warm-up"
    options.add_argument("--seconds", type=float, default=8.0, help=text)
    args = options.parse_args(argv)
    args.gpus = devices
    command_line.prepare(options, args)
    return pairs.measure(args, lambda installations: plan(args, installations, timed))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
