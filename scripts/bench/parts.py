"""Measure the host's time in each part of a step, by kind of step, under closed-loop traffic.

    PYTHONPATH=scripts python -m bench.parts [--site SITE] [--pairs A/B...] [--shapes NAME...] ...

Traffic, pairs and options are those of :mod:`bench.traffic`. The engine core is in the client's
process, where its methods are timed, and no figure of clients is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlay import output

from bench import traffic


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.harness.pairs.measure`."""
    return traffic.measure(argv, __doc__ or "", timed=True)


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
