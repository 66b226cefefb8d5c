"""Outputs of requests as text that can be compared."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from itertools import zip_longest

#: For each request, the token id or the logprobs of each position, without line breaks. Floats
#: are written by repr, which keeps every bit.
Stream = Sequence[Sequence[str]]


def pack(stream: Stream) -> str:
    """Compress a stream to ASCII; equal only for equal streams."""
    text = "\n\n".join("\n".join(request) for request in stream)
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack(packed: str) -> Stream:
    """Return the stream that ``packed`` was made from."""
    text = zlib.decompress(base64.b64decode(packed)).decode()
    return [request.splitlines() for request in text.split("\n\n")]


def digest(packed: str) -> str:
    """Return a digest of the stream, independent of its compression."""
    return hashlib.sha256(zlib.decompress(base64.b64decode(packed))).hexdigest()


def first_difference(one: str, other: str) -> str | None:
    """Describe the first position in which two packed streams differ; None if they are equal."""
    if one == other:
        return None
    for request, pair in enumerate(zip_longest(unpack(one), unpack(other), fillvalue=())):
        for position, (a, b) in enumerate(zip_longest(*pair, fillvalue="nothing")):
            if a != b:
                return f"request {request}, position {position}: {_difference(a, b)}"
    return "in how they are stored"


def _difference(one: str, other: str) -> str:
    """Name the first word that differs; the logprobs of a position are several words."""
    pairs = list(zip_longest(one.split(" "), other.split(" "), fillvalue="nothing"))
    n, (a, b) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"{a} against {b}" if len(pairs) == 1 else f"word {n}: {a} against {b}"
