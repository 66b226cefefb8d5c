"""The benchmark of serving: vLLM's own server and client, run small, and what spoils a ratio."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bench import report, serving, serving_child
from bench.serving import CASES, FIGURES, Found, Load, Setting
from bench.sides import PLUGIN, SIDES, Failure, in_turn
from demo import model
from safetensors.torch import load_file
from support.sites import REPO, UPSTREAM
from tokenizers import Tokenizer

PLAIN, PENALTY, LOGPROBS = CASES
LOAD = Load({}, requests=4, concurrency=2, prompt=8, output=32, server=("--enforce-eager",))
WANTED = LOAD.requests * LOAD.output
MARK = f"serving-{uuid.uuid4()}"


def alive() -> list[str]:
    """The command lines of processes that were started under the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={MARK}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", MARK)


@dataclass
class Bar:
    """In place of the progress bar: keeps what it was told."""

    total: int = 0
    parts: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __call__(self, total: int) -> "Bar":
        self.total = total
        return self

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None: ...

    def set_description(self, text: str) -> None: ...

    def update(self, parts: int) -> None:
        self.parts.append(parts)

    def write(self, text: str) -> None:
        self.said.append(text)


@dataclass
class Served:
    """One real run: what came of it, what the table was made of, and the client's own words."""

    run: dict[str, Any]
    found: dict[str, list[Found]]
    setting: Setting
    results: list[dict[str, Any]]
    bar: Bar
    kept: list[dict[str, Any]]
    left: list[str]
    probed: list[str]

    def cells(self, run: dict[str, Any], case: str) -> dict[str, list[Any]]:
        """Figure or count to its cells."""
        return {row[1]: row[2:] for row in run["rows"] if row[0] == case}

    def again(self, change: Callable[[dict[str, list[Found]]], None]) -> dict[str, Any]:
        """The table of the same run with something planted in it."""
        found = {
            case: [replace(one, counts=dict(one.counts)) for one in given]
            for case, given in self.found.items()
        }
        change(found)
        return serving.table(found, self.setting)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One round on both sides, with the real server and the real client."""
    bar, kept = Bar(), list[dict[str, Any]]()
    out = tmp_path_factory.mktemp("served")
    with (
        mock.patch.dict(os.environ, MARK=MARK),
        mock.patch.object(serving, "progress", bar),
        mock.patch.object(serving, "table", wraps=serving.table) as table,
        mock.patch.object(serving, "found_in", wraps=serving.found_in) as found_in,
    ):
        run = serving.measure(UPSTREAM, out, load=LOAD, probe=out / "probes", on_found=kept.append)
    found, setting, _ = table.call_args.args
    results = [call.args[0] for call in found_in.call_args_list]
    probed = sorted(path.name for path in (out / "probes").iterdir())
    return Served(run, found, setting, results, bar, kept, alive(), probed)


def test_both_sides_serve_every_request_whole(served: Served) -> None:
    assert served.run["complete"]
    assert [text for text in served.run["problems"] if "bursts" not in text] == []
    for case in CASES:
        cells = served.cells(served.run, case)
        for figure in FIGURES:
            assert all(number > 0 for number in cells[figure][:2]), figure
        assert cells["responses"][:2] == ["4 of 4"] * 2
        assert cells["tokens"][:2] == cells["tokens in the texts"][:2] == ["128 of 128"] * 2
        assert isinstance(cells["requests/s"][2][0], float)
        assert cells["requests/s"][2][1] == report.FEW
        assert ("logprobs of one request" in cells) == (case == LOGPROBS)
    assert served.cells(served.run, LOGPROBS)["logprobs of one request"][:2] == ["32 of 32"] * 2
    json.dumps(served.run)


def test_each_case_is_kept_when_it_was_measured(served: Served) -> None:
    cases = [sorted(run["cases"], key=list(CASES).index) for run in served.kept]
    assert cases == [[PLAIN], [PLAIN, PENALTY], [PLAIN, PENALTY, LOGPROBS]] + [list(CASES)] * 3
    assert not any(run["complete"] for run in served.kept)
    assert served.bar.total == sum(served.bar.parts) == 2 * (1 + len(CASES))
    assert len([text for text in served.bar.said if "tok/s" in text]) == 2 * len(CASES)


def test_texts_are_the_same_and_could_have_differed(served: Served) -> None:
    texts = {case: [one.streams["texts"] for one in found] for case, found in served.found.items()}
    for stock, overlaid in texts.values():
        assert stock == overlaid
        assert len({tuple(text) for text in stock}) >= 3
    assert texts[PLAIN] == texts[LOGPROBS] != texts[PENALTY]
    kinds = {kind for one in served.found[LOGPROBS] for kind in one.streams if one.streams[kind][0]}
    assert len(kinds) == 3


def test_the_sides_ran_what_they_should_and_nothing_is_left(served: Served) -> None:
    assert served.run["digests"]["stock"] != served.run["digests"]["overlaid"]
    assert served.left == []
    assert not served.setting.work.exists()
    assert served.probed == sorted(
        f"{side}-1.probe.{process}" for side in SIDES for process in ("engine0", "rank0")
    )


def test_a_differing_text_is_named_and_refuses_the_ratios_of_its_case(served: Served) -> None:
    def plant(found: dict[str, list[Found]]) -> None:
        texts = [list(text) for text in found[PENALTY][1].streams["texts"]]
        texts[2][5] = "t999"
        found[PENALTY][1].streams = {**found[PENALTY][1].streams, "texts": texts}

    run = served.again(plant)
    (problem,) = [text for text in run["problems"] if "bursts" not in text]
    assert "texts of stock round 1 and overlaid round 1 differ: request 2, position 5" in problem
    assert "t999" in problem
    assert all(served.cells(run, PENALTY)[figure][2] == "refused" for figure in FIGURES)
    assert isinstance(served.cells(run, PLAIN)["requests/s"][2][0], float)


def test_stock_that_differs_from_itself_refuses_every_ratio(served: Served) -> None:
    def plant(found: dict[str, list[Found]]) -> None:
        stock = found[PLAIN][0]
        other = {**stock.streams, "texts": [["t1"], *stock.streams["texts"][1:]]}
        lacking = {**stock.counts, "responses": (3, 4)}
        found[PLAIN].append(replace(stock, turn=2, streams=other, counts=lacking))

    run = served.again(plant)
    lost, problem = [text for text in run["problems"] if "bursts" not in text]
    assert lost == f"{PLAIN}: stock round 2: 3 of 4 responses"
    assert "stock round 1 and stock round 2" in problem
    assert "VLLM_BATCH_INVARIANT" in problem
    assert served.cells(run, PLAIN)["responses"][:2] == ["3 of 4", "4 of 4"]
    assert served.cells(run, PLAIN)["requests/s"][2] == "refused"


def replanted(served: Served, **changes: Any) -> dict[str, Any]:
    """The run with other words from the client that drove the overlaid side, plain."""
    found = serving.found_in(served.results[3] | changes, "overlaid", 1, LOAD, True)

    def plant(all_found: dict[str, list[Found]]) -> None:
        streams = {**all_found[PLAIN][1].streams, **found.streams}
        all_found[PLAIN][1] = replace(found, streams=streams)

    return served.again(plant)


def test_a_lost_response_is_reported(served: Served) -> None:
    assert replanted(served)["problems"] == served.again(lambda found: None)["problems"]
    result = served.results[3]
    texts, errors = list(result["generated_texts"]), list(result["errors"])
    texts[1], errors[1] = "", "Traceback\n  ...\nConnectionError: gone\n"
    tokens = result["total_output_tokens"] - LOAD.output
    run = replanted(
        served, completed=3, total_output_tokens=tokens, generated_texts=texts, errors=errors
    )
    for text in ("3 of 4 responses", "96 of 128 tokens", "request 1 failed: ConnectionError: gone"):
        assert f"{PLAIN}: overlaid round 1: {text}" in run["problems"]
    assert served.cells(run, PLAIN)["responses"][:2] == ["4 of 4", "3 of 4"]
    assert served.cells(run, PLAIN)["requests/s"][2] == "refused"


def test_a_token_that_the_text_lacks_is_reported(served: Served) -> None:
    texts = list(served.results[3]["generated_texts"])
    texts[3] = texts[3].rpartition(" ")[0]
    run = replanted(served, generated_texts=texts)
    said = "\n".join(run["problems"])
    assert "127 of 128 tokens in the texts" in said
    assert "request 3, position 31" in said
    assert served.cells(run, PLAIN)["requests/s"][2] == "refused"


def test_a_lost_or_other_logprob_is_reported(served: Served) -> None:
    kind = "logprobs of one request alone"

    def lose(found: dict[str, list[Found]]) -> None:
        found[LOGPROBS][1].counts = {**found[LOGPROBS][1].counts, "logprobs": (31, 32)}

    def change(found: dict[str, list[Found]]) -> None:
        streams = found[LOGPROBS][1].streams
        lines = [*streams[kind][0][:-1], "-0.125 []"]
        found[LOGPROBS][1].streams = {**streams, kind: [lines]}

    for plant, said in ((lose, "31 of 32 logprobs"), (change, f"{kind} of stock round 1")):
        run = served.again(plant)
        assert any(said in text for text in run["problems"])
        assert served.cells(run, LOGPROBS)["requests/s"][2] == "refused"


def test_bursts_refuse_the_latencies_alone(served: Served) -> None:
    for bursts in (False, True):

        def plant(found: dict[str, list[Found]], bursts: bool = bursts) -> None:
            found[PLAIN][0].bursts, found[PLAIN][1].bursts = False, bursts

        run = served.again(plant)
        said = f"{PLAIN}: overlaid round 1: tokens came in bursts, no latency counts"
        assert (said in run["problems"]) == bursts
        cells = served.cells(run, PLAIN)
        assert [cells[figure][2] == "refused" for figure in FIGURES] == [False] * 2 + [bursts] * 6
    for median, bursts in ((10.0, False), (1.0, True)):
        result = served.results[0] | {"median_itl_ms": median, "mean_itl_ms": 10.0}
        assert serving.found_in(result, "stock", 1, LOAD, True).bursts == bursts


def test_a_side_that_failed_refuses_every_ratio(served: Served) -> None:
    def lose(found: dict[str, list[Found]]) -> None:
        for given in found.values():
            del given[0]

    run = served.again(lose)
    assert run["columns"][2:] == ["overlaid", "overlaid / stock"]
    assert served.cells(run, PLAIN)["requests/s"][1] == "refused"


def made(side: str, turn: int, figure: float = 1.0, words: str = "t1") -> Found:
    """What a side might have given in a round: every figure is the same."""
    return Found(side, turn, dict.fromkeys(FIGURES, figure), {"tokens": (1, 1)}, {"texts": [words]})


def table_of(setting: Setting, *given: Found) -> dict[str, Any]:
    return serving.table({PLAIN: given}, setting)


def row_of(run: dict[str, Any], figure: str = "ITL p50") -> list[Any]:
    (row,) = [row[2:] for row in run["rows"] if row[1] == figure]
    return list(row)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Of a stock side alone, whose model is not there."""
    sides: Any = SimpleNamespace(paths={"stock": [UPSTREAM]}, check_import=lambda *_: None)
    (tmp_path / "out").mkdir()
    return Setting(sides, sys.executable, tmp_path, tmp_path / "out", tmp_path / "no-model")


def test_a_server_that_ends_is_named_with_its_log(setting: Setting) -> None:
    with pytest.raises(Failure) as failed, serving.Server(setting, "stock", 1):
        pass
    first = str(failed.value).partition("\n")[0]
    log = setting.out / "stock-round-1-server.log"
    assert first == f"the server of stock round 1 did not start (exit code 1); log: {log}"
    assert "no-model" in log.read_text()
    assert alive() == []


#: Instead of Python: a server that does not serve, ignores SIGTERM, and has started another.
STUBBORN = """#!/bin/sh
trap '' TERM
sleep 60 &
echo started
for second in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 1; done
"""


def test_a_server_that_hangs_is_ended_with_all_that_it_started(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = setting.work / "stubborn"
    program.write_text(STUBBORN)
    program.chmod(0o755)
    setting.python, setting.timeout = str(program), 1.0
    monkeypatch.setattr(serving, "GRACE", 0.5)
    started = time.monotonic()
    with (
        pytest.raises(Failure, match="did not serve within 1 s"),
        serving.Server(setting, "stock", 1),
    ):
        pass
    assert (setting.out / "stock-round-1-server.log").read_text() == "started\n"
    assert time.monotonic() - started < 20
    deadline = time.monotonic() + 5
    while alive() and time.monotonic() < deadline:  # killed, and not yet gone
        time.sleep(0.05)
    assert alive() == []


def test_a_second_ctrl_c_leaves_no_process(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = setting.work / "stubborn"
    program.write_text(STUBBORN)
    program.chmod(0o755)
    setting.python = str(program)
    client = serving.Client(setting, "stock", 1, "http://nowhere")
    client.__enter__()
    deadline = time.monotonic() + 5
    while client.log.read_text() != "started\n" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(alive()) >= 2
    with monkeypatch.context() as patched:
        interrupted = mock.Mock(side_effect=KeyboardInterrupt)
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=interrupted)
        patched.setattr(serving, "time", clock)
        with pytest.raises(KeyboardInterrupt):
            client.__exit__()
    deadline = time.monotonic() + 5
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive() == []


#: Instead of Python: a client that drives the first case, and then does as its name says.
HALF = """#!/bin/sh
echo '{"package": ""}' > "$3"
while [ ! -e "${4}0" ]; do sleep 0.02; done
touch "${4}0.done"
case "$0" in */hangs) exec sleep 20;; esac
exit 3
"""


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("ends", "ended at 'presence_penalty 1.5' (exit code 3)"),
        ("hangs", "had no end of 'presence_penalty 1.5' after 1 s"),
    ],
)
def test_a_client_that_fails_at_a_case_has_given_those_before(
    setting: Setting, does: str, said: str
) -> None:
    program = setting.work / does
    program.write_text(HALF)
    program.chmod(0o755)
    setting.python, setting.timeout = str(program), 1.0
    with serving.Client(setting, "stock", 1, "http://nowhere") as client:
        client.results[PLAIN].write_text('{"completed": 4}')
        assert client.drive(PLAIN) == {"completed": 4}
        with pytest.raises(Failure) as failed:
            client.drive(PENALTY)
    assert str(failed.value).startswith(f"the client of stock round 1 {said}; log: ")
    assert alive() == []


def test_commands_run_when_each_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli: Any = ModuleType("vllm.entrypoints.cli.main")
    go, ran = tmp_path / "go", list[list[str]]()

    def main() -> None:
        assert Path(f"{go}{len(ran)}").exists()
        assert len(list(tmp_path.glob("go*.done"))) == len(ran)
        ran.append(sys.argv)

    cli.main = main
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", cli)
    monkeypatch.setattr("vllm.entrypoints.cli.main", cli, raising=False)
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(metadata, "version", metadata.version)  # put back
    Path(f"{go}0").touch()
    later = threading.Timer(0.3, Path(f"{go}1").touch)
    later.start()
    serving_child.command(tmp_path / "out.json", str(go), ["serve 'a b'", "other"])
    later.join()
    assert ran == [["vllm", "serve", "a b"], ["vllm", "other"]]
    assert len(list(tmp_path.glob("go*.done"))) == 2
    assert json.loads((tmp_path / "out.json").read_text())["package"].endswith("vllm")


def test_the_servers_differ_in_what_they_should(setting: Setting) -> None:
    setting.probe, setting.load = Path("/probes"), replace(LOAD, server=("--x", "a b"))
    stock, mrv2 = (serving.Server(setting, side, 3) for side in ("stock", serving.MRV2))
    for server, runner in ((stock, "0"), (mrv2, "1")):
        assert server.origin == "stock"
        assert server._environment["VLLM_USE_V2_MODEL_RUNNER"] == runner
        path = server._environment["PYTHONPATH"].split(os.pathsep)
        assert path[:2] == [str(UPSTREAM), str(PLUGIN)]
        assert shlex.split(server.lines()[0])[-2:] == ["--x", "a b"]
    assert mrv2._environment["VLLM_READINESS_PROBE"] == "/probes/mrv2-3.probe"
    assert stock._environment["VLLM_READINESS_PROBE"] == "/probes/stock-3.probe"


#: What a table's run begins with, as far as it is shown.
HEAD: dict[str, Any] = {
    "machine": {"device": "CPU", "driver": None, "cores": 1, "cpu": "one"},
    "versions": {},
    "digests": {},
    "date": "today",
    "command": "serve",
}


@pytest.mark.parametrize(
    ("stock", "overlaid", "cell", "note"),
    [
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.4), 2.0, None),
        ((1.0, 2.0, 3.0), (3.0, 4.0, 5.0), [2.0, report.NOISE], report.NOISE),
        ((1.0, 1.1), (2.1, 2.1), [2.0, report.FEW], report.FEW),
        ((1.0,), (2.0,), [2.0, report.FEW], report.FEW),
    ],
)
def test_a_ratio_that_may_be_noise_is_marked(
    setting: Setting,
    stock: Sequence[float],
    overlaid: Sequence[float],
    cell: float | list[object],
    note: str | None,
) -> None:
    sides = {"stock": stock, "overlaid": overlaid}
    given = [made(side, n, x) for side in SIDES for n, x in enumerate(sides[side], 1)]
    run = table_of(setting, *given)
    assert run["problems"] == []
    assert row_of(run)[2] == cell
    said = report.markdown(run | {"kind": "table"} | HEAD)
    assert [mark for mark in report.MARKS if report.MARKS[mark] in said] == [note] * bool(note)


def test_only_rounds_of_every_side_are_compared(setting: Setting) -> None:
    # Alike, round by round.
    given = [made("stock", n, x) for n, x in ((1, 10.0), (2, 20.0), (3, 10.0))]
    given += [made("overlaid", n, x) for n, x in ((1, 10.0), (2, 20.0))]
    run = table_of(setting, *given)
    assert row_of(run) == [15.0, 15.0, [1.0, report.NOISE]]
    assert "medians of 2 round(s)" in run["note"]
    assert run["problems"] == []
    assert [one["round"] for one in run["cases"][PLAIN]["rounds"]["stock"]] == [1, 2, 3]


def test_a_side_that_was_never_measured_takes_no_round_away(setting: Setting) -> None:
    cases = {
        PLAIN: [made("stock", 1, 2.0), made("stock", 2, 4.0)],
        PENALTY: [made("stock", 1, 2.0), made("overlaid", 1, 2.0)],
    }
    run = serving.table(cases, setting)
    (row, _) = [row[2:] for row in run["rows"] if row[1] == "ITL p50"]
    assert row == [3.0, "not measured", "refused"]
    assert "medians of 1 or 2 round(s)" in run["note"]


def test_rounds_that_are_not_compared_may_spoil_a_ratio_all_the_same(setting: Setting) -> None:
    alike = [made(side, n) for side in SIDES for n in (1, 2)]
    for spoilt, said in (
        (made("stock", 3, words="t2"), "texts of stock round 1 and stock round 3 differ"),
        (replace(made("stock", 3), counts={"tokens": (0, 1)}), "stock round 3: 0 of 1 tokens"),
    ):
        run = table_of(setting, *alike, spoilt)
        assert any(said in text for text in run["problems"])
        assert row_of(run)[2] == "refused"


def test_sides_without_a_common_round_are_not_compared(setting: Setting) -> None:
    run = table_of(setting, made("stock", 1), made("overlaid", 2))
    assert row_of(run) == ["not compared", "not compared", "refused"]
    assert run["problems"] == [f"{PLAIN}: no round has every side, so there is nothing to compare"]


class Faked:
    """A run without servers: sides that were made already, and what each of them gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "CPU") -> None:
        self.order: list[str] = []
        self.bar = Bar()
        self.sides: Any = SimpleNamespace(digests={}, check_untouched=lambda: None)
        self.then: Callable[[str, int], None] = lambda side, turn: None

        def prepare(setting: Setting, *_: object) -> None:
            setting.device = device

        monkeypatch.setattr(serving, "_prepare", prepare)
        monkeypatch.setattr(serving, "_served", self.served)
        monkeypatch.setattr(serving, "progress", self.bar)

    def served(
        self, setting: Setting, side: str, turn: int, started: Callable[[], None]
    ) -> Generator[tuple[str, Found], None, None]:
        self.order.append(side)
        started()
        yield PLAIN, made(side, turn)
        self.then(side, turn)
        yield PENALTY, made(side, turn)

    def measure(self, out: Path, rounds: int | None = 1) -> dict[str, Any]:
        cases = (PLAIN, PENALTY)
        return serving.measure(UPSTREAM, out, sides=self.sides, rounds=rounds, cases=cases)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    return Faked(monkeypatch)


def test_an_interrupted_run_keeps_what_was_measured(tmp_path: Path, faked: Faked) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    faked.then = interrupt
    run = faked.measure(tmp_path)
    assert not run["complete"]
    assert run["problems"] == [serving.UNFINISHED]
    assert {row[0] for row in run["rows"]} == {PLAIN}
    assert row_of(run, "tokens") == ["1 of 1"]
    assert serving.UNFINISHED in report.markdown(run)


def test_an_interruption_before_anything_was_measured_leaves_no_run(
    tmp_path: Path, faked: Faked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_prepare", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        faked.measure(tmp_path)


def test_an_installation_that_was_changed_is_a_problem_and_costs_no_result(
    tmp_path: Path, faked: Faked
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    check = mock.Mock(side_effect=Failure("SITE is not what it was"))
    faked.sides.check_untouched = check
    run = faked.measure(tmp_path)
    assert run["problems"] == ["SITE is not what it was"]
    assert len(run["cases"]) == 2
    faked.then = interrupt
    assert "SITE is not what it was" in faked.measure(tmp_path)["problems"]


def test_the_bar_reaches_its_end_whatever_fails(tmp_path: Path, faked: Faked) -> None:
    def fail(side: str, turn: int) -> None:
        if (side, turn) == ("overlaid", 1):
            raise Failure("the client of overlaid round 1 ended\nits log")

    faked.then = fail
    run = faked.measure(tmp_path, rounds=2)
    assert run["complete"]
    assert run["problems"][0] == "the client of overlaid round 1 ended"
    assert faked.bar.total == sum(faked.bar.parts) == 2 * 2 * (1 + 2)
    assert faked.bar.parts.count(1) == len(faked.bar.parts)


@pytest.mark.parametrize(("device", "rounds"), [("CPU", 4), ("a GPU", 3)])
def test_each_side_is_first_equally_often(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    rounds: int,
) -> None:
    faked = Faked(monkeypatch, device)
    run = faked.measure(tmp_path, rounds=None)
    sides = set(faked.order)
    first = faked.order[:: len(sides)]
    assert len(first) == rounds
    assert len({first.count(side) for side in sides}) == 1
    assert f"medians of {rounds} round(s)" in run["note"]
    assert capsys.readouterr().err == ""
    faked.measure(tmp_path, rounds=5)
    said = capsys.readouterr().err
    assert said.count("5 is no multiple") == said.count("\n") == 1
    assert f"--rounds {rounds}" in said


def test_sides_take_turns_at_being_first() -> None:
    orders = [in_turn(turn, ["a", "b", "c"])[0] for turn in range(4)]
    assert orders == ["a", "b", "c", "a"]


def test_an_installation_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serving.main(["--site", "/nowhere", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "/nowhere: does not exist" in said
    assert "name the directory that holds vllm/" in said
    assert not (tmp_path / "out").exists()


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The sentence with which the program ends before it begins."""
    begun = mock.patch.object(serving, "measure", side_effect=AssertionError("it began"))
    with begun, pytest.raises(SystemExit) as ended:
        serving.main(["--site", str(UPSTREAM), *map(str, argv)])
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]


def test_results_that_have_nowhere_to_go_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    fine = ("--out", tmp_path / "out")
    for argv, place in (
        (("--out", file), file),
        (("--out", file / "below"), file / "below"),
        ((*fine, "--probe", file), file),
        (("--out", "/proc"), "/proc"),
    ):
        said = refused(capsys, *argv)
        assert said.startswith(f"{argv[-2]} {place}: ")
        assert "name a" in said


def test_a_model_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for directory in ("empty", "nowhere"):
        model_path = tmp_path / directory
        said = refused(capsys, "--out", tmp_path / "out", "--model", model_path)
        assert said.startswith(f"--model {model_path}: no directory with a config.json; name one")
    assert not (tmp_path / "out").exists()


def test_a_number_of_rounds_below_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rounds in ("0", "-1", "two"):
        said = refused(capsys, "--out", tmp_path / "out", f"--rounds={rounds}")
        assert said == f"argument --rounds: '{rounds}' is no number of rounds; give 1 or more"
    assert not (tmp_path / "out").exists()


@pytest.fixture
def handlers() -> Generator[None, None, None]:
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
    argv = ["--site", str(UPSTREAM), "--out", str(tmp_path)]
    left_out = ("VLLM_PLUGINS", "VLLM_READINESS_PROBE", "VLLM_READINESS_SYNC_GUARD")
    for name in (*left_out, "VLLM_READINESS"):
        monkeypatch.delenv(name, raising=False)
    assert serving.main(argv) == 1
    assert capsys.readouterr().err == "bench: as far as this test goes\n"
    for name in (*left_out, "VLLM_READINESS"):
        monkeypatch.setenv(name, "off")
    seen.clear()
    assert serving.main(argv) == 1
    assert not seen.keys() & {*left_out}
    assert seen["VLLM_READINESS"] == "off"
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [*left_out, "VLLM_READINESS=off"]


#: A run whose servers are made up. It says when it has got to where it should be stopped.
STAND_IN = f"""
import sys, tempfile, time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from bench import serving

stop, work, *argv = sys.argv[1:]
figures = dict.fromkeys(serving.FIGURES, 1.0)

def at(place):
    if place == stop:
        print("here", flush=True)
        time.sleep(60)

def views(*_):
    at("views")
    return SimpleNamespace(digests={{}}, check_untouched=lambda: None)

def served(setting, side, turn, started):
    started()
    yield {PLAIN!r}, serving.Found(side, turn, figures, {{}}, {{}})
    at("case")

serving.Sides, serving._prepare, serving._served = views, lambda *_: None, served
serving.work_beside = lambda _: Path(tempfile.mkdtemp(dir=work))
sys.exit(serving.main(argv))
"""


def stopped(
    tmp_path: Path, place: str, *numbers: int, before: Sequence[str] = ()
) -> tuple[int, str]:
    """The exit code of a run that gets signals at a place, and what it says of it."""
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    argv = [place, work, "--site", UPSTREAM, "--out", out]
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
        _, said = process.communicate(timeout=60)
    return process.returncode, said


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
    got, said = stopped(tmp_path, "case", number)
    assert got == code
    run = json.loads((tmp_path / "out" / "serving.json").read_text())
    assert not run["complete"]
    assert row_of(run) == [1.0]
    assert serving.UNFINISHED in (tmp_path / "out" / "serving.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"serving.json", "serving.md"}
    lines = [line for line in said.splitlines() if line.startswith("bench: stopped")]
    wanted = [f"bench: stopped; what was measured is in {tmp_path / 'out'}"]
    assert lines == (wanted if number == signal.SIGINT else [])
    assert "Traceback" not in said
    if number != signal.SIGKILL:
        assert list((tmp_path / "work").iterdir()) == []


def test_ctrl_c_while_views_are_made_says_so_in_a_line(tmp_path: Path) -> None:
    got, said = stopped(tmp_path, "views", signal.SIGINT)
    assert (got, said.strip()) == (130, "bench: stopped; nothing was measured")
    assert list((tmp_path / "work").iterdir()) == []


def test_a_hangup_that_the_caller_ignores_ends_nothing(tmp_path: Path) -> None:
    got, _ = stopped(tmp_path, "case", signal.SIGHUP, signal.SIGTERM, before=["nohup"])
    assert got == 143


def test_results_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serving.json"
    report.replace(file, "one")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            report.replace(file, "two")
    assert file.read_text() == "one"
    report.replace(file, "two")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["two"]


def test_each_token_is_a_word_of_its_own(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model.write_tokenizer(tmp_path, 50) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 50
    assert tokenizer.decode([3, 1, 2, 49], skip_special_tokens=True) == "t3 t1 t2 t49"
    assert tokenizer.encode("t3 t1 t2 t49").ids == [3, 1, 2, 49]


def test_no_two_continuations_nearly_tie(tmp_path: Path) -> None:
    model.write(tmp_path, tie_word_embeddings=False)
    serving_child.write_weights(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(found.shape) for name, found in weights.items()} == model.shapes(
        model.CONFIG
    )
    logits = weights["lm_head.weight"].float() * model.CONFIG["hidden_size"] ** 0.5
    best = logits.topk(serving_child.CHOICES, dim=0).values
    assert (best[:-1] - best[1:]).min() > 0.5
    # A penalty of 1.5 moves one between two others.
    apart = (best[:, None] - best[None, :] - 1.5).abs()
    assert apart.min() > 0.2
    assert torch.equal(weights["model.norm.weight"].float(), torch.ones(128))
