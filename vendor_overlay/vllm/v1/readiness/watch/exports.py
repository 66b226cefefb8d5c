"""Values that each process of an engine exports to the API server's /metrics.

The engine's first process names a directory in an environment variable, which the other processes
inherit. A process keeps its values in a memory-mapped file there, so an update costs no system
call. The first process creates the directory, and removes it when it exits normally. A process
exports nothing where the directory does not exist (on another host) or its disk is full.
"""

# mirrors: nothing

import atexit
import json
import logging
import os
import secrets
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from vllm.v1.readiness.engine import gauges, switch

if TYPE_CHECKING:
    from prometheus_client.mmap_dict import MmapedDict

logger = logging.getLogger(__name__)

#: Key of the exported info; its labels are a JSON object of strings.
INFO = "info"
#: Bytes of a process's file. A file never grows: without disk space, a write through the mapping
#: would end the process with SIGBUS.
_SIZE = 1 << 16
#: Upper bound of the bytes of an entry besides its key: length, padding, value and time.
_ENTRY = 28


class Exports:
    """The exported values of this process: a memory-mapped file, created by the first value."""

    def __init__(self) -> None:
        self._file: MmapedDict | None = None
        self._pid = 0
        self._keys: set[str] = set()
        self._room = 0

    def set(self, name: str, labels: object, value: int) -> None:
        """Export a value. ``labels`` must be serializable as JSON. See :meth:`write`."""
        self.write(json.dumps([name, labels]), value)

    def write(self, key: str, value: int) -> None:
        """Export a value by its key in the file: name and labels as JSON. Never raises.

        Called with the lock of :mod:`gauges` held, because the file is not thread-safe.
        """
        with suppress(OSError, ValueError, KeyError):
            if self._pid != os.getpid():  # a forked process has its own; a failure is not retried
                self._file, self._pid = None, os.getpid()
                self._keys, self._room = set(), _SIZE - 8
                self._file = self._create()
            if key not in self._keys:
                self._room -= len(key) + _ENTRY
                if self._file is None or self._room < 0:
                    return
                self._keys.add(key)
            assert self._file is not None
            self._file.write_value(key, value, time.time())  # type: ignore[no-untyped-call]

    @staticmethod
    def _create() -> "MmapedDict":
        from prometheus_client.mmap_dict import MmapedDict

        path = os.path.join(os.environ[switch.EXPORTS], f"{os.getpid()}.db")
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(file, 0, _SIZE)
        finally:
            os.close(file)
        return MmapedDict(path)  # type: ignore[no-untyped-call]

    def count_fallback(self, feature: str, reason: str, number: int) -> None:
        """Export the number of a feature's fallbacks; a listener of :mod:`gauges`."""
        self.set(gauges.FALLBACKS, [feature, reason], number)


_exports = Exports()


def begin(new: bool) -> None:
    """Export fallbacks, into a new directory if ``new`` or if no parent process named one."""
    if new or switch.EXPORTS not in os.environ:
        name = f"vllm-readiness-{secrets.token_hex(8)}"
        os.environ[switch.EXPORTS] = folder = os.path.join(tempfile.gettempdir(), name)
        with suppress(OSError):
            os.mkdir(folder, mode=0o700)
        atexit.register(_end, folder, os.getpid())
    if _exports.count_fallback not in gauges.listeners:
        gauges.listeners.append(_exports.count_fallback)


def _end(folder: str, owner: int) -> None:
    """Write the probe's snapshot if it names a file, and remove the directory."""
    if os.getpid() != owner:
        return
    try:
        if os.path.isabs(path := switch.probe() or ""):
            from prometheus_client import generate_latest
            from vllm.v1.metrics.prometheus import get_prometheus_registry

            with open(path, "wb") as file:
                file.write(generate_latest(get_prometheus_registry()))
    except Exception as error:
        logger.warning("%s: no snapshot: %s: %s", switch.PROBE, type(error).__name__, error)
    shutil.rmtree(folder, ignore_errors=True)


def write(key: str, value: int) -> None:
    """Export a value of this process; see :meth:`Exports.write`."""
    _exports.write(key, value)


def export_info(labels: dict[str, str]) -> None:
    """Export the labels of ``vllm:readiness_info``."""
    with gauges.lock:
        _exports.set(INFO, labels, 1)


def read() -> Iterator[tuple[str, object, int]]:
    """Yield name, labels and value of all processes' exports; skips files that cannot be read."""
    from prometheus_client.mmap_dict import MmapedDict

    folder = os.environ.get(switch.EXPORTS, "")
    with suppress(OSError):
        for entry in sorted(os.listdir(folder)):
            with suppress(OSError, RuntimeError, ValueError, TypeError, struct.error):
                path = os.path.join(folder, entry)
                values = MmapedDict.read_all_values_from_file(path)  # type: ignore[no-untyped-call]
                for key, value, *_ in values:
                    name, labels = json.loads(key)
                    yield name, labels, int(value)
