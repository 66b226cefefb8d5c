"""Pairs of sides: places that are exchanged, outputs that are compared."""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.harness import outputs
from bench.harness import pairs as harness
from bench.harness.pairs import PairRun, Start, problems
from bench.harness.run import Job
from bench.traffic import PAIRS


class Faked:
    """An engine that notes its requests."""

    def __init__(self, side: str, events: list[str]) -> None:
        self.side, self.events = side, events

    def started(self, _: float) -> None:
        self.events.append(f"{self.side} started")

    def ask(self) -> None:
        self.events.append(f"{self.side} asked")

    def result(self, _: float) -> dict[str, Any]:
        self.events.append(f"{self.side} done")
        disturbed = {"run delay": 0.5 if self.side == "a" else 0.0}
        tokens = outputs.pack([["1", self.side]])
        figures = {"tokens/s": 1.0, "disturbance": disturbed}
        return {"device": "CPU", "figures": figures, "outputs": {"tokens": tokens}}


def measured(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[str], list[Any]]:
    """The engines of a round of one case with their places, the events, and the slices."""
    events: list[str] = []
    placed: list[Any] = []
    monkeypatch.setattr(harness, "cores", lambda places: [[7], [8]][:places])

    class Run(PairRun):
        module = "none"

        def __init__(self) -> None:
            self.args = argparse.Namespace(places=places, seconds=1.0, gpus=["0", "1"], rounds=1)
            self._starts = {start.name: start for start in self.starts()}
            self.slices, self._started = [], 0.0

        def starts(self) -> list[Start]:
            return [Start("tiny", ("a", "b"), {"plain": "argument"}, {"kind": "none"})]

        def write(self, complete: bool) -> dict[str, Any]:
            return {}

        def _start(self, side: str, spec: Any, devices: Any, _: Any) -> Any:
            assert spec["kind"] == "none"
            placed.append((side, *spec["cores"], [*devices], spec["slices"]))
            return Faked(side, events)

    run = Run()
    assert run.jobs() == [Job("tiny, a/b", 1)]
    run.measure(run.jobs()[0])
    return placed, events, run.slices


def test_sides_start_again_in_exchanged_places(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, events, slices = measured(2, monkeypatch)
    first, second = [("argument", 2)], [("argument", 3)]
    assert placed == [
        *(("a", 7, ["0"], first), ("b", 8, ["1"], first)),
        *(("b", 7, ["0"], second), ("a", 8, ["1"], second)),
    ]
    turn = ["a asked", "b asked", "a done", "b done"]  # the warm-up, and then the slice
    assert events[:10] == ["a started", "b started", *turn, *turn]
    assert events[10:12] == ["b started", "a started"]
    assert [one["order"] for one in slices] == [0, 1]
    assert [one["sides"] for one in slices] == [["a", "b"]] * 2
    # Their noise is their own, or meets both.
    assert [one["disturbed"] for one in slices] == [[], []]


def test_sides_on_one_device_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, events, slices = measured(1, monkeypatch)
    cases = [("argument", 2), ("argument", 3)]
    assert placed == [("a", 7, ["0", "1"], cases), ("b", 7, ["0", "1"], cases)]
    a, b = ["a asked", "a done"], ["b asked", "b done"]
    assert [event for event in events if "started" not in event] == a + b + a + b + b + a + b + a
    assert [one["disturbed"] for one in slices] == [["a: run delay 50.0%"]] * 2


def test_slices_whose_outputs_differ_have_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, slices = measured(2, monkeypatch)
    for one in slices:
        assert one["problems"] == ["tokens of a and b differ: request 0, position 1: a against b"]
        assert one["digests"]["a"] != one["digests"]["b"]


def answer(*tokens: str, **more: Any) -> dict[str, Any]:
    return {"outputs": {"tokens": outputs.pack([[*tokens], ["5"]])}, **more}


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (answer("1", "2"), answer("1", "2"), []),
        ({}, {}, []),
        (answer("1", "2"), answer("1", "3"), ["request 0, position 1: 2 against 3"]),
        (answer("1", "2"), answer("1"), ["request 0, position 1: 2 against nothing"]),
        (answer("a b c"), answer("a x c"), ["request 0, position 0: word 1: b against x"]),
        (answer("1", counts={"tokens": (3, 4)}), answer("1"), ["a: 3 of 4 tokens"]),
        (answer("1"), answer("1", problems=["late"]), ["b: late"]),
    ],
)
def test_whatever_is_wrong_with_an_answer_is_named(one: Any, other: Any, texts: Any) -> None:
    found = problems(("a", "b"), {"a": one, "b": other})
    assert len(found) == len(texts)
    for text, wanted in zip(found, texts, strict=True):
        assert text.endswith(wanted)


def test_a_digest_is_that_of_the_outputs() -> None:
    one, same, other = (outputs.pack([[*tokens]]) for tokens in ("12", "12", "13"))
    assert outputs.digest(one) == outputs.digest(same) != outputs.digest(other)
    assert outputs.unpack(one) == [["1", "2"]]


def test_places_share_no_core_and_leave_none_out() -> None:
    here = os.sched_getaffinity(0)
    assert harness.cores(1) == [sorted(here)]
    one, other = harness.cores(2)
    assert len(one) == len(other) == max(1, len(here) // 2)
    assert len(here) == 1 or not {*one} & {*other}
    assert {*one} | {*other} <= here


def test_pairs_are_of_two_known_sides() -> None:
    for text in (
        *PAIRS,
        "overlaid=-fixes/stock",
        "mrv2/overlaid=-seeds,-fixes",
        "overlaid-mrv2/mrv2",
    ):
        assert harness.pair(text) == text
    for text in ("stock", "stock/stock", "stock/other", "stock=-fixes/overlaid", "a/b/c", "/stock"):
        with pytest.raises(argparse.ArgumentTypeError):
            harness.pair(text)


@pytest.mark.parametrize(
    ("side", "origin", "runner", "switch"),
    [
        ("stock", "stock", "0", None),
        ("again", "stock", "0", None),
        ("copy", "copy", "0", None),
        ("mrv2", "stock", "1", None),
        ("overlaid", "overlaid", "0", None),
        ("overlaid=-fixes", "overlaid", "0", "-fixes"),
        ("overlaid-mrv2", "overlaid", "1", None),
    ],
)
def test_sides_differ_in_installation_runner_and_switch(
    side: str, origin: str, runner: str, switch: str | None
) -> None:
    run: Any = SimpleNamespace()
    assert harness.origin(side) == origin
    variables = PairRun.variables(run, side)
    assert variables["VLLM_USE_V2_MODEL_RUNNER"] == runner
    assert variables.get("VLLM_READINESS") == switch


def test_a_failed_process_fails_its_job_and_keeps_its_log(tmp_path: Path) -> None:
    """Of a real process: its interpreter is a shell script."""
    from bench.errors import Failure
    from bench.harness.installations import Installations

    class Run(PairRun):
        module = "none"

        def starts(self) -> list[Start]:
            return [Start("tiny", ("again", "stock"), {"plain": ""}, {})]

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory\nexit 3\n")
    python.chmod(0o755)
    installations = Installations.__new__(Installations)
    installations.paths, installations.work = {"stock": [tmp_path]}, tmp_path
    installations.python, installations.digests = str(python), {}
    (tmp_path / "out").mkdir()
    args = argparse.Namespace(places=1, seconds=1.0, gpus=[], rounds=1, out=tmp_path / "out")
    run = Run(args, installations)
    with pytest.raises(Failure, match="again/stock, round 1: the process ended \\(3\\)") as failed:
        run.measure(run.jobs()[0])
    assert "out of memory" in str(failed.value)
    assert [file.read_text() for file in args.out.glob("*.log")] == ["out of memory\n"]
