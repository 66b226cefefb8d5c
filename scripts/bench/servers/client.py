"""Closed-loop streams of chat completions, by aiohttp in processes of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import aiohttp
import uvloop

from bench.errors import Failure
from bench.harness.installations import end_with_parent
from bench.loops.rows import draw
from bench.loops.served import running

#: The model's name in requests.
NAME = "bench"
#: Begins each word of the generated model's tokenizer, and is nowhere else in it.
_MARK = "t"
#: Seconds for a reply to go on.
_PATIENCE = 120.0
#: Bytes of a line: a chunk may have the logprobs of many tokens.
_LONGEST = 1 << 24
_HEADERS = {"Content-Type": "application/json"}


def request(engine: str, case: str, seed: int, stream: int, number: int) -> dict[str, Any]:
    """Return the body of a request; see :func:`bench.loops.rows.draw`."""
    prompt, output, parameters = draw(engine, case, seed, stream, number)
    if (top := parameters.pop("logprobs", None)) is not None:
        parameters |= {"logprobs": True, "top_logprobs": top}
    content = " ".join(f"{_MARK}{token}" for token in prompt)
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **parameters,
    }


@dataclass
class Window:
    """Counts of chunks that a client has received in its window.

    A chunk is an event of a stream that has a token. Times are in seconds.

    Attributes:
        began: when it begins, by time.monotonic(), which all processes share.
        ended: when it ends.
        firsts: times to the first chunks.
        gaps: times between two chunks of a stream.
        tokens: in the chunks.
        requests: that ended.
        cpu: CPU seconds of each client process.
    """

    began: float
    ended: float
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    requests: int = 0
    cpu: list[float] = field(default_factory=list)

    def add(self, other: Window) -> None:
        """Add the counts of another client."""
        for name in ("firsts", "gaps", "tokens", "requests", "cpu"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Reply:
    """A reply that is read as it arrives.

    Args:
        expected: number of its tokens.
        window: counts it.
    """

    def __init__(self, expected: int, window: Window) -> None:
        self._expected, self._window = expected, window
        self._last, self._first, self._done = time.monotonic(), True, False
        self._counted = self._used = 0

    def take(self, line: bytes, now: float) -> None:
        """Take a line that has arrived.

        Raises:
            Failure: it is an error.
        """
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            self._done = True
        if not data.startswith(b"{"):  # a comment keeps the connection open
            return
        chunk = json.loads(data)
        if "choices" not in chunk:
            raise Failure(f"a stream has an error: {json.dumps(chunk)[:500]}")
        if usage := chunk.get("usage"):
            self._used = usage["completion_tokens"]
        for choice in chunk["choices"]:
            if not (text := choice["delta"].get("content")):
                continue
            tokens = text.count(_MARK)
            self._counted += tokens
            if self._window.began <= now < self._window.ended:
                waited = self._window.firsts if self._first else self._window.gaps
                waited.append(now - self._last)
                self._window.tokens += tokens
            self._first, self._last = False, now

    def end(self, now: float) -> None:
        """Take the end of the reply.

        Raises:
            Failure: it is not whole.
        """
        if not self._done or {self._counted, self._used} != {self._expected}:
            raise Failure(
                f"a stream ended with {self._counted} tokens in its chunks, {self._used} by its "
                f"usage and {self._expected} expected{'' if self._done else ', without [DONE]'}"
            )
        self._window.requests += self._window.began <= now < self._window.ended


class Clients:
    """Client processes, which share the streams.

    Args:
        url: of the server.
        engine: a name of :data:`bench.loops.rows.ENGINES`, which gives the lengths.
        streams: requests at a time.
        processes: their number.
    """

    def __init__(self, url: str, engine: str, streams: int, processes: int) -> None:
        self._about = (url, engine)
        self._places = [range(first, streams, processes) for first in range(processes)]
        spawned = get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, spawned, end_with_parent, (signal.SIGKILL,))

    def warm_up(self, case: str, seed: int) -> None:
        """Send a short request from each stream; raises as :meth:`wait`."""
        self.wait(self.begin(case, seed), None)

    def begin(self, case: str, seed: int, window: Window | None = None) -> list[Future[Any]]:
        """Begin the streams, which end at the end of the window, or a short request of each."""
        return [
            self._pool.submit(_run, *self._about, places, case, seed, window)
            for places in self._places
        ]

    def wait(self, clients: Sequence[Future[Any]], seconds: float | None) -> None:
        """Wait until all have ended, or for a number of seconds.

        Raises:
            Failure: a request has failed.
            BrokenProcessPool: a client process has ended.
        """
        for one in wait(clients, seconds, FIRST_EXCEPTION).done:
            one.result()


def _run(
    url: str, engine: str, places: Sequence[int], case: str, seed: int, window: Window | None
) -> Window | None:
    """Send the requests of some streams; see :meth:`Clients.begin`. Return the window's counts."""
    uvloop.run(_send_all(url, engine, places, case, seed, window))
    return window


async def _send_all(
    url: str, engine: str, places: Sequence[int], case: str, seed: int, window: Window | None
) -> None:
    async def stream(place: int) -> None:
        for number in itertools.count() if window else [-1]:
            body = request(engine, case, seed, place, number)
            await _send(session, url, body, window or Window(0.0, 0.0))

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=_PATIENCE),
        read_bufsize=_LONGEST,
    ) as session:
        loops = [asyncio.create_task(stream(place)) for place in places]
        if window is None:
            await asyncio.gather(*loops)
            return
        await running(loops, window.began - time.monotonic())
        spent = time.process_time()
        await running(loops, window.ended - time.monotonic())
        window.cpu.append(time.process_time() - spent)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


async def _send(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], window: Window
) -> None:
    """Send a request, and count its reply.

    Raises:
        Failure: it was refused, or its reply is not whole.
    """
    reply = Reply(body["max_tokens"], window)
    address, data = f"{url}/v1/chat/completions", json.dumps(body)
    try:
        async with session.post(address, data=data, headers=_HEADERS) as answer:
            if answer.status != 200:
                text = (await answer.text())[:500]
                raise Failure(f"a request was refused with HTTP status {answer.status}: {text}")
            async for line in answer.content:
                reply.take(line, time.monotonic())
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        raise Failure(f"a request failed: {type(error).__name__}: {error}") from error
    reply.end(time.monotonic())
