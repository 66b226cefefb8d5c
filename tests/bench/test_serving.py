"""The benchmark of serving: vLLM's own server and client, run small, and what spoils a ratio."""

import json
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from bench import report, serving, serving_child
from bench.serving import CASES, FIGURES, Found, Load, Setting
from bench.sides import PLUGIN, SIDES, Failure
from demo import model
from safetensors.torch import load_file
from support.sites import UPSTREAM
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
class Served:
    """One real run: what came of it, what the table was made of, and the client's own words."""

    run: dict[str, Any]
    found: dict[str, list[Found]]
    setting: Setting
    results: list[dict[str, Any]]
    progress: list[str]
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
    progress: list[str] = []
    out = tmp_path_factory.mktemp("served")
    with (
        mock.patch.dict(os.environ, MARK=MARK),
        mock.patch.object(serving, "table", wraps=serving.table) as table,
        mock.patch.object(serving, "found_in", wraps=serving.found_in) as found_in,
    ):
        run = serving.measure(
            UPSTREAM, out, load=LOAD, probe=out / "probes", on_progress=progress.append
        )
    found, setting, _ = table.call_args.args
    results = [call.args[0] for call in found_in.call_args_list]
    probed = sorted(path.name for path in (out / "probes").iterdir())
    return Served(run, found, setting, results, progress, alive(), probed)


def test_both_sides_serve_every_request_whole(served: Served) -> None:
    assert served.run["complete"]
    assert [text for text in served.run["problems"] if "bursts" not in text] == []
    for case in CASES:
        cells = served.cells(served.run, case)
        for figure in FIGURES:
            assert all(number > 0 for number in cells[figure][:2]), figure
        assert cells["responses"][:2] == ["4 of 4"] * 2
        assert cells["tokens"][:2] == cells["tokens in the texts"][:2] == ["128 of 128"] * 2
        assert isinstance(cells["requests/s"][2], float)
        assert ("logprobs of one request" in cells) == (case == LOGPROBS)
    assert served.cells(served.run, LOGPROBS)["logprobs of one request"][:2] == ["32 of 32"] * 2
    assert len(served.progress) == 1 + 2 * len(CASES)
    json.dumps(served.run)


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
    assert {served.cells(run, PENALTY)[figure][2] for figure in FIGURES} == {"refused"}
    assert isinstance(served.cells(run, PLAIN)["requests/s"][2], float)


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


#: Instead of Python: a server that never serves, ignores SIGTERM, and has started another.
STUBBORN = """#!/bin/sh
trap '' TERM
sleep 600 &
echo started
while :; do sleep 1; done
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


def test_an_interrupted_run_keeps_what_was_measured(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(setting: Setting, side: str, turn: int) -> Iterator[tuple[str, Found]]:
        yield PLAIN, served.found[PLAIN][0]
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "_prepare", lambda *_: None)
    monkeypatch.setattr(serving, "_served", cut_off)
    sides: Any = SimpleNamespace(digests={})
    run = serving.measure(UPSTREAM, tmp_path, sides=sides)
    assert not run["complete"]
    assert run["problems"][0] == "interrupted"
    assert served.cells(run, PLAIN)["tokens"] == ["128 of 128"]
    assert "interrupted" in report.markdown(run)


def test_sides_take_turns_at_being_first() -> None:
    orders = [serving._by_turns(["a", "b", "c"], turn)[0] for turn in (1, 2, 3, 4)]
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
