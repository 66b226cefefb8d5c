"""What requests gave, as text that can be compared, hashed and kept."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from itertools import zip_longest

#: For each request, what each position gave: a token id, or that position's logprobs.
#: Neither holds a line break. Floats are written by repr, which keeps every bit.
Stream = Sequence[Sequence[str]]


def digest(stream: Stream) -> str:
    """A SHA-256 that is equal only for equal streams."""
    return hashlib.sha256(_text(stream).encode()).hexdigest()


def pack(stream: Stream) -> str:
    """The stream in a form that is short in JSON."""
    return base64.b64encode(zlib.compress(_text(stream).encode())).decode()


def unpack(packed: str) -> Stream:
    """The stream that ``packed`` was made from."""
    text = zlib.decompress(base64.b64decode(packed)).decode()
    return [request.splitlines() for request in text.split("\n\n")]


def first_difference(one: Stream, other: Stream) -> str | None:
    """Where two streams part, or None if they do not."""
    for request, pair in enumerate(zip_longest(one, other, fillvalue=())):
        for position, (a, b) in enumerate(zip_longest(*pair, fillvalue="nothing")):
            if a != b:
                return f"request {request}, position {position}: {_parted(a, b)}"
    return None


def _parted(one: str, other: str) -> str:
    """Two positions; of their words, as the logprobs of one position are, those that differ."""
    pairs = list(zip_longest(one.split(" "), other.split(" "), fillvalue="nothing"))
    at, (a, b) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"{a} against {b}" if len(pairs) == 1 else f"word {at}: {a} against {b}"


def _text(stream: Stream) -> str:
    return "\n\n".join("\n".join(request) for request in stream)
