"""Build the wheel of the tool: patches, runtime and command, without upstream's code.

The format is https://packaging.python.org/en/latest/specifications/binary-distribution-format/.
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Mapping

from overlay import record
from overlay.hints import COMMAND, VERSION, WHEEL
from overlay.source import Overlay

#: The first time that a zip archive can hold, 1980-01-01, in seconds.
_FIRST = 315532800

_METADATA = """\
Metadata-Version: 2.4
Name: {command}
Version: {version}
Summary: Patches an installed vLLM {release} so that no request makes the whole batch wait
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.10
Description-Content-Type: text/markdown

Installed beside vLLM {release}:

    {command} apply
    {command} exec -- vllm serve MODEL
    {command} revert

Installed elsewhere, it takes the active environment, or the one that `--venv DIR` or
`--python INTERPRETER` names. `{command} --help` lists the commands. Uninstalling this package
leaves the overlay on: revert first, or install the package again to revert.
"""
_FORMAT = "Wheel-Version: 1.0\nGenerator: {command} ({version})\nRoot-Is-Purelib: true\n"
_TAG = "py3-none-any"


def wheel(overlay: Overlay, version: str, seconds: int) -> tuple[str, bytes]:
    """Return the name and the bytes of the wheel of ``overlay``.

    ``version`` is the wheel's, with a label unless it is released. ``seconds`` is the time of all
    files. Files are stored uncompressed, because compressors differ between Python versions.

    Raises:
        OverlayError: a file of the overlay is missing, or fails its checksum.
    """
    info = f"{WHEEL}-{version}.dist-info"
    facts = {"command": COMMAND, "version": version, "release": overlay.pin.release}
    files = {f"{WHEEL}/{path}": data for path, data in _package(overlay).items()}
    files[f"{WHEEL}/{VERSION}"] = f"{version}\n".encode()
    texts = {
        "METADATA": _METADATA.format(**facts),
        "WHEEL": f"{_FORMAT.format(**facts)}Tag: {_TAG}\n",
        "entry_points.txt": f"[console_scripts]\n{COMMAND} = {WHEEL}.__main__:main\n",
    }
    files |= {f"{info}/{name}": text.encode() for name, text in texts.items()}
    files[f"{info}/licenses/LICENSE"] = (overlay.root / "LICENSE").read_bytes()
    rows = [record.row(path, data) for path, data in sorted(files.items())]
    files[f"{info}/RECORD"] = b"".join(row + b"\n" for row in (*rows, f"{info}/RECORD,,".encode()))
    return f"{WHEEL}-{version}-{_TAG}.whl", _zipped(files, seconds)


def _package(overlay: Overlay) -> Mapping[str, bytes]:
    """Return the files of the package: the overlay's own, the tool, and its entry point."""
    root = overlay.root
    added = {overlay.origin_of(path): overlay.added_bytes(path) for path in overlay.added}
    files = {path.relative_to(root).as_posix(): data for path, data in added.items()}
    for path in (root / "scripts" / "overlay").iterdir():
        if path.is_file():
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    files["__init__.py"] = b'"""The readiness overlay for vLLM, and the tool that applies it."""\n'
    files["__main__.py"] = (root / "scripts" / "series" / "command.py").read_bytes()
    return files


def _zipped(files: Mapping[str, bytes], seconds: int) -> bytes:
    date = time.gmtime(max(seconds, _FIRST))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        # Metadata last, as the specification recommends.
        for path in sorted(files, key=lambda path: (".dist-info/" in path, path)):
            entry = zipfile.ZipInfo(path, date[:6])
            entry.external_attr, entry.create_system = 0o100644 << 16, 3
            archive.writestr(entry, files[path])
    return data.getvalue()
