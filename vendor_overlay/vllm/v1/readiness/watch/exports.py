"""Values that each process of an engine exports to the API server's /metrics.

The engine's first process names a directory in an environment variable, which the other processes
inherit. A process keeps its values in a memory-mapped file there, so an update costs no system
call. The directory is removed when the first process exits. On another host, where the directory
does not exist, each process makes one that no server reads.
"""

# mirrors: nothing

import atexit
import json
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

#: Key of the exported info; its labels are a JSON object of strings.
INFO = "info"


class Exports:
    """The exported values of this process: a memory-mapped file, created by the first value."""

    def __init__(self) -> None:
        self._file: MmapedDict | None = None
        self._pid = 0

    def set(self, name: str, labels: object, value: int) -> None:
        """Export a value. ``labels`` must be serializable as JSON. Never raises.

        Called with the lock of :mod:`gauges` held, because the file is not thread-safe.
        """
        with suppress(OSError, ValueError, KeyError):
            if self._file is None or self._pid != os.getpid():  # a forked process has its own
                self._file, self._pid = self._create(), os.getpid()
            key = json.dumps([name, labels])
            self._file.write_value(key, value, time.time())  # type: ignore[no-untyped-call]

    @staticmethod
    def _create() -> "MmapedDict":
        from prometheus_client.mmap_dict import MmapedDict

        folder = os.environ[switch.EXPORTS]
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, f"{os.getpid()}.db")
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
        atexit.register(_remove, folder, os.getpid())
    if _exports.count_fallback not in gauges.listeners:
        gauges.listeners.append(_exports.count_fallback)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


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
