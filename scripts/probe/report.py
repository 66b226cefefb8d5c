"""The probe's metrics as a table."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from overlay.output import escaped

PERCENTS = (50, 90, 99)
#: A sample of the text format; our labels have no escapes.
_SAMPLE = re.compile(r"(vllm:\w+?)(?:_(bucket|sum|count|total))?\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_OURS = re.compile(r"vllm:readiness_(\w+)_seconds")
_ITL = "vllm:inter_token_latency_seconds"
_TOKENS = "vllm:readiness_tokens"


class Histogram:
    """A histogram's cumulative counts by upper bound, and its sum; in seconds."""

    def __init__(self) -> None:
        self.buckets: dict[float, float] = {}
        self.sum = 0.0

    @property
    def count(self) -> float:
        """Number of durations."""
        return self.buckets.get(float("inf"), 0)

    def percentile(self, percent: float) -> float:
        """Interpolate within a bucket, as Prometheus's ``histogram_quantile`` does."""
        rank, lower, below = self.count * percent / 100, 0.0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if count >= rank and count > below:
                if bound == float("inf"):
                    break
                return lower + (bound - lower) * (rank - below) / (count - below)
            lower, below = (lower if bound == float("inf") else bound), count
        return lower


class Key(NamedTuple):
    """A histogram's process, name, and owner or part."""

    process: str
    name: str
    detail: str


def text(page: str) -> str:
    """Return a table for each process, and the tokens per second.

    Raises:
        ValueError: the page has no metrics of the probe.
    """
    histograms, tokens = _read(page)
    if not any(histogram.count for key, histogram in histograms.items() if key.process):
        raise ValueError(
            "there are no metrics of the probe. Set VLLM_READINESS_PROBE before the engine starts, "
            "and let it generate"
        )
    head = ["count", "mean ms", *(f"p{percent} ms" for percent in PERCENTS), "ms a step"]
    names = {key: key.name + (f": {key.detail}" if key.detail else "") for key in histograms}
    width = max(map(len, names.values()))
    lines = []
    for process in sorted({key.process for key in histograms}):
        keys = [key for key in histograms if key.process == process and histograms[key].count]
        steps = max(
            (histograms[key].count for key in keys if key.name in ("execute_model", "schedule")),
            default=0.0,
        )
        lines.append(f"{process or 'clients':{width + 2}}" + "".join(f"{h:>11}" for h in head))
        for key in keys:
            histogram = histograms[key]
            seconds = [histogram.sum / histogram.count, *map(histogram.percentile, PERCENTS)]
            if steps:
                seconds.append(histogram.sum / steps)
            cells = "".join(f"{second * 1e3:>11,.3f}" for second in seconds)
            lines.append(f"  {names[key]:{width}}{histogram.count:>11,.0f}{cells}")
        lines.append("")
    intervals = [h.sum for key, h in histograms.items() if key.name == "output_interval"]
    busy = max(intervals, default=0.0)  # every rank has the same steps
    if busy:
        lines.append(f"{tokens / busy:,.1f} tokens/s, pauses left out")
    return "".join(f"{escaped(line)}\n" for line in lines)


def _read(page: str) -> tuple[dict[Key, Histogram], float]:
    """Return the histograms in the page's order, and the number of sampled tokens."""
    histograms: dict[Key, Histogram] = defaultdict(Histogram)
    tokens = 0.0
    for name, ending, pairs, number in _SAMPLE.findall(page):
        labels = dict(_LABEL.findall(pairs))
        if name == _TOKENS:
            tokens += float(number) * (ending == "total")
            continue
        ours = _OURS.fullmatch(name)
        if not ours and name != _ITL:
            continue
        detail = labels.get("owner") or labels.get("part") or ""
        part = ours[1] if ours else "inter-token latency"
        histogram = histograms[Key(labels.get("process", "") if ours else "", part, detail)]
        if ending == "bucket":
            bound = float(labels["le"])
            histogram.buckets[bound] = histogram.buckets.get(bound, 0) + float(number)
        elif ending == "sum":
            histogram.sum += float(number)
    return histograms, tokens
