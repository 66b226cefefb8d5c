"""The probe's records as a Chrome trace, which https://ui.perfetto.dev opens.

Each process of the engine has a track for each thread of the host, and one for the copies from
the device to the host. An arrow leads from the ``sample_tokens`` that started a copy to the copy,
and from there to the end of the ``get_output`` that took it. (The Trace Event Format is a list
of events with times in microseconds.)

Processes and main threads have the system's numbers, and ``baseTimeNanoseconds`` is the Unix time
at which the trace's clock was 0, as in torch's traces, so that a trace can be merged with those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from probe.engines import several_hosts
from probe.records import Process, Span

#: Numbers reserved for the tracks of a process, but that of its main thread: above all numbers
#: of processes. Perfetto keeps 32 bits of a track's number, fewer than a thread's ident has, and 0
#: has another meaning.
_TRACKS = 1000
_FIRST = 1 << 30
_MAIN = "host"


def document(processes: Sequence[Process]) -> dict[str, Any]:
    """Return the trace.

    Args:
        processes: those that :func:`probe.engines.engine` returns: of several hosts, their times
            are Unix times.
    """
    base = 0
    if processes and not several_hosts(processes):
        header = processes[0].header
        base = int(header["started_unix_ns"]) - int(header["started_ns"])
    return {
        "traceEvents": list(events(processes)),
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
    }


def events(processes: Iterable[Process]) -> Iterator[dict[str, Any]]:
    """Yield the trace's events."""
    processes = list(processes)
    pids = [int(process.header["pid"]) for process in processes]
    if len(set(pids)) < len(pids):  # on several hosts
        pids = list(range(1, len(pids) + 1))
    for number, (pid, process) in enumerate(zip(pids, processes, strict=True)):
        first = _FIRST + number * _TRACKS
        yield _name("process_name", pid, pid, process.label)
        threads = {span.thread for span in process.spans if span.kind != "readback"}
        main = process.header["thread"]
        tracks: dict[int, int] = {}
        for track, thread in enumerate(sorted(threads - {main}), first + 1):
            tracks[thread] = track
        if main in threads:
            tracks[main] = pid
        for thread, track in tracks.items():
            name = _MAIN if thread == main else f"host, thread {thread:x}"
            yield _name("thread_name", pid, track, name)
        copies = first
        yield _name("thread_name", pid, copies, "device to host")
        spans = [span for span in process.spans if span.kind not in ("readback", "output")]
        shown = _one_after_another(process.of("readback"))
        for span in spans:  # an output is an interval between two moments, not work
            yield _slice(span, pid, tracks[span.thread])
        for span in shown:
            yield _slice(span, pid, copies)
        for arrow in _arrows([*spans, *shown], pid, tracks, copies):
            yield arrow | {"id": (number + 1) << 40 | arrow["id"]}


def _one_after_another(copies: Iterable[Span]) -> list[Span]:
    """Return the readbacks such that each begins when the one before is ready, or later.

    A track's slices must not overlap. But a copy can be ready to start while the one before
    waits for its turn, and the device's clock is known to within microseconds.
    """
    kept: list[Span] = []
    for span in sorted(copies, key=lambda copy: copy.ended):
        began = max(span.began, kept[-1].ended) if kept else span.began
        kept.append(span._replace(began=min(began, span.ended)))
    return kept


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(span: Span, pid: int, tid: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": span.step}
    if span.kind == "readback":
        arguments["ready to consumed us"] = (span.consumed - span.ended) / 1e3
    if span.kind == "execute_model":
        arguments["requests continued"] = span.continuing
    return {
        "ph": "X",
        "name": f"fence: {span.owner}" if span.kind == "fence" else span.kind,
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": span.began / 1e3,
        "dur": span.length / 1e3,
        "args": arguments,
    }


def _arrows(
    spans: Iterable[Span], pid: int, tracks: Mapping[int, int], copies: int
) -> Iterator[dict[str, Any]]:
    """Yield the arrows of each step: sampled, copied, handed out; where both ends are known."""
    steps: dict[int, dict[str, Span]] = {}
    for span in spans:
        steps.setdefault(span.step, {})[span.kind] = span
    for step, kinds in steps.items():
        first, copy, last = (kinds.get(k) for k in ("sample_tokens", "readback", "get_output"))
        if first is None or last is None or last.ended <= first.ended:
            continue  # begun before the records, not handed out, or handed out at once
        # An arrow's points must be in order and within their slices; but a copy may begin before
        # `sample_tokens` ends, and `get_output` before the copy.
        left = max(first.began, first.ended - 1)
        taken = max(last.began, last.ended - 1)
        if copy is not None:
            left = max(first.began, min(left, copy.began))
        yield _arrow("s", pid, tracks[first.thread], step, left)
        if copy is not None:
            between = max(copy.began, left)
            taken = max(taken, between)
            yield _arrow("t", pid, copies, step, between)
        yield _arrow("f", pid, tracks[last.thread], step, taken) | {"bp": "e"}


def _arrow(phase: str, pid: int, tid: int, step: int, time: int) -> dict[str, Any]:
    return {
        "ph": phase,
        "name": "output",
        "cat": "output",
        "id": step,
        "pid": pid,
        "tid": tid,
        "ts": time / 1e3,
    }
