"""A synthetic overlay over a synthetic vLLM of two small modules.

Small enough for thousands of runs. Tests that use :mod:`support.sites` cover the real files.
"""

import base64
import difflib
import hashlib
from collections.abc import Mapping
from pathlib import Path

from overlay import commands, pin
from overlay.commands import Options
from overlay.installation import locate
from overlay.patches import Series
from overlay.source import Overlay
from series.check import FIELDS
from series.checksums import expected_pin

PRISTINE = {
    "vllm/one.py": b"A = 1\nB = 2\nC = 3\n",
    "vllm/v1/two.py": b"def f():\n    return 1\n",
}
OVERLAID = {
    "vllm/one.py": b"# changed\nA = 1\nC = 33\n",
    "vllm/v1/two.py": b"# changed\ndef f():\n    return 1\n\n\nG = f()",
}
OURS = {"vllm/v1/readiness/__init__.py": b'"""Ours."""\n', "vllm/v1/readiness/a.py": b"X = 1\n"}
#: The made release: no other file of these tests depends on its number.
RELEASE = "0.22.0"
INFO = f"vllm-{RELEASE}.dist-info"
METADATA = f"Metadata-Version: 2.4\nName: vllm\nVersion: {RELEASE}\n\ntext\n"
HEADER = "".join(f"{name}: text\n" for name in FIELDS)


def unified(path: str, old: bytes, new: bytes) -> bytes:
    """A diff without context lines."""
    before, after = (data.decode().splitlines(keepends=True) for data in (old, new))
    text = ""
    for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=0):
        text += line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
    return text.encode()


def overlay(
    root: Path,
    pristine: Mapping[str, bytes] = PRISTINE,
    overlaid: Mapping[str, bytes] = OVERLAID,
    ours: Mapping[str, bytes] = OURS,
    version: str = "0.0.1",
) -> Overlay:
    """Write an overlay into ``root`` and read it."""
    files = {
        "patches/series": b"0001-all.patch\n",
        "patches/0001-all.patch": HEADER.encode()
        + b"\n"
        + b"".join(unified(path, old, overlaid[path]) for path, old in pristine.items()),
        "vendor_overlay/vllm/v1/readiness/version.py": f'__version__ = "{version}"\n'.encode(),
        **{f"vendor_overlay/{path}": data for path, data in ours.items()},
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    empty = pin.Pin(RELEASE, version, {}, {}, {})
    expected = expected_pin(root, empty, Series.load(root / "patches"), pristine.__getitem__)
    (root / pin.NAME).write_text(expected.dumps())
    return Overlay.load(root)


def install(site: Path, pristine: Mapping[str, bytes] = PRISTINE) -> Path:
    """Write the synthetic vLLM into ``site``, with the RECORD an installer writes."""
    files = {
        "vllm/__init__.py": b"",
        "vllm/v1/__init__.py": b"",
        **pristine,
        f"{INFO}/METADATA": METADATA.encode(),
    }
    rows = ""
    for path, data in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows += f"{path},sha256={digest},{len(data)}\n"
    (site / INFO / "RECORD").write_text(rows + f"{INFO}/RECORD,,\n")
    return site


def overlaid(
    folder: Path,
    pristine: Mapping[str, bytes] = PRISTINE,
    overlaid: Mapping[str, bytes] = OVERLAID,
    ours: Mapping[str, bytes] = OURS,
) -> Path:
    """Install the synthetic vLLM, and lay a version 0.0.1 of an overlay over it."""
    other = overlay(folder / "other", pristine, overlaid, ours)
    site = install(folder / "site", pristine)
    commands.apply(locate(site=str(site)), other, Options(force=True))
    return site
