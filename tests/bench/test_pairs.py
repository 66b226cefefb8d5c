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

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def started(self, _: float) -> None:
        self.events.append(f"{self.name} started")

    def ask(self, request: Any) -> None:
        self.events.append(f"{self.name} asked {request}")

    def result(self, _: float) -> dict[str, Any]:
        self.events.append(f"{self.name} done")
        side = self.name[0]
        disturbed = {"run delay": 0.5 if side == "a" else 0.0}
        tokens = outputs.pack([["1", side]])
        figures = {"tokens/s": 1.0, "disturbance": disturbed}
        return {"device": "CPU", "figures": figures, "outputs": {"tokens": tokens}}


def measured(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[str], list[Any]]:
    """The engines of two rounds of one case with their places, the events, and the slices."""
    events: list[str] = []
    placed: list[Any] = []
    monkeypatch.setattr(harness, "cores", lambda places: [[7], [8]][:places])

    class Run(PairRun):
        module = "none"

        def __init__(self) -> None:
            args = argparse.Namespace(places=places, seconds=1.0, gpus=["0", "1"], rounds=2)
            installations: Any = SimpleNamespace()
            super().__init__(args, installations)

        def starts(self) -> list[Start]:
            return [Start("tiny", ("a", "b"), {"plain": "argument"}, {"kind": "none"})]

        def write(self, complete: bool) -> dict[str, Any]:
            return {}

        def _start(self, name: str, side: str, spec: Any, devices: Any) -> Any:
            assert spec["kind"] == "none"
            placed.append((name, side, *spec["cores"], [*devices]))
            return Faked(name, events)

    run = Run()
    assert run.jobs() == [Job("tiny, a/b", 1), Job("tiny, a/b", 2)]
    with run.running:
        for job in run.jobs():
            run.measure(job)
    return placed, events, run.slices


def test_sides_exchange_places(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, events, slices = measured(2, monkeypatch)
    assert placed == [
        *(("a-0", "a", 7, ["0"]), ("b-0", "b", 7, ["0"])),
        *(("a-1", "a", 8, ["1"]), ("b-1", "b", 8, ["1"])),
    ]
    assert events[:4] == [f"{each[0]} started" for each in placed]
    expected = []
    for seed in (2, 3, 4, 5):
        one, other = ("b-0", "a-1") if seed % 2 else ("a-0", "b-1")
        asked = [f"{each} asked ('argument', {seed})" for each in (one, other)]
        expected += [*asked, f"{one} done", f"{other} done"] * 2  # the warm-up, and the slice
    assert events[4:-4] == expected
    # Engines stay started through both rounds.
    assert {*events[-4:]} == {f"{each[0]} asked None" for each in placed}
    assert [(one["round"], one["order"]) for one in slices] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [one["sides"] for one in slices] == [["a", "b"]] * 4
    # Their noise is their own, or meets both.
    assert [one["disturbed"] for one in slices] == [[]] * 4


def test_sides_on_one_device_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, events, slices = measured(1, monkeypatch)
    assert placed == [("a-0", "a", 7, ["0", "1"]), ("b-0", "b", 7, ["0", "1"])]
    a, b = ["a-0 asked", "a-0 done"], ["b-0 asked", "b-0 done"]
    found = [event.partition(" (")[0] for event in events[2:-2]]
    assert found == (a + b + a + b + b + a + b + a) * 2
    assert [one["disturbed"] for one in slices] == [["a: run delay 50.0%"]] * 4


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
        ("probed", "overlaid", "0", None),
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
    args = argparse.Namespace(places=1, seconds=1.0, gpus=[], rounds=2, out=tmp_path / "out")
    run = Run(args, installations)
    with pytest.raises(Failure, match="again/stock, round 1: the process ended \\(3\\)") as failed:
        run.measure(run.jobs()[0])
    with pytest.raises(Failure, match="again/stock, round 2: its engines did not start"):
        run.measure(run.jobs()[1])
    assert "out of memory" in str(failed.value)
    logs = {file.name: file.read_text() for file in args.out.glob("*.log")}
    assert logs.pop("again-0-1.log") == "out of memory\n"
    assert list(logs) == ["stock-0-2.log"]  # it may have ended before it had anything to say
