"""The step of the front end's output processor: the overlay's part, in the order of a message.

Each OutputProcessor has one :class:`OutputStep`, its attribute ``readiness``, which owns all state
that the overlay keeps of it. A request's state has a :class:`Continuation` in that attribute, and
the collector of a session :class:`Turns`. Modules without an attribute here keep no state.

**The path of an output** to its client. Upstream's functions are those of ``output_processor``,
unless their file is named.

1. ``add_request`` refuses a turn of a session that has ended (:mod:`~.turns`). Requests are checked
   before (:mod:`~.bad_requests`, :mod:`~.grammar_bounds`), and items sent once
   (:mod:`~.mm_caches`).
2. ``process_outputs`` passes a message to :meth:`Continuing.serve`. :meth:`Continuation.take`
   appends the token of a request that continues to its text, and to the :class:`Unread` of its
   collector. Upstream's loop processes the other outputs, with the stop strings of
   :mod:`~.stop_strings` and the latencies of :mod:`~.request_times`. A session continues unless
   :func:`turns.continues` ends it.
3. A collector holds outputs of a session's later turns apart (:func:`turns.keeps_apart`).
4. :meth:`Wakes.wake` wakes clients when the output handler of ``async_llm.py`` next lets others
   run: once it has read all messages, between parts of a large one, or if :meth:`Wakes.are_due`.
5. ``get`` and ``get_nowait`` make the output (:meth:`Unread.make`), with the logprobs of
   :mod:`~.logprobs`, and show the next turn. Servers have :mod:`~.chunks`
   make a chunk of it (:meth:`Stream.chat_choice`), and write its JSON
   (:meth:`Chunk.model_dump_json`) to the client's socket.
6. ``abort_requests`` drops a parent without children (:mod:`~.aborted_parents`), and ends a
   session.
"""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine import subclasses
from vllm.v1.readiness.frontend.continuing import Continuing, Wakes

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor


def of(processor: "OutputProcessor") -> "OutputStep":
    """Return the step of an output processor, made on first use."""
    return subclasses.remembered(processor, lambda: OutputStep(processor))


class OutputStep:
    """Parts of one output processor, which decide at their first call whether they are on."""

    def __init__(self, processor: "OutputProcessor") -> None:
        self.wakes = Wakes()
        self.continuing = Continuing(processor, self.wakes)
