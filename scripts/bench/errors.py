"""The error of the benchmarks."""


class Failure(Exception):
    """Failed step of a run; the text names the step and the remedy."""
