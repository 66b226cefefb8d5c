"""The trace, held to the Trace Event Format and to what Perfetto makes of it."""

import json
from collections import defaultdict
from typing import Any

from hypothesis import given
from probe import trace_events
from probe.records import Process
from support.probes import MAIN, OTHER, STEPS, DrawnStep, process, row, rows_of

#: The error of a time in microseconds, in floating point.
ROUNDING = 1e-3 / 4
Event = dict[str, Any]


def trace(*processes: Process) -> list[Event]:
    """The trace as it is written and read again."""
    text = json.dumps({"traceEvents": list(trace_events.events(processes))}, allow_nan=False)
    events: list[Event] = json.loads(text)["traceEvents"]
    return events


def slices(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def names(events: list[Event], kind: str) -> dict[int, str]:
    named = [event for event in events if event["ph"] == "M" and event["name"] == kind]
    tracks = [event["tid"] for event in named]
    assert len(tracks) == len(set(tracks))
    return {event["tid"]: event["args"]["name"] for event in named}


def assert_well_formed(event: Event) -> None:
    """Each event has what its phase needs."""
    assert event["ph"] in "MXstf"
    assert isinstance(event["name"], str)
    # Perfetto keeps 32 bits of a number, and takes 0 for the idle thread.
    assert 0 < event["pid"] < 1 << 31
    assert 0 < event["tid"] < 1 << 31
    if event["ph"] == "M":
        assert isinstance(event["args"]["name"], str)
        return
    assert isinstance(event["ts"], float)
    assert event["cat"]
    if event["ph"] == "X":
        assert event["dur"] >= 0
        assert isinstance(event["args"]["step"], int)
    else:
        assert 0 < event["id"] < 1 << 53


def assert_nested(track: list[tuple[float, float]]) -> None:
    """The slices of a track lie within or beside each other."""
    enclosing: list[float] = []
    for began, ended in sorted(track, key=lambda span: (span[0], -span[1])):
        while enclosing and enclosing[-1] <= began + ROUNDING:
            enclosing.pop()
        assert not enclosing or ended <= enclosing[-1] + ROUNDING
        enclosing.append(ended)


@given(STEPS)
def test_every_record_but_outputs_is_a_slice_and_arrows_lead_forward(
    drawn: list[DrawnStep],
) -> None:
    recorded = process(rows_of(drawn))
    one = slices(trace(recorded))
    host = [event for event in one if event["name"] != "readback"]
    assert sorted((event["name"], event["ts"], event["dur"]) for event in host) == sorted(
        (f"fence: {s.owner}" if s.kind == "fence" else s.kind, s.began / 1e3, s.length / 1e3)
        for s in recorded.spans
        if s.kind not in ("output", "readback")
    )
    copies = sorted(s.ended for s in recorded.of("readback"))
    ends = sorted(e["ts"] + e["dur"] for e in one if e["name"] == "readback")
    assert len(ends) == len(copies)
    assert all(abs(end - copy / 1e3) <= ROUNDING for end, copy in zip(ends, copies, strict=True))

    events = trace(recorded, process(rows_of(drawn), label="rank1"))
    tracks, arrows = defaultdict(list), defaultdict(list)
    for event in events:
        assert_well_formed(event)
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    for track in tracks.values():
        assert_nested(track)
    for way in arrows.values():
        assert [event["ph"] for event in way] in (["s", "f"], ["s", "t", "f"])
        times = [event["ts"] for event in way]
        assert times == sorted(times)
        assert len({event["pid"] for event in way}) == 1
        assert way[-1]["bp"] == "e"
        kinds = ["sample_tokens", "readback", "get_output"]
        for event, kind in zip(way, kinds if len(way) == 3 else kinds[::2], strict=True):
            assert any(
                (piece["name"], piece["pid"], piece["tid"]) == (kind, event["pid"], event["tid"])
                and piece["ts"] - ROUNDING <= event["ts"] <= piece["ts"] + piece["dur"] + ROUNDING
                for piece in slices(events)
            )
    handed_out = 2 * sum(1 for step in drawn if step.late is not None and max(step.late[2:]) > 0)
    assert len(arrows) >= handed_out


def test_an_arrow_without_an_end_is_left_out() -> None:
    """A step begun before the records, one without a `get_output`, and two whole ones."""
    rows = [
        row("get_output", 0, 5, 1),
        row("sample_tokens", 10, 20, 2),
        row("readback", 12, 18, 2, 0, 19),
        row("sample_tokens", 30, 40, 3),
        row("readback", 35, 50, 3, 0, 60),
        row("get_output", 45, 60, 3, 0, OTHER),
        row("sample_tokens", 70, 80, 4),
        row("readback", 90, 90, 4, 0, 90),
        row("get_output", 85, 90, 4, 0, OTHER),
    ]
    arrows = [event for event in trace(process(rows)) if event["ph"] in "stf"]
    assert [event["ph"] for event in arrows] == 2 * ["s", "t", "f"]
    assert [event["ts"] for event in arrows] == [0.035, 0.035, 0.059, 0.079, 0.09, 0.09]


def test_each_thread_has_a_track_and_each_slice_its_arguments() -> None:
    rows = [
        row("execute_model", 0, 5, 7, 3, MAIN),
        row("get_output", 3, 9, 7, 0, OTHER),
        row("readback", 2000, 4000, 7, 0, 9000),
    ]
    events = trace(process(rows), process(rows, label="engine0"))
    assert sorted(names(events, "process_name").values()) == ["engine0", "rank0"]
    tracks = names(events, "thread_name")
    other = f"host, thread {OTHER:x}"
    assert sorted(tracks.values()) == sorted(2 * ["host", "device to host", other])
    assert {event["name"]: tracks[event["tid"]] for event in slices(events)} == {
        "execute_model": "host",
        "get_output": other,
        "readback": "device to host",
    }
    arguments = {event["name"]: event["args"] for event in slices(events)}
    assert arguments["execute_model"] == {"step": 7, "requests continued": 3}
    assert arguments["readback"] == {"step": 7, "ready to consumed us": 5.0}


def test_a_trace_has_the_systems_numbers_and_says_when_its_clock_was_0() -> None:
    """So that it can be laid over one of torch's, in which main threads have these numbers, too."""
    rows = [row("execute_model", 5_000, 9_000, 1, 1), row("get_output", 6_000, 8_000, 1, 0, OTHER)]
    times: dict[str, Any] = {"started_unix_ns": 10**18 + 700, "started_ns": 300}
    two = [process(rows, pid=4001, **times), process(rows, label="rank1", pid=4002, **times)]
    made = trace_events.document(two)
    shown = slices(made["traceEvents"])
    assert {event["pid"] for event in shown} == {4001, 4002}
    launches = [event for event in shown if event["name"] == "execute_model"]
    assert all(event["tid"] == event["pid"] for event in launches)
    assert made["baseTimeNanoseconds"] + round(launches[0]["ts"] * 1000) == 10**18 + 5_400
