"""What the programs of the benchmark raise."""


class Failure(Exception):
    """A step of a run failed; the text names the step and what to do."""
