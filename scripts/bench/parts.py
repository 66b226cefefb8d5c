"""Measure the host's time in each part of a step, by kind of step, under closed-loop traffic.

    PYTHONPATH=scripts python -m bench.parts [--site SITE] [--pairs A/B...] [--shapes NAME...] ...

Traffic, pairs and options are those of :mod:`bench.traffic`. The engine core is in the client's
process, where its methods are timed, and no figure of clients is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlay import output

from bench import traffic
from bench.traffic import ENVIRONMENT, TrafficRun


class PartsRun(TrafficRun):
    """A run of engines whose steps are timed."""

    kind = "timed"
    about = "The engine core is in the client's process."
    environment: Mapping[str, str] = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.harness.run.run`."""
    return traffic.measure(argv, __doc__ or "", PartsRun)


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
