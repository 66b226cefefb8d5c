"""The probe's figures as Prometheus histograms, on vLLM's own /metrics.

They are recorded in workers and engine cores, and asked for in the server, which is another
process. So each process that records counts in :class:`Histograms` and writes them to a small
file beside its record file every few seconds, and the server's :class:`ProbeCollector` reads
these files when it is scraped. A step sees none of this.

For the probe's file FILE and a process labelled ``rank0`` the file is FILE.rank0.metrics. It
says whose it is; of a process that has ended nothing is shown.

``expose`` is called by ``vllm.v1.metrics.prometheus`` where the overlay is installed, and
``install`` by a plugin where it is not. Without VLLM_READINESS_PROBE neither does anything.
"""

import contextlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.v1.readiness import switch

if TYPE_CHECKING:
    import numpy.typing as npt
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import HistogramMetricFamily

logger = init_logger(__name__)

#: How the file of a process ends.
SUFFIX = ".metrics"
#: Of the file's form. A file of another form is left unread.
FORM = 1

#: The buckets' upper bounds in nanoseconds, each belonging to its bucket: 1 us to 10 s.
BOUNDS = (*(step * 10**power for power in range(2, 9) for step in (10, 25, 50)), 10**10)

#: Kind of record to its metric's name and description.
METRICS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "execute_model": ("execute_model", "Host time in the worker's execute_model."),
        "sample_tokens": ("sample_tokens", "Host time in the worker's sample_tokens."),
        "get_output": ("get_output", "Host time in getting a step's output, waits included."),
        "fence": ("fence", "Host time in one wait for the device, by who waited."),
        "readback": ("readback", "Time from the start of a step's copy to the host to its end."),
        "output": ("output_interval", "Time between two outputs of a worker, pauses left out."),
        "schedule": ("schedule", "Host time in the scheduler's schedule."),
        "update_from_output": (
            "update_from_output",
            "Host time in the scheduler's update_from_output.",
        ),
    }
)
#: The kind whose records say who waited.
_OWNED = "fence"
_UNKNOWN = "unknown"
#: The kind whose ``owner`` is the number of requests that its step continues. One that
#: continues none comes after a pause, which is no request's.
_INTERVAL = "output"

#: What a file may hold: some hundred times what it does.
_LARGEST_FILE = 1 << 20
_LARGEST_NUMBER = 1 << 80

_BOOT = "/proc/sys/kernel/random/boot_id"

Key = tuple[str, str | None]


class Series(NamedTuple):
    """One histogram, of one process.

    Attributes:
        counts: of each bucket alone; the last one's is above all bounds.
        total: the sum of what was counted, in nanoseconds.
    """

    counts: list[int]
    total: int


class Histograms:
    """What one process has recorded since it began, counted.

    Used by one thread, beside the one that records.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        """Nothing has been counted yet.

        Args:
            kinds: what a record's ``kind`` is an index into; those that are not in
                :data:`METRICS` are not counted.
        """
        self.kinds = tuple(kinds)
        self.series: dict[Key, Series] = {}
        self._bounds = np.asarray(BOUNDS, dtype=np.int64)
        self._pid = os.getpid()
        self._instance = _instance(self._pid)
        self._path: str | None = None
        self._failed = False

    def update(self, records: "npt.NDArray[np.int64]", names: Sequence[str]) -> None:
        """Count records that were not counted before.

        Args:
            records: [n, 6], int64; kind, began, ended, step, owner, extra. One that ended
                before it began is not counted, nor an output that continues no request.
            names: what the owner of a fence is an index into.
        """
        kinds, began, ended, owners = records[:, 0], records[:, 1], records[:, 2], records[:, 4]
        lasted = ended - began
        whole = lasted >= 0
        for index, kind in enumerate(self.kinds):
            if kind not in METRICS:
                continue
            of_kind = whole & (kinds == index)
            if kind == _INTERVAL:
                of_kind &= owners > 0
            if kind != _OWNED:
                self._add((kind, None), lasted[of_kind])
                continue
            for owner in np.unique(owners[of_kind]).tolist():
                name = names[owner] if 0 <= owner < len(names) else _UNKNOWN
                self._add((kind, name), lasted[of_kind & (owners == owner)])

    def _add(self, key: Key, lasted: "npt.NDArray[np.int64]") -> None:
        if not lasted.size:
            return
        buckets = np.searchsorted(self._bounds, lasted, side="left")
        added = np.bincount(buckets, minlength=len(BOUNDS) + 1)
        before = self.series.get(key, Series([0] * len(added), 0))
        counts = [old + new for old, new in zip(before.counts, added.tolist(), strict=True)]
        self.series[key] = Series(counts, before.total + int(lasted.sum()))

    def write(self, path: str) -> None:
        """Put the file in place of what was there before, all at once.

        One that was written under another name goes: a process that turns out to run a
        worker gets another label. What goes wrong is logged once: figures are no reason for
        a process to end.

        Args:
            path: FILE.label.metrics, where the label, such as ``rank0``, has no dot.
        """
        if path != self._path:
            self.remove()
        content = {
            "form": FORM,
            "label": path.removesuffix(SUFFIX).rpartition(".")[2],
            "pid": self._pid,
            "instance": self._instance,
            "bounds": BOUNDS,
            "series": [
                {"kind": kind, "owner": owner, "counts": series.counts, "total": series.total}
                for (kind, owner), series in self.series.items()
            ],
        }
        new = f"{path}.{self._pid}.new"
        try:
            with open(new, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(new, path)
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "/metrics will lack figures, %s cannot be written: %s",
                    *(switch.shown(path), error),
                )
            self._failed = True
            with contextlib.suppress(OSError):
                os.unlink(new)
        else:
            self._path = path

    def remove(self) -> None:
        """Take the file away; at the process's end."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = None


class ProbeCollector:
    """Gives a Prometheus registry the histograms of this host's living processes.

    A file that is not what it should be is left out, and logged once; none of it ends a
    scrape, which carries vLLM's own metrics.
    """

    def __init__(self, file: str) -> None:
        """Nothing is read yet.

        Args:
            file: what VLLM_READINESS_PROBE names.
        """
        self.file = file

    def describe(self) -> "Iterator[HistogramMetricFamily]":
        """The metrics, without figures."""
        yield from _families().values()

    def collect(self) -> "Iterator[HistogramMetricFamily]":
        """The metrics, with the figures that the files hold now."""
        from prometheus_client import utils  # a worker has no use for it

        families = _families()
        seconds = [*(bound / 1e9 for bound in BOUNDS), float("inf")]
        limits: list[str] = list(map(utils.floatToGoString, seconds))
        for label, path in self._files():
            for (kind, owner), (counts, total) in _figures(path, label).items():
                labels = [label] if owner is None else [label, owner]
                buckets = list(zip(limits, map(float, accumulate(counts)), strict=True))
                families[kind].add_metric(labels, buckets, total / 1e9)
        yield from families.values()

    def _files(self) -> list[tuple[str, str]]:
        """The label that each file's name says, and its path."""
        folder, name = os.path.split(self.file)
        prefix = f"{name}."
        try:
            with os.scandir(folder) as entries:
                return sorted(
                    (entry.name[len(prefix) : -len(SUFFIX)], entry.path)
                    for entry in entries
                    if entry.name.startswith(prefix)
                    and entry.name.endswith(SUFFIX)
                    and entry.is_file()
                )
        except OSError as error:
            _warn(folder, error)
            return []


def expose(registry: "CollectorRegistry") -> "CollectorRegistry":
    """Have ``registry`` carry the probe's histograms, if there is a probe.

    Args:
        registry: that /metrics shows; one that carries them already is left as it is.

    Returns:
        ``registry``.

    Raises:
        PathError: VLLM_READINESS_PROBE names a file that cannot be written.
    """
    file = switch.probe()
    if file is not None:
        _register(registry, file)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _follow_multiprocess(file)
    return registry


def install() -> None:
    """Have /metrics carry the probe's histograms where ``expose`` is not called: stock vLLM.

    Before the server makes its routes, in its process; in others it is of no consequence.
    Doing it again, or where the overlay is installed, changes nothing.

    Raises:
        PathError: VLLM_READINESS_PROBE names a file that cannot be written.
    """
    if switch.probe() is None:
        return
    from vllm.v1.metrics import prometheus

    original = prometheus.get_prometheus_registry
    if getattr(original, "__module__", None) == __name__:
        return

    def get_prometheus_registry() -> "CollectorRegistry":
        return expose(original())

    # The module that makes the routes may have imported it by name.
    for name, module in list(sys.modules.items()):
        there = getattr(module, "__dict__", {})
        if name.startswith("vllm.") and there.get("get_prometheus_registry") is original:
            there["get_prometheus_registry"] = get_prometheus_registry


#: The registries that carry the probe's histograms.
_carriers: "weakref.WeakSet[CollectorRegistry]" = weakref.WeakSet()
_lock = threading.Lock()
#: The files that have been warned of.
_warned: set[str] = set()


def _register(registry: "CollectorRegistry", file: str) -> None:
    with _lock:
        if registry in _carriers:
            return
        try:
            registry.register(ProbeCollector(file))
        except ValueError:
            _warn(file, "other metrics bear its metrics' names")
        _carriers.add(registry)


def _follow_multiprocess(file: str) -> None:
    """Have every registry that shows the metrics of many servers carry the histograms.

    With several API servers the route of /metrics (prometheus_fastapi_instrumentator's) does
    not show the registry that it was given: it makes one a scrape, and all that it puts in is
    a ``prometheus_client.multiprocess.MultiProcessCollector``, which is looked up there.
    """
    from prometheus_client import multiprocess

    original = multiprocess.MultiProcessCollector
    if original.__module__ == __name__:
        return

    class MultiProcessCollector(original):  # type: ignore[misc, valid-type]
        def __init__(self, registry: "CollectorRegistry | None", path: str | None = None) -> None:
            super().__init__(registry, path)
            if registry is not None:
                _register(registry, file)

    multiprocess.MultiProcessCollector = MultiProcessCollector  # type: ignore[misc]


def _families() -> "dict[str, HistogramMetricFamily]":
    """Kind of record to its metric, without figures."""
    from prometheus_client.core import HistogramMetricFamily

    return {
        kind: HistogramMetricFamily(
            f"vllm:readiness_{name}_seconds",
            description,
            labels=["process", "owner"] if kind == _OWNED else ["process"],
        )
        for kind, (name, description) in METRICS.items()
    }


def _figures(path: str, label: str) -> dict[Key, Series]:
    """What the file of a living process holds; nothing if it is not one."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(_LARGEST_FILE))
        if content["label"] != label:
            return {}  # the probe's file of another server begins like ours
        if content["instance"] is None or content["instance"] != _instance(content["pid"]):
            return {}
        label.encode()  # a name of odd bytes cannot be shown
        return _checked(content)
    except FileNotFoundError:
        return {}  # its process has just ended
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        _warn(path, error)
        return {}


def _checked(content: dict[str, object]) -> dict[Key, Series]:
    """The histograms of a file.

    Raises:
        ValueError: they are not what :meth:`Histograms.write` writes, or are no text.
        TypeError, LookupError: the same.
    """
    if content["form"] != FORM or content["bounds"] != list(BOUNDS):
        raise ValueError("it was written by another version")
    found: dict[Key, Series] = {}
    listed = content["series"]
    if not isinstance(listed, list):
        raise TypeError("its series are not a list")
    for entry in listed:
        kind, owner = entry["kind"], entry["owner"]
        counts, total = entry["counts"], entry["total"]
        if kind not in METRICS or isinstance(owner, str) != (kind == _OWNED):
            raise ValueError(f"{kind!r} by {owner!r} is nothing that is recorded")
        if len(counts) != len(BOUNDS) + 1 or not all(map(_is_count, (*counts, total))):
            raise ValueError(f"{kind!r} is not counted in whole numbers, one a bucket")
        str(owner).encode()  # half a surrogate pair cannot be shown
        if (kind, owner) in found:
            raise ValueError(f"{kind!r} by {owner!r} is there twice")
        found[kind, owner] = Series(counts, total)
    return found


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_NUMBER


def boot() -> str:
    """What tells this host's clock from any other's; empty if it is not known."""
    with contextlib.suppress(OSError), open(_BOOT, encoding="ascii") as file:
        return file.read().strip()
    return ""


def _instance(pid: int) -> str | None:
    """What tells a process from all others, on any host and of any time; None: it has ended."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            # The name before the last parenthesis may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    state, began = fields[0], fields[19]
    return None if state in (b"Z", b"X") else f"{boot()} {pid} {began.decode()}"


def _warn(path: str, reason: Exception | str) -> None:
    """Say once that the file, or the directory, is of no use."""
    if path not in _warned:
        _warned.add(path)
        if isinstance(reason, Exception):
            reason = f"{type(reason).__name__}: {reason}"
        logger.warning("/metrics leaves out %s: %s", switch.shown(path), reason)
