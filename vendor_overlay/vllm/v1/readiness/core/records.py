"""State that the engine core keeps of a request: the attribute ``readiness`` of a Request."""

# mirrors: nothing

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.readiness.core.bounds import NEVER, Bounds
from vllm.v1.readiness.engine import subclasses

if TYPE_CHECKING:
    from vllm.v1.readiness.core.cache_keys import Items
    from vllm.v1.request import Request


@dataclass(slots=True)
class RequestRecord:
    """State of one request."""

    bounds: Bounds = NEVER  #: Lengths below which ``schedule`` and ``update-outputs`` serve it.
    #: Number of loads of its adapter in the keys of its blocks; None before the first key.
    loads: int | None = None
    items: "Items | None" = None  #: Its multimodal items; None before the first key.
    #: Number of output tokens before the newest step, of a request with a grammar.
    before: int | None = None
    #: Number of tokens checked for the reasoning's end; None before the first check.
    checked: int | None = None
    #: Position of the grammar's first token, if the newest step has ended the reasoning.
    begin: int | None = None


def of(request: "Request") -> RequestRecord:
    """Return the record of a request, made on first use."""
    return subclasses.remembered(request, RequestRecord)
