"""Closed-loop streams of chat completions, by aiohttp in processes of their own."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import aiohttp
import uvloop

from bench.errors import Fatal
from bench.harness.installations import end_with_parent
from bench.loops.served import running
from bench.servers.load import MARK, Load, request

#: Seconds for a reply to go on, for a warm-up, and for the processes to hand in their counts.
_PATIENCE, _WARM_UP, _LAST = 120.0, 180.0, 60.0
_HEADERS = {"Content-Type": "application/json"}


@dataclass
class Window:
    """Counts of chunks that a client has received in its window.

    A chunk is an event of a stream that has a token. Times are in seconds.

    Attributes:
        began: when it begins, by time.monotonic(), which all processes share.
        ended: when it ends.
        firsts: times to the first chunks.
        gaps: times between two chunks of a stream.
        tokens: in the chunks; for a model with its own weights, the chunks.
        requests: that ended.
        used: tokens of all requests that ended before the window's end, by the server's usage.
        counted: the same by what ``tokens`` counts.
        cpu: CPU seconds of each client process.
    """

    began: float
    ended: float
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    requests: int = 0
    used: int = 0
    counted: int = 0
    cpu: list[float] = field(default_factory=list)

    def add(self, other: Window) -> None:
        """Add the counts of another client."""
        for name in ("firsts", "gaps", "tokens", "requests", "used", "counted", "cpu"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Reply:
    """A reply that is read as it arrives.

    Args:
        body: of its request.
        window: counts it.
        generated: see :class:`bench.servers.load.Load`.
    """

    def __init__(self, body: dict[str, Any], window: Window, generated: bool) -> None:
        self._expected, self._window, self._generated = body["max_tokens"], window, generated
        self._last, self._first, self._rest = time.monotonic(), True, b""
        self._counted = self._used = 0
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that have arrived.

        Raises:
            Fatal: they hold an error.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            text = event.removeprefix(b"data: ")
            if text == b"[DONE]":
                self._done = True
            elif not event.startswith(b":"):  # a comment keeps the connection open
                self._take(json.loads(text), now)

    def end(self, now: float) -> None:
        """Take the end of the reply.

        Raises:
            Fatal: it is not whole.
        """
        counted = self._counted if self._generated else self._used
        if not self._done or {counted, self._used} != {self._expected}:
            raise Fatal(
                f"a stream ended with {self._counted} tokens in its chunks, {self._used} by its "
                f"usage and {self._expected} expected{'' if self._done else ', without [DONE]'}"
            )
        if now < self._window.ended:
            self._window.requests += now >= self._window.began
            self._window.used += self._used
            self._window.counted += self._counted

    def _take(self, chunk: dict[str, Any], now: float) -> None:
        if "choices" not in chunk:
            raise Fatal(f"a stream has an error: {json.dumps(chunk)[:500]}")
        if usage := chunk.get("usage"):
            self._used = usage["completion_tokens"]
        for choice in chunk["choices"]:
            text = choice["delta"].get("content")
            if not text:
                continue
            tokens = text.count(MARK) if self._generated else 1
            self._counted += tokens
            if self._window.began <= now < self._window.ended:
                waited = self._window.firsts if self._first else self._window.gaps
                waited.append(now - self._last)
                self._window.tokens += tokens
            self._first, self._last = False, now


class Clients:
    """Client processes, which share the streams.

    Args:
        url: of the server.
        load: the streams.
        processes: their number.
    """

    def __init__(self, url: str, load: Load, processes: int) -> None:
        self._url, self._load, self._processes = url, load, processes
        self._pool = ProcessPoolExecutor(
            processes, get_context("spawn"), end_with_parent, (signal.SIGKILL,)
        )

    def warm_up(self, case: str, seed: int) -> None:
        """Send a short request from each stream.

        Raises:
            Fatal: a request or a client process has failed, or does not end.
        """
        self._end(self._submit(_warm_up, case, seed), _WARM_UP)

    def begin(self, case: str, seed: int, began: float, ended: float) -> list[Future[Window]]:
        """Begin the streams, which end at the end of a window; see :class:`Window`."""
        return self._submit(_measure, case, seed, began, ended)

    def wait(self, clients: Sequence[Future[Any]], seconds: float) -> None:
        """Wait until all have ended, or for a number of seconds.

        Raises:
            Fatal: a request or a client process has failed.
        """
        done, _ = wait(clients, seconds, FIRST_EXCEPTION)
        for one in done:
            try:
                one.result()
            except BrokenProcessPool as error:
                raise Fatal(f"a client process has ended: {error}") from error

    def collect(self, clients: Sequence[Future[Window]], began: float, ended: float) -> Window:
        """Return the counts of all, once they have ended; raises as :meth:`warm_up`."""
        self._end(clients, ended - time.monotonic() + _LAST)
        whole = Window(began, ended)
        for one in clients:
            whole.add(one.result(0))
        return whole

    def _end(self, clients: Sequence[Future[Any]], seconds: float) -> None:
        self.wait(clients, seconds)
        if not all(one.done() for one in clients):
            raise Fatal(f"a client process has not ended after {seconds:.0f} s")

    def _submit(self, work: Any, *arguments: Any) -> list[Future[Any]]:
        try:
            return [
                self._pool.submit(
                    *(work, self._url, self._load),
                    *(range(first, self._load.streams, self._processes), *arguments),
                )
                for first in range(self._processes)
            ]
        except BrokenProcessPool as error:
            raise Fatal(f"a client process has ended: {error}") from error


def _warm_up(url: str, load: Load, streams: Sequence[int], case: str, seed: int) -> None:
    async def send() -> None:
        async with _session() as session:
            bodies = (request(load, case, seed, stream, -1) for stream in streams)
            window = Window(0.0, 0.0)
            await asyncio.gather(*(_send(session, url, body, window, load) for body in bodies))

    uvloop.run(send())


def _measure(
    url: str, load: Load, streams: Sequence[int], case: str, seed: int, began: float, ended: float
) -> Window:
    """Send the requests of some streams until the end of the window; return its counts."""
    window = Window(began, ended)

    async def stream(session: aiohttp.ClientSession, number: int) -> None:
        sent = 0
        while True:
            body = request(load, case, seed, number, sent)
            await _send(session, url, body, window, load)
            sent += 1

    async def send() -> None:
        async with _session() as session:
            loops = [asyncio.create_task(stream(session, number)) for number in streams]
            await running(loops, began - time.monotonic())
            spent = time.process_time()
            await running(loops, ended - time.monotonic())
            window.cpu.append(time.process_time() - spent)
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    uvloop.run(send())
    return window


def _session() -> aiohttp.ClientSession:
    patience = aiohttp.ClientTimeout(total=None, sock_read=_PATIENCE)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patience)


async def _send(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], window: Window, load: Load
) -> None:
    """Send a request, and count its reply.

    Raises:
        Fatal: it was refused, or its reply is not whole.
    """
    reply = Reply(body, window, load.generated)
    address, data = f"{url}/v1/chat/completions", json.dumps(body)
    try:
        async with session.post(address, data=data, headers=_HEADERS) as answer:
            if answer.status != 200:
                text = (await answer.text())[:500]
                raise Fatal(f"a request was refused with HTTP status {answer.status}: {text}")
            async for piece in answer.content.iter_any():
                reply.feed(piece, time.monotonic())
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        raise Fatal(f"a request failed: {type(error).__name__}: {error}") from error
    reply.end(time.monotonic())
