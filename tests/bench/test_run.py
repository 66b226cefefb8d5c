"""A run: turns, failures and interruptions, whatever it measures; made of children that are not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import engine, serving, step
from bench.compare import command_line, manifest
from bench.compare.installations import in_turn
from bench.compare.limit import Limit
from bench.compare.run import SIDES, Job, Run, Table
from bench.compare.summary import CaseResult
from bench.errors import Failure
from bench.reports.markdown import CUT_OFF
from bench.reports.run_file import load
from bench.reports.verify import edited
from support import sites


class Faked(Run):
    """A run without processes: each side takes 1 ms."""

    def __init__(self, out: Path, rounds: int = 2) -> None:
        args: Any = SimpleNamespace(rounds=rounds, out=out)
        installations: Any = SimpleNamespace(
            site=sites.UPSTREAM, digests={}, python_version="3.0", check_untouched=lambda: None
        )
        about = {"title": "Faked.", "shape": "small"}
        cases: dict[str, Any] = {"case": {}}
        tables = {
            "one": Table(SIDES, about, cases, "group"),
            "two": Table(SIDES[:2], about, cases, "other"),
        }
        super().__init__(args, installations, tables)

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        table = {"group": "one", "other": "two"}[job.group]
        return {table: {"case": CaseResult({"step": 1.0}, {})}}


def test_sides_take_turns_at_being_first(tmp_path: Path) -> None:
    assert [in_turn(turn, ["a", "b", "c"])[0] for turn in range(4)] == ["a", "b", "c", "a"]
    jobs = Faked(tmp_path, rounds=3).jobs()
    assert [job.side for job in jobs if job.group == "group"][::3] == list(SIDES)
    assert [job.side for job in jobs if job.group == "other"][::2] == ["stock", "overlaid", "stock"]
    assert len({job.name for job in jobs}) == len(jobs) == 15


def test_what_will_be_measured_is_written_before_it_is(tmp_path: Path) -> None:
    class Checked(Faked):
        def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
            decided = json.loads((tmp_path / "manifest.json").read_text())
            assert decided["rows"]["two"] == {"sides": list(SIDES[:2]), "cases": ["case"]}
            assert decided["rounds"] == 2
            return super().measure(job)

    assert Checked(tmp_path).execute() == 0
    run = load(tmp_path / "run.json")
    assert run["manifest"] == json.loads((tmp_path / "manifest.json").read_text())
    assert list(manifest.differences(run)) == edited(run) == []


def test_no_round_begins_that_would_end_after_the_limit(tmp_path: Path) -> None:
    """A job of the first round takes 20 s, and each later one 3 s; each group decides alone."""
    now = 0.0
    left_out: list[Job] = []

    class Timed(Faked):
        def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
            nonlocal now
            now += 20.0 if job.round == 1 else 3.0
            return super().measure(job)

        def leave_out(self, job: Job) -> None:
            left_out.append(job)

    run = Timed(tmp_path, rounds=9)
    run.args.limit = 202.0
    run._limit = Limit(202.0, lambda: now)
    assert run.execute() == 0
    written = load(tmp_path / "run.json")
    assert written["complete"]
    # Five jobs take 100 s, and then 15 s: the seventh round ends at 190 s.
    assert [row["rounds"] for row in written["rows"].values()] == [7, 7]
    assert {job.round for job in left_out} == {8, 9}
    assert written["manifest"]["limit"] == 202.0


def test_a_first_round_stands_for_later_ones_and_for_the_first_of_other_groups(
    tmp_path: Path,
) -> None:
    now = 0.0
    limit = Limit(50.0, lambda: now)
    assert limit.allows("group", 1)
    now = 30.0
    assert limit.allows("group", 1)  # the other sides of it
    assert not limit.allows("group", 2)
    assert not limit.allows("another", 1)
    now = 0.0
    alone = Limit(50.0, lambda: now)
    now = 49.0
    assert alone.allows("late", 1)
    now = 51.0
    assert alone.allows("late", 1)
    assert not alone.allows("too late", 1)
    assert Limit(None, lambda: now).allows("group", 7)


def test_later_rounds_need_no_time_for_engines_that_are_kept() -> None:
    now = 0.0
    limit = Limit(50.0, lambda: now)
    assert limit.allows("group", 1)
    for _ in range(2):  # engines
        with limit.once("group"):
            now += 15.0
    now += 9.0
    assert not limit.allows("another", 1)
    assert limit.allows("group", 2)  # until second 48
    now += 3.0
    assert limit.allows("group", 3)
    now += 6.0
    assert not limit.allows("group", 4)


@pytest.mark.parametrize("value", ["0", "-3", "soon", "inf", "nan"])
def test_a_limit_is_a_time(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        engine.main(["--site", str(sites.UPSTREAM), f"--limit={value}"])
    assert ended.value.code == 2
    assert f"{value!r} is not a time; give seconds" in capsys.readouterr().err


def test_a_job_that_fails_costs_its_own_result_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Faked, job: Job) -> Any:
        if (job.group, job.side, job.round) == ("other", "overlaid", 2):
            raise Failure("other, overlaid, round 2 failed (1):\nits log")
        return measure(run, job)

    measure = Faked.measure
    assert Faked(tmp_path).execute() == 0
    monkeypatch.setattr(Faked, "measure", fail)
    assert Faked(tmp_path).execute() == 1
    run = load(tmp_path / "run.json")
    assert run["complete"]
    assert [row["rounds"] for row in run["rows"].values()] == [2, 1]
    assert "FAILED: other, overlaid, round 2" in (tmp_path / "run.md").read_text()
    assert "its log" in (tmp_path / "run.html").read_text()


def test_an_installation_that_was_changed_is_an_error_and_costs_no_result(tmp_path: Path) -> None:
    def changed() -> None:
        raise Failure("SITE is not what it was")

    run = Faked(tmp_path)
    run.installations.check_untouched = changed  # type: ignore[method-assign]
    assert run.execute() == 1
    written = load(tmp_path / "run.json")
    assert written["errors"] == ["SITE is not what it was"]
    assert len(written["rows"]) == 2


#: A program whose sides are made up. It says when it has got to where it should be stopped.
PROGRAM = """
import sys, time
from pathlib import Path
from bench import step
from bench.compare import installations
from bench.compare.summary import CaseResult

stop, *argv = sys.argv[1:]

def at(place):
    if place == stop:
        print("here", flush=True)
        time.sleep(60)

class Views:
    def __init__(self, site, work, python):
        self.site, self.digests, self.python_version = site, {}, "3.0"
        (work / "pristine").mkdir()
        at("views")
    def check_untouched(self):
        pass

def measure(run, job):
    if job.side == "overlaid":
        at("overlaid")
    cases = run.load.cases("penalties")
    return {"penalties": {case: CaseResult({"step": 1.0}, {}) for case in cases}}

installations.Installations, step.StepRun.measure = Views, measure
sys.exit(step.main(argv))
"""


def stopped(
    tmp_path: Path, place: str, *signals: int, before: Sequence[str] = ()
) -> tuple[int, str]:
    """The exit code of a run that gets signals at a place, and its stderr."""
    site = sites.small(tmp_path / "env" / "site")
    argv = [place, "--site", site, "--out", tmp_path / "out", "--rounds", "1", "--lengths", "8"]
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
        ([signal.SIGHUP], [], 129),
        ([signal.SIGINT], [], 130),
        ([signal.SIGKILL], [], -signal.SIGKILL),
        # A hangup that the caller ignores ends nothing.
        ([signal.SIGHUP, signal.SIGTERM], ["nohup"], 143),
    ],
)
def test_whatever_ends_a_run_leaves_what_was_measured(
    tmp_path: Path, numbers: Sequence[int], before: Sequence[str], code: int
) -> None:
    got, stderr = stopped(tmp_path, "overlaid", *numbers, before=before)
    assert got == code
    run = load(tmp_path / "out" / "run.json")
    assert not run["complete"]
    (case,) = run["rows"]["penalties"]["cases"].values()
    assert case["figures"]["step"]["stock"] == 1
    assert case["problems"]["overlaid"] == ["overlaid was not measured"]
    assert CUT_OFF in (tmp_path / "out" / "run.md").read_text()
    stop = "bench: stopped; what was measured is kept"
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
    file, out = tmp_path / "file", tmp_path / "out"
    file.touch()
    here = ["--site", str(sites.UPSTREAM), "--out", str(out)]
    for program, arguments, sentence in (
        (step, [*here, "--out", str(file)], f"--out {file}: "),
        (step, [*here, "--out", str(file / "below")], "name a directory to write to"),
        (step, [*here, "--site", "/nowhere"], "/nowhere: does not exist"),
        (step, [*here, "--rounds=0"], "'0' is not a number of rounds; give 1 or more"),
        (step, [*here, "--rounds=two"], "'two' is not a number of rounds"),
        (serving, [*here, "--model", str(tmp_path)], "has no config.json; name a model's"),
        (engine, [*here, "--sides", "mrv2", "--model", "/x"], "invalid choice: 'mrv2'"),
    ):
        with pytest.raises(SystemExit) as ended:
            program.main(arguments)
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err
    assert not out.exists()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back the handlers that the program sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_the_environment_spoils_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = ("VLLM_PLUGINS", "VLLM_READINESS_PROBE", "VLLM_READINESS_SYNC_GUARD")
    for name in (*left_out, "VLLM_READINESS"):
        monkeypatch.setenv(name, "off")
    argv = ["--site", str(sites.UPSTREAM), "--out", str(tmp_path)]
    command_line.parse(command_line.parser("A benchmark.", rounds=1), argv)
    assert not os.environ.keys() & {*left_out}
    assert os.environ["VLLM_READINESS"] == "off"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [*left_out, "VLLM_READINESS=off"]
