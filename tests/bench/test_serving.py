"""The program that measures serving: turns, interruptions, arguments; and one real run, small."""

import os
import signal
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bench import serving
from bench.errors import Failure
from bench.reports.run_file import load
from bench.servers import weights
from bench.servers.load import CASES, Load
from bench.servers.processes import Setting
from bench.servers.table import FIGURES, read_result
from demo import model
from safetensors.torch import load_file
from support.processes import gone
from support.serving_results import LOGPROBS, PENALTY, PLAIN, made, row_of
from support.sites import REPO, UPSTREAM
from tokenizers import Tokenizer

LOAD = Load({}, requests=4, concurrency=2, prompt=8, output=32, server=("--enforce-eager",))


def arguments(out: Path, **changes: Any) -> Namespace:
    defaults: dict[str, Any] = {"site": UPSTREAM, "out": out, "rounds": 1, "model": None}
    defaults |= {"python": sys.executable, "cases": list(CASES), "server": "", "timeout": 300.0}
    return Namespace(**defaults | changes)


@pytest.mark.slow
def test_both_sides_serve_every_request_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"MARK=serving-{uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    written = []
    write = serving.Run.write

    def noted(run: serving.Run, complete: bool) -> dict[str, Any]:
        written.append([case for case, results in run.results.items() for _ in results])
        return write(run, complete)

    monkeypatch.setattr(serving.Run, "write", noted)
    read = mock.Mock(wraps=read_result)
    monkeypatch.setattr("bench.serving.read_result", read)
    serving.measure(arguments(tmp_path), LOAD)
    run = load(tmp_path / "serving.json")
    assert run["complete"]
    assert [text for text in run["problems"] if "bursts" not in text] == []
    for case in CASES:
        assert all(number > 0 for figure in FIGURES for number in row_of(run, figure, case)[:2])
        assert row_of(run, "responses", case)[:2] == ["4 of 4"] * 2
        assert row_of(run, "tokens", case)[:2] == ["128 of 128"] * 2
        assert row_of(run, "tokens in the texts", case)[:2] == ["128 of 128"] * 2
    assert row_of(run, "logprobs of one request", LOGPROBS)[:2] == ["32 of 32"] * 2
    # Each case is kept as soon as it was measured.
    assert [len(cases) for cases in written] == [1, 2, 3, 4, 5, 6, 6]
    # The texts are the same, and could have differed.
    texts = {call.args[1]: call.args[0]["client"]["generated_texts"] for call in read.mock_calls}
    assert all(len(set(of_case)) >= 3 for of_case in texts.values())
    assert texts[PLAIN] == texts[LOGPROBS] != texts[PENALTY]
    assert run["digests"]["stock"] != run["digests"]["overlaid"]
    assert gone(mark)
    assert not list(UPSTREAM.parent.glob("bench-*/prepared.json"))


class Bar:
    """In place of the progress bar: counts its parts."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.parts: list[int] = []

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_description(self, _: str) -> None: ...

    def update(self, parts: int) -> None:
        self.parts.append(parts)

    def write(self, _: str) -> None: ...


class Faked:
    """A run without servers, whose sides return the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Path, device: str = "CPU") -> None:
        self.order: list[str] = []
        self.bars: list[Bar] = []
        self.untouched = mock.Mock()
        self.after_case: Callable[[str, int], None] = lambda side, turn: None
        self.prepare = mock.Mock(side_effect=lambda s, *_: setattr(s, "device", device))
        installations = SimpleNamespace(digests={}, check_untouched=self.untouched)
        monkeypatch.setattr(serving, "prepare", self.prepare)
        monkeypatch.setattr(serving, "_served", self.served)
        monkeypatch.setattr(serving, "progress", self.progress)
        monkeypatch.setattr(serving, "Installations", lambda *_: installations)
        monkeypatch.setattr(serving, "work_beside", lambda _: work)

    def progress(self, total: int) -> Bar:
        self.bars.append(Bar(total))
        return self.bars[-1]

    def served(self, setting: Setting, side: str, turn: int) -> serving.Served:
        self.order.append(side)
        yield "", None
        yield PLAIN, made(side, turn)
        self.after_case(side, turn)
        yield PENALTY, made(side, turn)

    def measure(self, out: Path, rounds: int | None = 1) -> int:
        return serving.measure(arguments(out, rounds=rounds, cases=[PLAIN, PENALTY]))


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Faked:
    return Faked(monkeypatch, tmp_path / "work")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interruption_before_anything_was_measured_leaves_no_run(
    tmp_path: Path, faked: Faked
) -> None:
    faked.prepare.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        faked.measure(tmp_path)
    assert not (tmp_path / "serving.json").exists()


def test_an_installation_that_was_changed_is_a_problem_and_costs_no_result(
    tmp_path: Path, faked: Faked
) -> None:
    faked.untouched.side_effect = Failure("SITE is not what it was")
    assert faked.measure(tmp_path) == 1
    run = load(tmp_path / "serving.json")
    assert run["problems"] == ["SITE is not what it was"]
    assert len(run["cases"]) == 2
    faked.after_case = interrupt
    assert faked.measure(tmp_path) == 130
    assert "SITE is not what it was" in load(tmp_path / "serving.json")["problems"]


def test_the_bar_reaches_its_end_whatever_fails(tmp_path: Path, faked: Faked) -> None:
    def fail(side: str, turn: int) -> None:
        if (side, turn) == ("overlaid", 1):
            raise Failure("the client of overlaid round 1 ended\nits log")

    faked.after_case = fail
    assert faked.measure(tmp_path, rounds=2) == 1
    run = load(tmp_path / "serving.json")
    assert run["complete"]
    assert run["problems"][0] == "the client of overlaid round 1 ended"
    (bar,) = faked.bars
    assert bar.total == sum(bar.parts) == 2 * 2 * (1 + 2)


@pytest.mark.parametrize(("device", "rounds"), [("CPU", 4), ("a GPU", 3)])
def test_each_side_is_first_equally_often(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    rounds: int,
) -> None:
    faked = Faked(monkeypatch, tmp_path / "work", device)
    faked.measure(tmp_path, rounds=None)
    sides = set(faked.order)
    first = faked.order[:: len(sides)]
    assert len(first) == rounds
    assert len({first.count(side) for side in sides}) == 1
    assert f"medians of {rounds} round(s)" in load(tmp_path / "serving.json")["note"]
    assert capsys.readouterr().err == ""
    faked.measure(tmp_path, rounds=5)
    warning = capsys.readouterr().err
    assert warning.count("5 is not a multiple") == warning.count("\n") == 1
    assert f"--rounds {rounds}" in warning


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The sentence with which the program ends before it begins."""
    begun = mock.patch.object(serving, "measure", side_effect=AssertionError("it began"))
    with begun, pytest.raises(SystemExit) as ended:
        serving.main(["--site", str(UPSTREAM), *map(str, argv)])
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


def test_arguments_that_cannot_work_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "file", tmp_path / "out"
    file.touch()
    for place in (file, file / "below", "/proc"):
        sentence = refused(capsys, "--out", place)
        assert sentence.startswith(f"--out {place}: ")
        assert "name a directory" in sentence
    assert "/nowhere: does not exist" in refused(capsys, "--out", out, "--site", "/nowhere")
    sentence = refused(capsys, "--out", out, "--model", tmp_path)
    assert sentence.startswith(f"--model {tmp_path} has no config.json; name a model's")
    for rounds in ("0", "-1", "two"):
        sentence = refused(capsys, "--out", out, f"--rounds={rounds}")
        assert "is not a number of rounds; give 1 or more" in sentence
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
    seen: dict[str, str] = {}

    def measure(*_: object, **__: object) -> None:
        seen.update(os.environ)
        raise Failure("as far as this test goes")

    monkeypatch.setattr(serving, "measure", measure)
    left_out = ("VLLM_PLUGINS", "VLLM_READINESS_PROBE", "VLLM_READINESS_SYNC_GUARD")
    for name in (*left_out, "VLLM_READINESS"):
        monkeypatch.setenv(name, "off")
    assert serving.main(["--site", str(UPSTREAM), "--out", str(tmp_path)]) == 1
    assert not seen.keys() & {*left_out}
    assert seen["VLLM_READINESS"] == "off"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [*left_out, "VLLM_READINESS=off"]
    assert lines[-1] == "bench: as far as this test goes"


#: A run whose servers are made up. It says when it has got to where it should be stopped.
STAND_IN = f"""
import sys, tempfile, time
from pathlib import Path
from types import SimpleNamespace
from bench import serving
from bench.servers.table import FIGURES, CaseResult

stop, work, *argv = sys.argv[1:]

def at(place):
    if place == stop:
        print("here", flush=True)
        time.sleep(60)

def views(*_):
    at("views")
    return SimpleNamespace(digests={{}}, check_untouched=lambda: None)

def served(setting, side, turn):
    yield "", None
    yield {PLAIN!r}, CaseResult(side, turn, dict.fromkeys(FIGURES, 1.0), {{}}, {{}})
    at("case")

serving.Installations, serving.prepare, serving._served = views, lambda *_: None, served
serving.work_beside = lambda _: Path(tempfile.mkdtemp(dir=work))
sys.exit(serving.main(argv))
"""


def stopped(
    tmp_path: Path, place: str, *numbers: int, before: Sequence[str] = ()
) -> tuple[int, str]:
    """The exit code of a run that gets signals at a place, and its stderr."""
    work = tmp_path / "work"
    work.mkdir()
    argv = [place, work, "--site", UPSTREAM, "--out", tmp_path / "out"]
    with subprocess.Popen(
        [*before, sys.executable, "-c", STAND_IN, *map(str, argv)],
        env={**os.environ, "PYTHONPATH": str(REPO / "scripts")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        while (line := process.stdout.readline()) != "here\n":
            assert line, "it ended before"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.2)
        _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGINT, 130),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_whatever_ends_a_run_leaves_what_was_measured(
    tmp_path: Path, number: int, code: int
) -> None:
    got, stderr = stopped(tmp_path, "case", number)
    assert got == code
    run = load(tmp_path / "out" / "serving.json")
    assert not run["complete"]
    assert run["problems"] == [serving.UNFINISHED]
    assert row_of(run) == [1.0]
    assert serving.UNFINISHED in (tmp_path / "out" / "serving.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"serving.json", "serving.md"}
    stop = f"bench: stopped; what was measured is in {tmp_path / 'out'}"
    assert (stop in stderr.splitlines()) == (number == signal.SIGINT)
    assert "Traceback" not in stderr
    assert number == signal.SIGKILL or list((tmp_path / "work").iterdir()) == []


def test_ctrl_c_while_views_are_made_says_so_in_a_line(tmp_path: Path) -> None:
    got, stderr = stopped(tmp_path, "views", signal.SIGINT)
    assert (got, stderr.strip()) == (130, "bench: stopped; nothing was measured")
    assert list((tmp_path / "work").iterdir()) == []


def test_a_hangup_that_the_caller_ignores_ends_nothing(tmp_path: Path) -> None:
    got, _ = stopped(tmp_path, "case", signal.SIGHUP, signal.SIGTERM, before=["nohup"])
    assert got == 143


def test_each_token_is_a_word_of_its_own(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model.write_tokenizer(tmp_path, 50) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 50
    assert tokenizer.decode([3, 1, 2, 49], skip_special_tokens=True) == "t3 t1 t2 t49"
    assert tokenizer.encode("t3 t1 t2 t49").ids == [3, 1, 2, 49]


def test_no_two_continuations_nearly_tie(tmp_path: Path) -> None:
    model.write(tmp_path, tie_word_embeddings=False)
    weights.write_weights(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == model.shapes(model.CONFIG)
    logits = tensors["lm_head.weight"].float() * model.CONFIG["hidden_size"] ** 0.5
    best = logits.topk(weights.CHOICES, dim=0).values
    assert (best[:-1] - best[1:]).min() > 0.5
    # A penalty of 1.5 moves one between two others.
    apart = (best[:, None] - best[None, :] - 1.5).abs()
    assert apart.min() > 0.2
    assert torch.equal(tensors["model.norm.weight"].float(), torch.ones(128))
