"""Histograms of one process's records, and the file from which the API server reads them.

Every few seconds, each recording process writes its :class:`Histograms` and the values of
:mod:`~vllm.v1.readiness.engine.gauges` to ``FILE.LABEL.metrics``, such as ``FILE.rank0.metrics``.
The file identifies its process; :func:`read` ignores files of ended processes.

prometheus_client's multiprocess mode is unsuitable: its counters outlive their process, it needs
PROMETHEUS_MULTIPROC_DIR at import, and on a full disk SIGBUS kills the writing process.
"""

# mirrors: nothing

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.v1.readiness.engine import gauges, switch

if TYPE_CHECKING:
    import numpy.typing as npt

logger = init_logger(__name__)

SUFFIX = ".metrics"
#: Version of the file's format; files of other versions are not read.
FORMAT = 2
#: Inclusive upper bounds of the buckets in nanoseconds: 1 us to 10 s.
BOUNDS = (*(step * 10**power for power in range(2, 9) for step in (10, 25, 50)), 10**10)
#: Names and descriptions of the metrics, by kind of record.
METRICS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "execute_model": ("execute_model", "Host time in the worker's execute_model."),
        "sample_tokens": ("sample_tokens", "Host time in the worker's sample_tokens."),
        "get_output": ("get_output", "Host time in getting a step's output, waits included."),
        "fence": ("fence", "Host time in one wait for the device, by owner."),
        "readback": ("readback", "Time from the start of a step's copy to the host to its end."),
        "output": ("output_interval", "Time between two outputs of a worker, pauses left out."),
        "schedule": ("schedule", "Host time in the scheduler's schedule."),
        "update_from_output": (
            "update_from_output",
            "Host time in the scheduler's update_from_output.",
        ),
    }
)
#: The kind with one histogram per owner.
OWNED = "fence"
_UNKNOWN_OWNER = "unknown"
#: The kind whose ``owner`` is the step's number of cached requests, which is 0 after a pause.
_INTERVAL = "output"
#: Maximum file size and integer that :func:`read` accepts, far above real values.
_LARGEST_FILE, _LARGEST_NUMBER = 1 << 20, 1 << 80
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

#: A kind of record, and the owner if the kind is :data:`OWNED`.
Key = tuple[str, str | None]


class Series(NamedTuple):
    """Counts per bucket, not cumulative, and the sum in ns. The last bucket has no bound."""

    counts: list[int]
    total: int


class Contents(NamedTuple):
    """Contents of a process's file: histograms by key, and values of gauges and counters."""

    histograms: dict[Key, Series]
    values: list[gauges.Value]


class Histograms:
    """Histograms of the durations recorded by one process. Not thread-safe."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = tuple(kinds)
        self.series: dict[Key, Series] = {}
        self._bounds = np.asarray(BOUNDS, dtype=np.int64)
        self._pid = os.getpid()
        self._instance = process_instance(self._pid)
        self._path: str | None = None
        self._failed = False

    def update(self, records: "npt.NDArray[np.int64]", owners: Sequence[str]) -> None:
        """Count new records, except negative durations and outputs after a pause.

        ``records``, int64 [records, 6], has the fields :data:`ring.FIELDS`. ``owners`` maps the
        field ``owner`` of a fence to a name.
        """
        kinds, began, ended, owner = records[:, 0], records[:, 1], records[:, 2], records[:, 4]
        durations = ended - began
        valid = durations >= 0
        for index, kind in enumerate(self.kinds):
            if kind not in METRICS:
                continue
            counted = valid & (kinds == index)
            if kind == _INTERVAL:
                counted &= owner > 0
            if kind != OWNED:
                self._add((kind, None), durations[counted])
                continue
            for number in np.unique(owner[counted]).tolist():
                name = owners[number] if 0 <= number < len(owners) else _UNKNOWN_OWNER
                self._add((kind, name), durations[counted & (owner == number)])

    def _add(self, key: Key, durations: "npt.NDArray[np.int64]") -> None:
        if not durations.size:
            return
        buckets = np.searchsorted(self._bounds, durations, side="left")
        added = np.bincount(buckets, minlength=len(BOUNDS) + 1)
        before = self.series.get(key, Series([0] * len(added), 0))
        counts = [old + new for old, new in zip(before.counts, added.tolist(), strict=True)]
        self.series[key] = Series(counts, before.total + int(durations.sum()))

    def write(self, path: str, values: Sequence[gauges.Value] = ()) -> None:
        """Replace the file ``path`` atomically; log only the first error.

        Remove the file at a previous path: the label of a process changes once it has a worker.
        A label, such as ``rank0``, has no dot. ``values`` are gauges and counters.
        """
        if path != self._path:
            self.remove()
        content = {
            "form": FORMAT,
            "label": path.removesuffix(SUFFIX).rpartition(".")[2],
            "pid": self._pid,
            "instance": self._instance,
            "bounds": BOUNDS,
            "series": [
                {"kind": kind, "owner": owner, "counts": series.counts, "total": series.total}
                for (kind, owner), series in self.series.items()
            ],
            "values": values,
        }
        staged = f"{path}.{self._pid}.new"
        try:
            with open(staged, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(staged, path)
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "/metrics will lack histograms because %s cannot be written: %s",
                    *(switch.shown(path), error),
                )
            self._failed = True
            with contextlib.suppress(OSError):
                os.unlink(staged)
        else:
            self._path = path

    def remove(self) -> None:
        """Remove the file."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = None


def read(path: str, label: str) -> Contents:
    """Read the file of the process with ``label``; empty if the process has ended.

    Raises:
        OSError: the file cannot be read.
        ValueError, TypeError, LookupError, RecursionError: its content is invalid.
    """
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_LARGEST_FILE))
    except FileNotFoundError:
        return Contents({}, [])  # its process has exited
    if (
        content["label"] != label  # another probe's FILE may begin with our FILE
        or content["instance"] is None
        or content["instance"] != process_instance(content["pid"])
    ):
        return Contents({}, [])
    label.encode()  # raises for bytes that are not valid text
    return _validated(content)


def _validated(content: dict[str, object]) -> Contents:
    if content["form"] != FORMAT or content["bounds"] != list(BOUNDS):
        raise ValueError("it was written by another version")
    histograms: dict[Key, Series] = {}
    entries = content["series"]
    if not isinstance(entries, list):
        raise TypeError("its series are not a list")
    for entry in entries:
        kind, owner = entry["kind"], entry["owner"]
        counts, total = entry["counts"], entry["total"]
        if kind not in METRICS or isinstance(owner, str) != (kind == OWNED):
            raise ValueError(f"unknown kind {kind!r} by {owner!r}")
        if len(counts) != len(BOUNDS) + 1 or not all(map(_is_count, (*counts, total))):
            raise ValueError(f"{kind!r} does not have one integer per bucket")
        str(owner).encode()  # raises for a lone surrogate
        if (kind, owner) in histograms:
            raise ValueError(f"duplicate {kind!r} by {owner!r}")
        histograms[kind, owner] = Series(counts, total)
    return Contents(histograms, _values(content["values"]))


def _values(entries: object) -> list[gauges.Value]:
    if not isinstance(entries, list):
        raise TypeError("its values are not a list")
    values = [gauges.Value(metric, tuple(labels), value) for metric, labels, value in entries]
    for metric, labels, value in values:
        if len(labels) != len(gauges.METRICS[metric].labels) or not _is_count(value):
            raise ValueError(f"{metric!r} has other labels, or no integer")
        "".join(labels).encode()  # raises for non-strings and lone surrogates
    if len({value[:2] for value in values}) < len(values):
        raise ValueError("duplicate value")
    return values


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_NUMBER


def boot_id() -> str:
    """Return the id of this host's boot, which identifies its clock; empty if unknown."""
    with contextlib.suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()
    return ""


def process_instance(pid: int) -> str | None:
    """Return a globally unique id of a running process; None if it has ended."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            # The name before the last parenthesis may contain any character.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    state, start_time = fields[0], fields[19]
    return None if state in (b"Z", b"X") else f"{boot_id()} {pid} {start_time.decode()}"
