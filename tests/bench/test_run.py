"""A run: failures, interruptions and its limit, whatever it measures; of children made up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import serving, traffic
from bench.errors import Failure, Fatal
from bench.harness import command_line, manifest
from bench.harness import run as harness
from bench.harness.run import Job, Run
from bench.results.markdown import CUT_OFF
from bench.results.run_file import load
from support import sites
from support.runs import slice_of


class Faked(Run):
    """A run without processes."""

    title = "Made up."
    groups = (("tiny", "one", ("overlaid", "stock")), ("tiny", "two", ("overlaid", "stock")))

    def __init__(self, out: Path, rounds: int = 2, **more: Any) -> None:
        args: Any = SimpleNamespace(rounds=rounds, out=out, **more)
        installations: Any = SimpleNamespace(
            site=sites.UPSTREAM, digests={}, python_version="3.0", check_untouched=lambda: None
        )
        super().__init__(args, installations)

    def jobs(self) -> list[Job]:
        rounds = range(1, self.args.rounds + 1)
        return [Job(name, number) for number in rounds for name in ("one", "two")]

    def measure(self, job: Job) -> None:
        for order in (0, 1):
            self.keep(slice_of(job.round, order, 2.0, 1.0, case=job.name))


def test_the_manifest_is_written_before_anything_is_measured(tmp_path: Path) -> None:
    class Checked(Faked):
        def measure(self, job: Job) -> None:
            decided = json.loads((tmp_path / "manifest.json").read_text())
            assert decided["groups"] == [["tiny", each, ["overlaid", "stock"]] for each in names]
            assert decided["rounds"] == 2
            super().measure(job)

    names = ("one", "two")
    assert Checked(tmp_path).execute() == 0
    run = load(tmp_path / "run.json")
    assert run["manifest"] == json.loads((tmp_path / "manifest.json").read_text())
    assert list(manifest.differences(run)) == []
    assert len(run["slices"]) == 8


def test_no_job_begins_that_would_end_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job takes 20 s: by the first one, so does that of another name."""
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(harness, "time", clock)

    class Timed(Faked):
        def measure(self, job: Job) -> None:
            nonlocal now
            now += 20.0 if job.name == "one" else 7.0
            super().measure(job)

    # After two rounds, 54 s are over: "one" would end at 74 s, and "two" at 61 s.
    assert Timed(tmp_path, rounds=9, limit=62.0).execute() == 0
    run = load(tmp_path / "run.json")
    assert run["complete"]
    rounds = {
        name: [s["round"] for s in run["slices"] if s["case"] == name] for name in ("one", "two")
    }
    assert rounds == {"one": [1, 1, 2, 2], "two": [1, 1, 2, 2, 3, 3]}
    assert run["manifest"]["limit"] == 62.0
    assert "one, round 3 would end too late" in capsys.readouterr().err
    now = 0.0
    Timed(tmp_path, rounds=9, limit=30.0).execute()
    assert [one["case"] for one in load(tmp_path / "run.json")["slices"]] == ["one", "one"]


def test_what_has_started_stays_for_later_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start takes 30 s, and a round 10 s."""
    now = 0.0
    monkeypatch.setattr(harness, "time", SimpleNamespace(monotonic=lambda: now))

    class Kept(Faked):
        def jobs(self) -> list[Job]:
            return sorted(super().jobs(), key=lambda job: job.name)

        def measure(self, job: Job) -> None:
            nonlocal now
            if job.round == 1:
                now += 30.0
                self.started()
            now += 10.0
            super().measure(job)

    # After four rounds 70 s are over, and a start with its round would end at 110 s.
    Kept(tmp_path, rounds=4, limit=95.0).execute()
    found = [(one["case"], one["round"]) for one in load(tmp_path / "run.json")["slices"][::2]]
    assert found == [("one", n) for n in (1, 2, 3, 4)]
    now = 0.0
    Kept(tmp_path, rounds=4, limit=65.0).execute()
    assert len(load(tmp_path / "run.json")["slices"]) == 2 * 3


@pytest.mark.parametrize("value", ["0", "-3", "soon", "inf", "nan"])
def test_a_limit_is_a_time(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        traffic.main(["--site", str(sites.UPSTREAM), f"--limit={value}"])
    assert ended.value.code == 2
    assert f"{value!r} is not a number above 0" in capsys.readouterr().err


def test_a_job_that_fails_costs_its_own_slices_alone(tmp_path: Path) -> None:
    class Failing(Faked):
        def measure(self, job: Job) -> None:
            if job == ("two", 2):
                raise Failure("two, round 2 failed (1):\nits log")
            super().measure(job)

    assert Failing(tmp_path).execute() == 1
    run = load(tmp_path / "run.json")
    assert run["complete"]
    assert [one["case"] for one in run["slices"]] == ["one", "one", "two", "two", "one", "one"]
    assert run["problems"] == ["two, round 2 failed (1):\nits log"]
    text = (tmp_path / "run.md").read_text()
    assert "two, round 2 failed" in text
    assert "its log" in text


def test_a_fatal_error_ends_the_run_with_its_message(tmp_path: Path) -> None:
    class Failing(Faked):
        def measure(self, job: Job) -> None:
            super().measure(job)
            if job == ("two", 1):
                raise Fatal("a stream has an error")

    assert Failing(tmp_path).execute() == 1
    run = load(tmp_path / "run.json")
    assert {one["round"] for one in run["slices"]} == {1}
    assert run["problems"] == ["a stream has an error"]


def test_a_slice_is_printed_by_its_first_figure_with_a_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = slice_of(1, 0, 2.0, 1.0, figure="warm-up s")
    for side, value in (("overlaid", 3.0), ("stock", 4.0)):
        one["figures"][side]["schedule p50, same"] = value
    Faked(tmp_path).keep(one)
    line = capsys.readouterr().out
    assert line.endswith("tiny, plain, 4, overlaid/stock, round 1: schedule p50, same 3 / 4\n")


def test_a_slice_with_a_problem_fails_the_run(tmp_path: Path) -> None:
    class Spoilt(Faked):
        def measure(self, job: Job) -> None:
            self.keep(slice_of(job.round, 0, 0, 1.0, case=job.name))

    assert Spoilt(tmp_path).execute() == 1
    assert load(tmp_path / "run.json")["slices"][0]["problems"] == ["overlaid: no tokens"]


def test_an_installation_that_was_changed_is_an_error_and_costs_no_slice(tmp_path: Path) -> None:
    def changed() -> None:
        raise Failure("SITE is not what it was")

    run = Faked(tmp_path)
    run.installations.check_untouched = changed  # type: ignore[method-assign]
    assert run.execute() == 1
    written = load(tmp_path / "run.json")
    assert written["problems"] == ["SITE is not what it was"]
    assert len(written["slices"]) == 8


#: A program whose slices are made up. It prints a line where it should be stopped.
PROGRAM = """
import sys, time
from bench import traffic
from bench.harness import installations

stop, *argv = sys.argv[1:]

def at(place):
    if place == stop:
        print("here", flush=True)
        time.sleep(60)

class Views:
    def __init__(self, site, work, python):
        self.site, self.digests, self.python_version, self.work = site, {}, "3.0", work
        (work / "pristine").mkdir()
        at("views")
    def check_untouched(self):
        pass

def measure(run, job):
    about = {"round": job.round, "engine": "tiny", "case": "plain", "sides": ["a", "b"]}
    figures = {"a": {"tokens/s": 1.0}, "b": {"tokens/s": 1.0}}
    run.keep({**about, "order": 0, "figures": figures})
    at("slice")

installations.Installations, traffic.TrafficRun.measure = Views, measure
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
        ([signal.SIGHUP], [], 129),
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
    assert not run["complete"]
    assert len(run["slices"]) == 1
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
    file, out = tmp_path / "file", tmp_path / "out"
    file.touch()
    here = ["--site", str(sites.UPSTREAM), "--out", str(out)]
    for program, arguments, sentence in (
        (traffic, [*here, "--out", str(file)], f"--out {file}: "),
        (traffic, [*here, "--out", str(file / "below")], "name a directory to write to"),
        (traffic, [*here, "--site", "/nowhere"], "/nowhere: does not exist"),
        (traffic, [*here, "--rounds=0"], "'0' is not a number above 0"),
        (traffic, [*here, "--rounds=two"], "'two' is not a number above 0"),
        (traffic, [*here, "--pairs", "stock/stock"], "'stock/stock' is not a pair"),
        (serving, [*here, "--model", str(tmp_path)], "has no config.json; name a model's"),
        (serving, [*here, "--client=--a 'b"], "--client: No closing quotation"),
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
