"""Edit RECORD, the installer's list of files, reversibly.

The format is a CSV of path, ``sha256=`` digest and size
(https://packaging.python.org/en/latest/specifications/recording-installed-packages/).
Only rows of exactly the expected bytes are replaced, and only rows under our own directory are
added or removed. Every other byte stays, valid CSV or not.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping

from overlay.patches import split_lines
from overlay.pin import PACKAGE


def row(path: str, data: bytes) -> bytes:
    """Return the row of a file, without a line end.

    >>> row("vllm/a.py", b"")
    b'vllm/a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0'
    """
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return b"%s,sha256=%s,%d" % (path.encode(), digest, len(data))


def overlay(data: bytes, changed: Mapping[bytes, bytes], added: Iterable[bytes]) -> bytes:
    r"""Return the RECORD of an overlaid installation.

    Args:
        data: the present RECORD, in any state.
        changed: pristine row to overlaid row, per replaced file.
        added: rows of our own files.

    >>> overlay(b"a,1\nb,1\n", {b"a,1": b"a,2"}, [b"vllm/v1/readiness/x.py,,"])
    b'a,2\nb,1\nvllm/v1/readiness/x.py,,\n'
    """
    text = restore(data, changed)
    lines = [_swap(line, changed) for line in split_lines(text)]
    end = b"\r\n" if lines and lines[-1].endswith(b"\r\n") else b"\n"
    if lines and not lines[-1].endswith(b"\n"):
        # Like the original, end without a line end: `restore` removes the one added in between.
        return b"".join(lines) + end + end.join(added)
    return b"".join(lines) + b"".join(line + end for line in added)


def restore(data: bytes, changed: Mapping[bytes, bytes]) -> bytes:
    r"""Undo :func:`overlay`, byte for byte; ``changed`` is the same mapping.

    >>> restore(b"a,2\nb,1\nvllm/v1/readiness/x.py,,\n", {b"a,1": b"a,2"})
    b'a,1\nb,1\n'
    """
    back = {new: old for old, new in changed.items()}
    lines = split_lines(data)
    kept = [_swap(line, back) for line in lines if not _is_ours(line)]
    if kept and lines and _is_ours(lines[-1]) and not lines[-1].endswith(b"\n"):
        kept[-1] = kept[-1].removesuffix(b"\n")
    return b"".join(kept)


def rows_of_ours(data: bytes) -> list[bytes]:
    r"""Return the rows of our own files, without line ends.

    >>> rows_of_ours(b"a,1\nvllm/v1/readiness/x.py,,\n")
    [b'vllm/v1/readiness/x.py,,']
    """
    return [line.rstrip(b"\r\n") for line in split_lines(data) if _is_ours(line)]


def _is_ours(line: bytes) -> bool:
    return line.startswith(PACKAGE.encode() + b"/")


def _swap(line: bytes, rows: Mapping[bytes, bytes]) -> bytes:
    bare = line.rstrip(b"\r\n")
    return rows.get(bare, bare) + line[len(bare) :]
