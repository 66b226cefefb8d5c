"""The benchmark of serving: its model, what it reads from vLLM's client, and its processes."""

import argparse
import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import serving
from bench.compare import outputs, summary
from bench.compare.installations import SIDES, Installations
from bench.compare.limit import Limit
from bench.compare.run import Job, Table
from bench.compare.summary import CaseResult, Child
from bench.errors import Failure
from bench.reports.run_file import load
from bench.reports.verify import edited
from bench.servers import server, weights
from bench.servers.child import drive
from bench.servers.load import (
    CASES,
    LOADS,
    OWN,
    Load,
    own_client_arguments,
    server_arguments,
)
from bench.servers.results import FIGURES, TEXTS, read, read_own
from demo import model
from safetensors.torch import load_file
from support.benches import bench
from support.processes import gone, started_with
from support.serving_results import LOGPROBS, PENALTY, PLAIN, answers
from support.sites import UPSTREAM
from tokenizers import Tokenizer
from vllm.benchmarks.serve import add_cli_args

#: One round of the smallest size.
TINY = ("--size", "tiny", "--rounds", "1", "--timeout", "900")
LOAD = Load({}, requests=4, concurrency=2, prompt=8, output=3)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable that marks the processes of a test."""
    value = f"{uuid.uuid4()}"
    monkeypatch.setenv("MARK", value)
    return f"MARK={value}"


def logs(out: Path) -> str:
    """The logs that a run has kept."""
    return "\n".join(
        f"{path.name}:\n{path.read_text(errors='replace')}" for path in out.glob("*.log")
    )


@pytest.mark.slow
def test_both_sides_serve_every_request_whole(tmp_path: Path, mark: str) -> None:
    done = bench("serving", tmp_path, *TINY)
    assert done.returncode in (0, 1), done.stderr
    run = load(tmp_path / "run.json")
    assert run["errors"] == [], logs(tmp_path)
    assert run["complete"]
    assert edited(run) == []
    cases = run["rows"][serving.NAME]["cases"]
    assert list(cases) == list(CASES)
    for name, case in cases.items():
        listed = [text for texts in case["problems"].values() for text in texts]
        assert [text for text in listed if "bursts" not in text] == [], logs(tmp_path)
        for figure in FIGURES:
            assert all(case["figures"][figure][side] > 0 for side in SIDES)
        for side in SIDES:
            (counts,) = case["counts"][side]
            assert counts["responses"] == [4, 4]
            assert counts["tokens"] == counts["tokens in the texts"] == [128, 128]
            assert counts.get("logprobs of one request") == ([32, 32] if name == LOGPROBS else None)
    assert run["digests"]["stock"] != run["digests"]["overlaid"]
    assert gone(mark)


#: A user's own requests and server.
CLIENT = "--dataset-name random --random-input-len 8 --random-output-len 16 --num-prompts 4"
CLIENT += " --request-rate 20 --ignore-eos --temperature 0"
FLAGS = "--enforce-eager --max-model-len 128 --max-num-seqs 3"


@pytest.mark.slow
def test_own_traffic_is_driven_with_the_servers_own_flags(tmp_path: Path, mark: str) -> None:
    done = bench("serving", tmp_path, *TINY, "--client", CLIENT, "--server", FLAGS)
    assert done.returncode in (0, 1), done.stderr
    run = load(tmp_path / "run.json")
    assert run["errors"] == [], logs(tmp_path)
    assert run["complete"]
    assert edited(run) == []
    row = run["rows"][serving.NAME]
    assert f"`vllm bench serve {CLIENT}`, served with `{FLAGS}`" in row["shape"]
    assert row["sides"] == [*SIDES, summary.AGAIN]
    (case,) = row["cases"].values()
    listed = [text for texts in case["problems"].values() for text in texts]
    assert [text for text in listed if "bursts" not in text] == [], logs(tmp_path)
    for side in row["sides"]:
        assert case["counts"][side] == [{"responses": [4, 4]}]
        assert case["figures"]["tokens/s"][side] > 0
    for child in row["children"]:
        assert len(child["cases"][OWN]["digests"][TEXTS]) > 0
    assert gone(mark)


def own_run(texts: dict[str, str], number: int = 1) -> list[Child]:
    """The children of a round, by side the last text that each returned."""
    children = []
    for side, text in texts.items():
        written = answers(PLAIN)
        written["client"] |= {"input_lens": [3] * 4, "single": None}
        written["client"]["generated_texts"][3] = text
        result = read_own(written)
        result.prompts = f"seed {number}"
        children.append(Child(side, number, {OWN: result}))
    return children


def reported(tmp_path: Path, *rounds: dict[str, str]) -> dict[str, Any]:
    """The case of a run's JSON, which is written after each child."""
    run = faked(tmp_path, "")
    run.own, run._varying = ["--num-prompts", "4"], ""
    table = Table([*SIDES, summary.AGAIN], {"shape": "own"}, {OWN: {}}, "server")
    run.tables = {serving.NAME: table}
    run._started, run._errors, run._decided, run.device = 0.0, [], {}, "CPU"
    run.installations.digests = {}
    run.installations.site, run.installations.python_version = UPSTREAM, "3"
    whole: dict[str, Any] = {}
    for number, texts in enumerate(rounds, 1):
        for child in own_run(texts, number):
            table.children.append(child)
            whole = run.report(complete=False)
    row: dict[str, Any] = whole["rows"][serving.NAME]
    return row


def test_texts_are_compared_where_stock_repeats_itself(tmp_path: Path) -> None:
    row = reported(tmp_path, {"stock": "t1 t2", "overlaid": "t1 t3", summary.AGAIN: "t1 t2"})
    assert row["shape"] == "own"
    (problem,) = row["cases"][OWN]["problems"]["overlaid"]
    assert "texts of stock round 1 and overlaid round 1 differ: request 3, position 1" in problem


def test_texts_are_not_compared_where_stock_differs_from_itself(tmp_path: Path) -> None:
    """In the second of three rounds, whose children are of before and after."""
    same = {"stock": "t1 t2", "overlaid": "t1 t2", summary.AGAIN: "t1 t2"}
    row = reported(tmp_path, same, {**same, summary.AGAIN: "t1 t4"}, {**same, "overlaid": "t9"})
    assert row["shape"].startswith("own. Texts are not compared: stock differs, round 2, request 3")
    assert row["shape"].count("Texts") == 1
    assert set(map(tuple, row["cases"][OWN]["problems"].values())) == {()}
    for child in row["children"]:
        assert list(child["cases"][OWN]["digests"]) == ["prompts' lengths"]


@pytest.mark.parametrize("option", ["--client", "--server"])
def test_arguments_that_no_shell_would_take_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serving.main(["--site", str(UPSTREAM), f"{option}=--a 'b"])
    assert ended.value.code == 2
    assert f"{option}: No closing quotation" in capsys.readouterr().err


def test_own_arguments_go_before_ours_where_they_may() -> None:
    flags = ["--max-num-seqs", "7"]
    line = server_arguments("model", "tokenizer", 8000, flags)
    assert line[line.index("--tokenizer") + 2 :][: len(flags)] == flags
    assert "--max-model-len" not in line
    seeds = []
    for own in ([], ["--seed", "5"]):
        client = own_client_arguments("model", "tokenizer", "http://there", 3, own)
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        seeds.append(parser.parse_args(client).seed)
    assert seeds == [3, 5]


def lose_response(client: Any, _: Any) -> None:
    client |= {"completed": 3, "total_output_tokens": 9}
    client["generated_texts"][1] = ""
    client["errors"][1] = "Traceback\n  ...\nConnectionError: gone\n"


def result(case: str, alter: Callable[[Any, Any], object] = lambda *_: None) -> CaseResult:
    written = answers(case)
    alter(written["client"], written["single"]["choices"][0])
    return read(written, case, LOAD, True)


@pytest.mark.parametrize(
    ("case", "alter", "problems"),
    [
        *((case, lambda *_: None, []) for case in CASES),
        (
            PENALTY,
            lambda client, _: client["generated_texts"].__setitem__(2, "t2 t1 t9"),
            ["texts of stock round 1 and overlaid round 1 differ: request 2, position 2: t2"],
        ),
        (
            PLAIN,
            lose_response,
            ["3 of 4 responses", "9 of 12 tokens", "request 1 failed: ConnectionError: gone"],
        ),
        (
            PLAIN,
            lambda client, _: client["generated_texts"].__setitem__(3, " t3 t1"),
            ["11 of 12 tokens in the texts", "request 3, position 2"],
        ),
        (
            PLAIN,
            lambda _, single: single["token_ids"].__setitem__(1, 9),
            ["token ids of one request alone of stock round 1 and overlaid round 1 differ"],
        ),
        (
            LOGPROBS,
            lambda _, single: single["logprobs"]["top_logprobs"].__setitem__(1, {"a": -0.5}),
            ["2 of 3 logprobs of one request"],
        ),
        (
            LOGPROBS,
            lambda _, single: single["logprobs"]["token_logprobs"].__setitem__(2, -0.6),
            ["logprobs of one request alone of stock round 1 and overlaid round 1 differ"],
        ),
        (PLAIN, lambda client, _: client.update(mean_itl_ms=10.0), ["tokens came in bursts"]),
    ],
)
def test_a_fault_is_named_and_refuses_the_ratios_of_its_case(
    case: str, alter: Callable[[Any, Any], object], problems: Sequence[str]
) -> None:
    children = [
        Child("stock", 1, {case: result(case)}),
        Child("overlaid", 1, {case: result(case, alter)}),
    ]
    summed = summary.summarise({case: {}}, SIDES, children)["cases"][case]
    listed = summed["problems"]["overlaid"]
    assert bool(listed) == bool(problems)
    for problem in problems:
        assert any(problem in text for text in listed)
    figures = summed["figures"].values()
    ratios = {ratio for values in figures for ratio in values["ratios"].values()}
    assert ratios == {None if problems else 1}
    texts = outputs.unpack(children[0].cases[case].outputs["texts"])
    assert texts == [[f"t{n}", "t1", "t2"] for n in range(4)]


class Server(Installations):
    """A stock side alone, whose interpreter is a shell script."""

    def __init__(self, folder: Path, script: str = "") -> None:
        self.paths, self.work = {"stock": [UPSTREAM], "overlaid": [UPSTREAM]}, folder
        self.python = str(folder / "python")
        Path(self.python).write_text(f"#!/bin/sh\n{script}")
        Path(self.python).chmod(0o755)


class Health(BaseHTTPRequestHandler):
    """A server that answers so many times that it is well."""

    left = 0

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200 if Health.left > 0 else 503)
        self.end_headers()
        Health.left -= 1


@pytest.mark.parametrize("well", [3, 2, 1])
def test_a_server_that_ends_within_a_case_fails_the_round(
    well: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that was cut is a whole one to vLLM's client, which is not run here."""
    monkeypatch.setattr("vllm.benchmarks.serve.main", lambda _: {})
    monkeypatch.setattr(Health, "left", well)
    sent = list[Any]()
    monkeypatch.setattr("bench.servers.child._send", lambda _url, body, _timeout: sent.append(body))
    cases: dict[str, Any] = {name: {"arguments": [], "single": name} for name in ("one", "two")}
    with HTTPServer(("127.0.0.1", 0), Health) as served:
        threading.Thread(target=served.serve_forever).start()
        url = f"http://127.0.0.1:{served.server_port}"
        try:
            if well > len(cases):
                assert list(drive(url, 10, os.getpid(), cases)) == list(cases)
            else:
                last = list(cases)[well - 1]
                with pytest.raises(OSError, match=f"has not outlived '{last}': .* 503"):
                    drive(url, 10, os.getpid(), cases)
        finally:
            served.shutdown()
    assert sent == list(cases)[: well - 1]


#: Starts another process, and ignores SIGTERM.
STUBBORN = """trap '' TERM
sleep 60 &
echo started
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; done
"""


def test_a_server_is_ended_with_all_that_it_started(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE", 0.5)
    log = tmp_path / "log"
    with (
        pytest.raises(KeyboardInterrupt),
        server.serving(Server(tmp_path, STUBBORN), "stock", log, [], {}) as (_, check),
    ):
        deadline = time.monotonic() + 5
        while log.read_text() != "started\n" and time.monotonic() < deadline:
            time.sleep(0.05)
        check()
        assert len(started_with(mark)) >= 2
        raise KeyboardInterrupt
    assert gone(mark)


#: A server that ends at once, and a client that waits for it.
ENDS = 'case "$2" in *api_server) echo no model; exit 3;; *) sleep 20;; esac\n'


def faked(folder: Path, script: str, keep: bool = False) -> serving.ServingRun:
    """A run of which the model is there."""
    run = serving.ServingRun.__new__(serving.ServingRun)
    out = folder / "out"
    out.mkdir()
    run.args = SimpleNamespace(  # type: ignore[assignment]
        out=out, cases=[*CASES], timeout=10.0, keep=keep
    )
    run.installations = Server(folder, script)
    run.load, run.generated, run.own = LOADS["tiny"], True, None
    run.model = run.tokenizer = "model"
    run._flags, run._kept, run._running = [], {}, contextlib.ExitStack()
    run._limit = Limit(None)
    return run


@pytest.mark.parametrize(
    ("script", "sentences"),
    [
        (ENDS, ["the server ended (exit code 3)", "no model", "server-stock-round-1.log"]),
        (
            ENDS.replace("echo no model; exit 3", "sleep 20").replace("*) sleep 20", "*) exit 4"),
            ["client-stock-round-1 failed (4; log: ", "server-stock-round-1.log"],
        ),
    ],
)
def test_a_server_or_client_that_fails_is_named_with_its_log(
    tmp_path: Path, mark: str, script: str, sentences: Sequence[str]
) -> None:
    run = faked(tmp_path, script)
    with pytest.raises(Failure) as failed:
        run.measure(Job("server", "stock", 1))
    for sentence in sentences:
        assert sentence in str(failed.value)
    assert (tmp_path / "out" / "server-stock-round-1.log").exists()
    assert gone(mark)


#: Keeps what servers and clients are started with, and answers as the client.
ANSWERS = """echo "$2 $VLLM_USE_V2_MODEL_RUNNER $@" >> {calls}
case "$2" in *api_server) sleep 20;; *) cp {answer} "$3";; esac
"""


def test_the_sides_and_cases_differ_in_what_they_should(tmp_path: Path, mark: str) -> None:
    calls, answer = tmp_path / "calls", tmp_path / "answer"
    written = {case: answers(case) for case in CASES}
    answer.write_text(json.dumps(written))
    run = faked(tmp_path, ANSWERS.format(calls=calls, answer=answer))
    results = [run.measure(Job("server", side, 1)) for side in ("overlaid", "mrv2")]
    assert list(results[0][serving.NAME]) == list(CASES)
    lines = calls.read_text().splitlines()
    servers = [line.split()[1] for line in lines if "api_server" in line.split()[0]]
    assert servers == ["0", "1"]
    client = next(line for line in lines if "drive" in line)
    cases = json.loads(client[client.index("{") :])
    assert [case["single"].get("presence_penalty") for case in cases.values()] == [None, 1.5, None]
    assert cases[PENALTY]["arguments"][-1] == '{"presence_penalty": 1.5}'
    assert cases[LOGPROBS]["arguments"][-2:] == ["--logprobs", "5"]
    assert gone(mark)


@pytest.mark.parametrize("keep", [False, True])
def test_the_log_of_a_server_that_failed_a_request_is_kept(
    keep: bool, tmp_path: Path, mark: str
) -> None:
    answer, died = tmp_path / "answer", tmp_path / "died"
    written = {case: answers(case) for case in CASES}
    lose_response(written[PENALTY]["client"], None)
    answer.write_text(json.dumps(written))
    script = f"""case "$2" in
    *api_server) echo engine died; touch {died}; sleep 20;;
    *) until [ -e {died} ]; do sleep 0.05; done; cp {answer} "$3";;
    esac
    """
    run = faked(tmp_path, script, keep=keep)
    with run._running:
        results = run.measure(Job("server", "overlaid", 2))[serving.NAME]
    log = "server-overlaid-round-2.log"
    named = [case for case in CASES if f"server's log: {log}" in results[case].problems]
    assert named == [PENALTY]
    assert (tmp_path / "out" / log).read_text() == "engine died\n"
    assert gone(mark)


def test_servers_that_are_kept_are_started_once_and_ended_with_the_run(
    tmp_path: Path, mark: str
) -> None:
    calls, answer = tmp_path / "calls", tmp_path / "answer"
    answer.write_text(json.dumps({case: answers(case) for case in CASES}))
    run = faked(tmp_path, ANSWERS.format(calls=calls, answer=answer), keep=True)
    with run._running:
        for number, side in ((1, "stock"), (1, "overlaid"), (2, "overlaid"), (2, "stock")):
            run.measure(Job("server", side, number))
        assert started_with(mark)
    lines = calls.read_text().splitlines()
    ports = [line.split()[-1] for line in lines if "api_server" in line.split()[0]]
    driven = [line.split("127.0.0.1:")[1].split()[0] for line in lines if "drive" in line]
    assert len(ports) == 2
    assert driven == [ports[0], ports[1], ports[1], ports[0]]
    assert gone(mark)


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
