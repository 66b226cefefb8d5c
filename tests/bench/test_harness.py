"""A run of pairs: places that are exchanged, failures, interruptions, its limit; of fakes."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import serving, traffic
from bench.errors import Failure
from bench.harness import command_line
from bench.harness import pairs as harness
from bench.harness.installations import Installations
from bench.harness.kept import Kept
from bench.harness.pairs import Measurement, Plan, Start
from bench.harness.processes import LIMIT, Process, Snapshot, cores, disturbances, snapshot
from bench.markdown import CUT_OFF
from bench.run import load
from support import sites


class Faked:
    """An engine that notes its requests; its slice of the round that is named fails.

    Attributes:
        process: one that has ended.
        clock: seconds that have passed: a start takes 30, a slice 5.
    """

    process = subprocess.Popen(["true"], start_new_session=True)
    clock = 0.0

    def __init__(self, name: str, events: list[str], failure: Failure | None = None) -> None:
        self.name, self.events, self.failure = name, events, failure
        self.asked: Any = None
        Faked.clock += 15.0  # of two engines

    def ask(self, request: Any) -> None:
        self.asked = request
        self.events.append(f"{self.name} asked {request and request[0]}")

    def answer(self, _: float) -> dict[str, Any]:
        if self.asked is None:
            return {"device": "CPU", "versions": "vLLM 1"}
        self.events.append(f"{self.name} done")
        work, case, seed = self.asked
        if work == "measure":
            Faked.clock += 2.5
        if self.failure and (case, seed // 2) == ("first", 2):
            raise self.failure
        return {
            "figures": {"tokens/s": 1.0},
            "noise": ["run delay 50%"] * (self.name[0] == "a"),
            "limits": ["busy"] * (self.name[0] == "b"),
        }


Run = Callable[..., tuple[int, list[str], list[Any]]]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Measures two starts of sides a and b; gives the exit code, the events and the places."""

    def run(
        places: int = 1,
        failure: Failure | None = None,
        limit: float = float("inf"),
        changed: bool = False,
    ) -> tuple[int, list[str], list[Any]]:
        events: list[str] = []
        placed: list[Any] = []

        def start(_: object, start: Any, side: str, place: int, own: Any, log: Path) -> Any:
            log.write_text("out of memory\n")
            placed.append((start.engine, side, place, *own))
            return Faked(f"{side}-{place}", events, failure)

        def check() -> None:
            if changed:
                raise Failure("SITE is not what it was")

        monkeypatch.setattr(harness, "cores", lambda places: [[7], [8]][:places])
        monkeypatch.setattr(Measurement, "_start", start)
        monkeypatch.setattr(Faked, "clock", 0.0)
        monkeypatch.setattr(harness, "time", SimpleNamespace(monotonic=lambda: Faked.clock))
        starts = [Start(name, ("a", "b"), {name: name}, {}) for name in ("first", "second")]
        args: Any = SimpleNamespace(
            rounds=2, limit=limit, places=places, seconds=1.0, out=tmp_path, gpus=[]
        )
        (work := tmp_path / "work").mkdir()
        views: Any = SimpleNamespace(digests={}, peer="", work=work, check_untouched=check)
        measurement = Measurement(args, views, Plan("traffic", "Made up.", {}, starts))
        return measurement.execute(), events, placed

    return run


def cases(folder: Path) -> list[tuple[str, int, int | None]]:
    return [(one.case, one.round, one.order) for one in load(folder / "run.json").slices]


def test_sides_exchange_places(tmp_path: Path, measured: Run) -> None:
    code, events, placed = measured(places=2)
    run = load(tmp_path / "run.json")
    assert (code, run.complete, run.problems) == (0, True, [])
    assert placed[:4] == [
        *(("first", "a", 0, 7), ("first", "b", 0, 7), ("first", "a", 1, 8), ("first", "b", 1, 8)),
    ]
    expected = []
    for one, other in (("a-0", "b-1"), ("b-0", "a-1")) * 2:  # engines stay through both rounds
        for work in ("warm_up", "measure"):
            expected += [f"{one} asked {work}", f"{other} asked {work}"]
            expected += [f"{one} done", f"{other} done"]
    assert events[:32] == expected
    assert {*events[32:36]} == {f"{side}-{place} asked None" for side in "ab" for place in (0, 1)}
    assert cases(tmp_path)[:4] == [
        ("first", 1, 0),
        ("first", 1, 1),
        ("first", 2, 0),
        ("first", 2, 1),
    ]
    # Noise meets both; a limit of the measurement does not.
    assert [one.disturbed for one in run.slices] == [["b: busy"]] * 8
    assert run.host.endswith(", vLLM 1")


def test_sides_on_one_device_take_turns(tmp_path: Path, measured: Run) -> None:
    _, events, placed = measured()
    assert placed[:2] == [("first", "a", 0, 7), ("first", "b", 0, 7)]
    assert [event[0] for event in events[:32]] == list("aabbaabbbbaabbaa" * 2)
    disturbed = load(tmp_path / "run.json").slices[0].disturbed
    assert disturbed == ["a: run delay 50%", "b: busy"]


@pytest.mark.parametrize(
    ("limit", "rounds"),
    # A start with its round takes 40 s, a round 10.
    [(90.0, [("first", 1), ("first", 2), ("second", 1)]), (89.0, [("first", 1), ("first", 2)])],
)
def test_no_round_begins_that_would_end_after_the_limit(
    limit: float, rounds: Any, tmp_path: Path, measured: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(limit=limit)[0] == 0
    assert [each[:2] for each in cases(tmp_path)[::2]] == rounds
    assert load(tmp_path / "run.json").complete
    assert "would end too late" in capsys.readouterr().err


def test_a_failure_keeps_its_log_and_costs_its_start(tmp_path: Path, measured: Run) -> None:
    assert measured(failure=Failure("a stream ended"))[0] == 1
    run = load(tmp_path / "run.json")
    assert [one.case for one in run.slices] == ["first"] * 2 + ["second"] * 4
    (problem,) = run.problems
    assert problem.startswith("first, a/b: a stream ended\n")
    assert "out of memory" in problem
    assert "a stream ended" in (tmp_path / "run.md").read_text()
    assert run.complete


def test_an_installation_that_was_changed_is_an_error(tmp_path: Path, measured: Run) -> None:
    assert measured(changed=True)[0] == 1
    assert load(tmp_path / "run.json").problems == ["SITE is not what it was"]


#: A child that answers, and ends, sleeps or fails when it is asked for a third time.
CHILD = """
import sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
pipe.send({"spec": pipe.recv()})
while (request := pipe.recv()) is not None:
    if request == 3:
        time.sleep(60) if sys.argv[2] == "sleep" else sys.exit(7)
    pipe.send({"request": request})
"""


@pytest.fixture
def kept() -> Iterator[Callable[[str], Kept]]:
    """Starts a child that ends in the way that is named."""
    made: list[Kept] = []

    def start(end: str) -> Kept:
        def begin(descriptor: int) -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-c", CHILD, str(descriptor), end]
            return subprocess.Popen(command, pass_fds=[descriptor])

        made.append(Kept(begin, {"kind": "none"}))
        assert made[-1].answer(60) == {"spec": {"kind": "none"}}
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize(
    ("end", "reason"),
    [("sleep", "no end after 0.2 s"), ("exit", r"the process ended \(7\)")],
)
def test_a_process_answers_until_it_fails(
    kept: Callable[[str], Kept], end: str, reason: str
) -> None:
    child = kept(end)
    for request in (1, 2):
        child.ask(request)
        assert child.answer(60) == {"request": request}
    child.ask(3)
    with pytest.raises(Failure, match=reason):
        child.answer(0.2 if end == "sleep" else 60)


def test_a_process_ends_when_it_is_asked_nothing_more(kept: Callable[[str], Kept]) -> None:
    child = kept("exit")
    child.ask(None)
    assert child.process.wait(60) == 0
    child.ask(1)
    with pytest.raises(Failure, match=r"the process ended \(0\)"):
        child.answer(60)


SECOND = 1_000_000_000


def at(when: float, *threads: tuple[int, int], steal: float = 0.0) -> Snapshot:
    counts = {n: (ran * SECOND, waited * SECOND) for n, (ran, waited) in enumerate(threads)}
    return Snapshot(when, 1, {1: Process("x", 0.0, counts)}, steal, 2 * when)


def test_waiting_and_stolen_time_are_disturbances() -> None:
    before = at(0, (10, 1), (1, 0))
    # Of the busiest; of all it is 2 / 12.
    found = disturbances(before, at(10, (18, 3), (2, 0), (1, 0), steal=2.0))
    assert found == ["run delay 20.0%", "steal 10.0%"]
    assert disturbances(at(0), at(10)) == []
    assert disturbances(before, at(100, (107, 4), (1, 0), steal=200 * LIMIT)) == []


def test_the_kernel_s_counts_of_this_process_and_its_children_are_read() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        found = snapshot(os.getpid())
        child.kill()
    assert {os.getpid(), child.pid} <= found.processes.keys()
    ran, _ = found.processes[os.getpid()].threads[os.getpid()]
    assert ran > 0
    assert found.total > found.stolen >= 0


def test_cores_are_those_of_each_process_between_two_snapshots() -> None:
    def of(when: float, seconds: dict[int, tuple[str, float]]) -> Snapshot:
        return Snapshot(when, 1, {n: Process(*each, {}) for n, each in seconds.items()}, 0.0, 0.0)

    titles = {1: "python -m bench.servers.command", 2: "VLLM::EngineCore", 3: "VLLM::Worker_TP0"}
    titles |= {4: "VLLM::Worker_TP1", 5: "python -c resource_tracker"}
    before = of(0.0, {number: (title, 10.0) for number, title in titles.items()})
    later = {number: (title, 10.0 + number) for number, title in titles.items()}
    alone = {"API server": 0.5, "engine core": 1.0, "others": 2.5, "workers": 3.5}
    assert cores(before, of(2.0, later)) == alone
    more = {10 - n: (f"VLLM::APIServer_{n}", 2.0 + n) for n in range(3)}
    several = {f"API server {n}": (2.0 + n) / 2 for n in range(3)}
    rest = {"engine core": 1.0, "launcher": 0.5, "others": 2.5, "workers": 3.5}
    assert cores(before, of(2.0, later | more)) == several | rest
    rust = {7: ("/opt/vllm-rs serve", 4.0), 1: ("python", 0.0)}
    assert cores(of(0.0, {}), of(2.0, rust)) == {"API server": 2.0, "launcher": 0.0}


def test_places_share_no_core_and_leave_none_out() -> None:
    here = os.sched_getaffinity(0)
    assert harness.cores(1) == [sorted(here)]
    one, other = harness.cores(2)
    assert len(one) == len(other) == max(1, len(here) // 2)
    assert len(here) == 1 or not {*one} & {*other}
    assert {*one} | {*other} <= here


@pytest.mark.parametrize(
    ("side", "origin", "variables"),
    [
        ("stock", "stock", {}),
        ("again", "stock", {}),
        ("mrv2", "stock", {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
        ("overlaid", "overlaid", {}),
        ("overlaid=-fixes", "overlaid", {"VLLM_READINESS": "-fixes"}),
        ("overlaid-mrv2", "overlaid", {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
        ("0.26.0", "0.26.0", {"VLLM_USE_V2_MODEL_RUNNER": None}),
    ],
)
def test_sides_differ_in_installation_runner_and_switch(
    side: str, origin: str, variables: dict[str, str | None], tmp_path: Path
) -> None:
    """The interpreter is a shell script that shows its environment."""
    python, log = sites.script(tmp_path / "python", "env"), tmp_path / "log"
    views = Installations.__new__(Installations)
    views.work, views.python, views.digests, views.peer = tmp_path, str(python), {}, "0.26.0"
    views.views = {name: tmp_path / name for name in ("stock", "overlaid", views.peer)}
    views._sites = dict.fromkeys(views.views, tmp_path)
    for client in (None, "stock"):
        args = argparse.Namespace(places=2, gpus=["4", "5"], out=tmp_path)
        plan = Plan("traffic", "", {"SET": "1"}, [], client=client)
        kept = Measurement(args, views, plan)._start(
            Start("tiny", (side, "stock"), {}, {}), side, 1, [0], log
        )
        kept.process.wait(60)
        env = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
        assert env["PYTHONPATH"].startswith(f"{tmp_path / (client or origin)}:{tmp_path}:")
        assert (env["CUDA_VISIBLE_DEVICES"], env["SET"]) == ("5", "1")
        given = {"VLLM_USE_V2_MODEL_RUNNER": "0", **variables}
        found = {name: env.get(name) for name in given}
        assert found == given


#: A program whose slices are made up. It prints a line where it should be stopped.
PROGRAM = """
import sys, time
from bench import traffic
from bench.harness import pairs
from bench.run import Slice

stop, *argv = sys.argv[1:]

def at(place):
    if place == stop:
        print("here", flush=True)
        time.sleep(60)

def views(self, site, work, python, peer):
    self.site, self.digests, self.work, self.peer = site, {}, work, ""
    (work / "pristine").mkdir()
    at("views")

def measure(self):
    self._keep(Slice(1, 0, "tiny", "plain", ("a", "b"), [{"tokens/s": 1.0}, {"tokens/s": 1.0}]))
    at("slice")

pairs.Installations.__init__, pairs.Measurement._measure = views, measure
pairs.Installations.check_untouched = lambda self: None
sys.exit(traffic.main(argv))
"""


def stopped(
    tmp_path: Path, place: str, *signals: int, before: Sequence[str] = ()
) -> tuple[int, str]:
    """The exit code of a run that gets signals at a place, and its stderr."""
    site = sites.small(tmp_path / "env" / "site")
    argv = [place, "--site", site, "--out", tmp_path / "out", "--pairs", "overlaid/stock"]
    with subprocess.Popen(
        [*before, sys.executable, "-c", PROGRAM, *map(str, argv)],
        env={**os.environ, "PYTHONPATH": str(sites.REPO / "scripts")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        while (line := process.stdout.readline()) != "here\n":
            assert line, "it ended before"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)
        _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


@pytest.mark.parametrize(
    ("numbers", "before", "code"),
    [
        ([signal.SIGTERM], [], 143),
        ([signal.SIGINT], [], 130),
        ([signal.SIGKILL], [], -signal.SIGKILL),
        # A hangup that the caller ignores ends nothing.
        ([signal.SIGHUP, signal.SIGTERM], ["nohup"], 143),
    ],
)
def test_whatever_ends_a_run_leaves_its_slices(
    tmp_path: Path, numbers: Sequence[int], before: Sequence[str], code: int
) -> None:
    got, stderr = stopped(tmp_path, "slice", *numbers, before=before)
    assert got == code
    run = load(tmp_path / "out" / "run.json")
    assert not run.complete
    assert len(run.slices) == 1
    assert CUT_OFF in (tmp_path / "out" / "run.md").read_text()
    stop = "bench: stopped; the slices so far are kept"
    assert (stop in stderr.splitlines()) == (code == 130)
    assert "Traceback" not in stderr
    assert code < 0 or [path.name for path in (tmp_path / "env").iterdir()] == ["site"]


def test_ctrl_c_while_views_are_made_says_so_in_a_line(tmp_path: Path) -> None:
    got, stderr = stopped(tmp_path, "views", signal.SIGINT)
    assert (got, stderr.strip()) == (130, "bench: stopped; nothing was measured")
    assert [path.name for path in (tmp_path / "env").iterdir()] == ["site"]


def test_arguments_that_cannot_work_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, model = (tmp_path / name for name in ("file", "out", "model"))
    file.touch()
    model.mkdir()
    (model / "config.json").touch()
    here = ["--site", str(sites.UPSTREAM), "--out", str(out)]
    for program, arguments, sentence in (
        (traffic, [*here, "--out", str(file)], f"--out {file}: "),
        (traffic, [*here, "--out", str(file / "below")], "name a directory to write to"),
        (traffic, [*here, "--site", "/nowhere"], "/nowhere: does not exist"),
        (traffic, [*here, "--rounds=0"], "'0' is not a number above 0"),
        (traffic, [*here, "--rounds=two"], "'two' is not a number above 0"),
        (traffic, [*here, "--limit=nan"], "'nan' is not a number above 0"),
        (traffic, [*here, "--pairs", "stock/stock"], "'stock/stock' is not a pair"),
        (traffic, [*here, "--pairs", "stock=-fixes/overlaid"], "is not a pair"),
        (traffic, [*here, "--pairs", "overlaid=-fixes/stock", "a/b/c"], "'a/b/c' is not a pair"),
        (traffic, [*here, "--pairs", "overlaid/peer"], "name its site-packages with --peer"),
        (serving, [*here, "--model", str(tmp_path)], "has no config.json; name a model's"),
        (serving, [*here, "--model", str(model)], "--model: your own model needs --client"),
        (serving, [*here, "--client=--a 'b"], "--client: No closing quotation"),
    ):
        with pytest.raises(SystemExit) as ended:
            program.main(arguments)
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err
    assert not out.exists()


def test_the_environment_spoils_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = ("VLLM_READINESS_PROBE", "VLLM_READINESS_SYNC_GUARD")
    for name in (*left_out, "VLLM_READINESS"):
        monkeypatch.setenv(name, "off")
    monkeypatch.setattr(command_line, "end_on_signals", lambda: None)
    argv = ["--site", str(sites.UPSTREAM), "--out", str(tmp_path)]
    options = command_line.parser("A benchmark.", traffic.PAIRS)
    command_line.prepare(options, options.parse_args(argv))
    assert not os.environ.keys() & {*left_out}
    assert os.environ["VLLM_READINESS"] == "off"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [*left_out, "VLLM_READINESS=off"]
