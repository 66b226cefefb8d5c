"""The benchmark of serving: closed-loop streams, results of vLLM's client, and its processes."""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import serving
from bench.errors import Fatal
from bench.harness import manifest
from bench.harness.pairs import problems
from bench.results.run_file import load
from bench.servers import own, streams
from bench.servers.child import Spec
from bench.servers.client import Clients, Reply, Window
from bench.servers.load import (
    CASES,
    Load,
    client_arguments,
    request,
    server_arguments,
)
from bench.servers.processes import Process, cores
from demo import model
from support import forked, rust
from support.asynchronous import announce
from support.benches import bench
from support.processes import gone
from support.sites import REPO, UPSTREAM
from tokenizers import Tokenizer
from vllm.benchmarks.serve import add_cli_args

#: One round of the smallest size.
TINY = ("--engine", "tiny", "--rounds", "1", "--pairs", "overlaid/stock", "--seconds", "2")
LOAD = Load("tiny", 4, generated=True)
#: Figures of a window that are above 0, whatever the machine.
FIGURES = ("tokens/s", "chunks/s", "TTFT p50", "TTFT p99", "API server us/chunk")


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


def measured(out: Path, *arguments: str) -> dict[str, Any]:
    """A whole run, whose only problems are those of a busy machine."""
    paths = [announce(out.parent / "plugins", forked.fork), REPO / "tests"]
    words = (*TINY, *arguments)
    done = bench("serving", out, *words, paths=paths, environment=forked.ENVIRONMENT)
    assert done.returncode in (0, 1), done.stderr
    run = load(out / "run.json")
    assert run["complete"]
    assert run["problems"] == list(manifest.differences(run)) == [], logs(out)
    for one in run["slices"]:
        bursts = [text for text in one["problems"] if "bursts" in text]
        assert one["problems"] == bursts, logs(out)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "cases", "kinds"),
    [
        (1, ["plain", "mixed", "logprobs"], {"API server"}),
        (2, ["plain"], {"API server 0", "API server 1", "launcher"}),
    ],
)
def test_streams_are_measured_on_both_sides_with_the_cores_of_each_process(
    servers: int, cases: list[str], kinds: set[str], tmp_path: Path, mark: str
) -> None:
    run = measured(tmp_path / "out", "--api-servers", str(servers), "--cases", *cases)
    assert [(one["case"], one["order"]) for one in run["slices"]] == [
        (f"{case}, 4", order) for case in cases for order in (0, 1)
    ]
    for one in run["slices"]:
        for figures in one["figures"].values():
            assert all(figures[name] > 0 for name in FIGURES), figures
            used = {name.partition(",")[0] for name in figures if name.endswith(", cores")}
            assert used - {"others"} == kinds | {"engine core", "workers", "clients"}
    assert run["digests"]["stock"] != run["digests"]["overlaid"]
    assert "by 4 client processes (aiohttp 3." in run["title"]
    assert gone(mark)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the binary is for x86-64")
def test_streams_are_measured_behind_the_rust_front_end(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", str(rust.binary()))
    run = measured(tmp_path / "out", "--front-end", "rust", "--cases", "mixed")
    assert run["title"].endswith("served with the Rust front end.")
    for one in run["slices"]:
        for figures in one["figures"].values():
            assert all(figures[name] > 0 for name in (*FIGURES, "API server, cores")), figures
            assert "launcher, cores" in figures
    assert gone(mark)


#: A user's own requests and server.
CLIENT = "--dataset-name random --random-input-len 8 --random-output-len 16 --num-prompts 4"
CLIENT += " --request-rate 20 --ignore-eos --temperature 0"
FLAGS = "--enforce-eager --max-model-len 128 --max-num-seqs 3"


@pytest.mark.slow
def test_own_traffic_is_driven_with_the_servers_own_flags(tmp_path: Path, mark: str) -> None:
    run = measured(tmp_path / "out", "--client", CLIENT, "--server", FLAGS)
    served = f"served with 1 API server {FLAGS}. Texts are not compared."
    assert run["title"] == f"`vllm bench serve {CLIENT}`, {served}"
    assert len(run["slices"]) == 2
    for one in run["slices"]:
        assert list(one["digests"]["stock"]) == ["lengths of the prompts"]
    assert gone(mark)


def test_own_arguments_go_before_ours_where_they_may() -> None:
    flags = ["--max-num-seqs", "7"]
    line = server_arguments("model", "tokenizer", 8000, flags)
    assert line[line.index("--tokenizer") + 2 :][: len(flags)] == flags
    assert "--max-model-len" not in line
    seeds = []
    for words in ([], ["--seed", "5"]):
        client = client_arguments("model", "tokenizer", "http://there", 3, words)
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        seeds.append(parser.parse_args(client).seed)
    assert seeds == [3, 5]


def test_requests_are_drawn_by_seed_and_differ_by_stream_number_and_case() -> None:
    drawn = [request(LOAD, "plain", 1, stream, n) for stream in range(4) for n in range(3)]
    assert len({one["messages"][0]["content"] for one in drawn}) == len(drawn)
    assert request(LOAD, "plain", 1, 0, 0) == drawn[0] != request(LOAD, "plain", 2, 0, 0)
    mixed = [request(LOAD, "mixed", 1, stream, 1) for stream in range(4)]
    assert [one.get("top_logprobs") for one in mixed] == [5] * 4
    assert [one.get("presence_penalty") for one in mixed] == [0.5, None, None, None]
    words = mixed[0]["messages"][0]["content"].split()
    assert all(word[0] == "t" and 9 <= int(word[1:]) < 1024 for word in words)
    long = [request(Load("half-b", 128, True), "plain", 1, 0, n) for n in range(1, 400)]
    lengths = [len(one["messages"][0]["content"].split()) for one in long]
    assert 90 < sum(lengths) / len(lengths) < 110
    assert 180 < sum(one["max_tokens"] for one in long) / len(long) < 220


def event(text: str, **more: Any) -> bytes:
    """A chunk of a stream."""
    chunk = {"choices": [{"delta": {"content": text}}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


def reply(*pieces: bytes, window: Window, at: float = 0.0) -> None:
    """Read a reply of 3 tokens whose pieces arrive a second after one another."""
    read = Reply({"max_tokens": 3}, window, generated=True)
    read._last = at
    for second, piece in enumerate(pieces, 1):
        read.feed(piece, at + second)
    read.end(at + len(pieces))


def test_chunks_and_tokens_count_in_the_window_in_which_they_arrive() -> None:
    window = Window(1.5, 9.5)
    pieces = (event(""), event("t1 t2"), b"", event(" t3") + USAGE + DONE)
    reply(*pieces, window=window)  # the first token after 2 s, the last one 2 s later
    reply(*pieces, window=window, at=6.0)  # ends after the window
    reply(*pieces, window=window, at=-1.0)  # begins before it
    reply(*pieces, window=window, at=-4.0)  # ends before it
    assert window.firsts == [2.0, 2.0]
    assert window.gaps == [2.0, 2.0]
    assert (window.tokens, window.requests) == (2 + 1 + 2 + 1, 2)
    whole = pieces[1]
    split = Window(0.0, 9.0)
    reply(event(""), whole[:20], whole[20:] + event(" t3") + USAGE + DONE, window=split)
    assert (split.firsts, split.gaps, split.tokens) == ([3.0], [0.0], 3)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((event("t1 t2"), event(" t3"), USAGE), r"3 expected, without \[DONE\]"),
        ((event("t1 t2"), USAGE, DONE), "2 tokens in its chunks, 3 by its usage and 3 expected"),
        ((event("t1 t2 t3"), DONE), "3 tokens in its chunks, 0 by its usage"),
        ((event("t1"), b'data: {"error": {"message": "no"}}\n\n'), 'has an error: .*"no"'),
    ],
)
def test_a_stream_that_is_not_whole_is_fatal(pieces: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(Fatal, match=message):
        reply(*pieces, window=Window(0.0, 9.0))


def test_figures_are_those_of_the_whole_window() -> None:
    window = Window(10.0, 14.0, tokens=800, requests=8, used=200, counted=100, cpu=[1.0, 2.0])
    window.add(Window(10.0, 14.0, [0.5] * 4, [n / 1000 for n in range(396)], cpu=[1.0]))
    found = streams.figures(window, {"API server 0": 0.5, "API server 1": 0.25, "workers": 1.0})
    assert found == {
        "tokens/s": 400.0,  # each chunk had two tokens
        "requests/s": 2.0,
        "chunks/s": 100.0,
        **{"TTFT p50": 500.0, "TTFT p99": 500.0, "gap p50": 198.0, "gap p99": 392.0},
        **{"API server 0, cores": 0.5, "API server 1, cores": 0.25, "workers, cores": 1.0},
        "clients, cores": 1.0,
        "API server us/chunk": 7500.0,
        "client us/chunk": 10000.0,
    }


def test_cores_are_those_of_each_process_between_two_samples() -> None:
    titles = {1: "python -m bench.servers.command", 2: "VLLM::EngineCore", 3: "VLLM::Worker_TP0"}
    titles |= {4: "VLLM::Worker_TP1", 5: "python -c resource_tracker"}
    before = {number: Process(title, 10.0) for number, title in titles.items()}
    after = {number: Process(title, 10.0 + number) for number, title in titles.items()}
    alone = {"API server": 0.5, "engine core": 1.0, "others": 2.5, "workers": 3.5}
    assert cores(before, after, 1, 2.0) == alone
    more = {10 - n: Process(f"VLLM::APIServer_{n}", 2.0 + n) for n in range(3)}
    several = {f"API server {n}": (2.0 + n) / 2 for n in range(3)}
    rest = {"engine core": 1.0, "launcher": 0.5, "others": 2.5, "workers": 3.5}
    assert cores(before, after | more, 1, 2.0) == several | rest
    binary = {7: Process("/opt/vllm-rs serve", 4.0)}
    assert cores({}, binary | {1: Process("python", 0.0)}, 1, 2.0) == {
        **{"API server": 2.0, "launcher": 0.0},
    }


class Endless(BaseHTTPRequestHandler):
    """A server whose replies never end, or that refuses each request."""

    refuses = False

    def do_POST(self) -> None:
        """Answer."""
        self.send_response(400 if self.refuses else 200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.refuses:
                self.wfile.write(event("t9"))
                time.sleep(0.02)


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server in this process; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_client_process_that_ends_and_a_refused_request_are_fatal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(Endless) as url:
        clients = Clients(url, LOAD, 2)
        running = clients.begin("plain", 1, time.monotonic() + 60, time.monotonic() + 120)
        os.kill(next(iter(clients._pool._processes)), signal.SIGKILL)
        with pytest.raises(Fatal, match="a client process has ended"):
            clients.wait(running, 60)
        monkeypatch.setattr(Endless, "refuses", True)
        with pytest.raises(Fatal, match="refused with HTTP status 400"):
            Clients(url, LOAD, 2).warm_up("plain", 1)


#: A result of `vllm bench serve` for 4 requests of 3 tokens.
RESULT: dict[str, Any] = {
    **dict.fromkeys(own.FIGURES.values(), 2.0),
    "mean_itl_ms": 2.0,
    "completed": 4,
    "total_output_tokens": 12,
    "input_lens": [8] * 4,
    "generated_texts": [f" t{n} t1 t2" for n in range(4)],
    "errors": [""] * 4,
}
LOST = {
    **{"completed": 3, "total_output_tokens": 9},
    "generated_texts": [" t0 t1 t2", "", " t2 t1 t2", " t3 t1 t2"],
    "errors": ["", "Traceback\n  ...\nConnectionError: gone\n", "", ""],
}
WHOLE = {"median_itl_ms": 0.0, "mean_itl_ms": 0.0, "median_tpot_ms": -0.001}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        (LOST, ["overlaid: request 1 failed: ConnectionError: gone", "3 of 4 responses", "texts"]),
        ({"mean_itl_ms": 10.0}, ["overlaid: most tokens came in bursts"]),
        (WHOLE, ["overlaid: most tokens came in bursts"]),
        ({"input_lens": [9, 8, 8, 8]}, ["lengths of the prompts of stock and overlaid differ"]),
    ],
)
def test_a_fault_of_own_traffic_is_a_problem(changes: dict[str, Any], wanted: list[str]) -> None:
    results = {"stock": RESULT, "overlaid": RESULT | changes}
    sides = {side: own.read(result, True, {}) for side, result in results.items()}
    found = problems(tuple(sides), sides)
    assert len(found) == len(wanted)
    for one, text in zip(found, wanted, strict=True):
        assert text in one
    assert own.TEXTS not in own.read(RESULT, False, {})["outputs"]


class Health(BaseHTTPRequestHandler):
    """A server that is well, or not."""

    well = True

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200 if self.well else 503)
        self.end_headers()


@pytest.mark.parametrize("well", [True, False])
def test_a_server_that_ends_within_own_traffic_fails_it(
    well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that was cut is a whole one to vLLM's client, which is not run here."""
    monkeypatch.setattr("vllm.benchmarks.serve.main", lambda _: RESULT)
    monkeypatch.setattr(Health, "well", well)
    expected: Any = contextlib.nullcontext()
    if not well:
        expected = pytest.raises(OSError, match=r"has not outlived its traffic: .* 503")
    with served(Health) as url, expected:
        assert own.measure(url, os.getpid(), "m", "t", [], 1, False)["problems"] == []


#: Starts a server that is a shell script, which starts another process.
PARENT = """
import sys
from pathlib import Path
from bench.servers import child
sys.executable = sys.argv[1]
child._GRACE = 0.5
spec = (["tiny", 4, True], 1, 0.0, 1.0, "model", [], None, False, "python", "", [], 0.4)
with child.serving(child.Spec(*spec)):
    pass
"""
STUBBORN = """#!/bin/sh
trap '' TERM
sleep 60 &
touch "$0.started"
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; done
"""


@pytest.mark.parametrize(("script", "killed"), [("#!/bin/sh\nexit 3\n", False), (STUBBORN, True)])
def test_a_server_ends_with_the_process_that_drives_it(
    tmp_path: Path, mark: str, script: str, killed: bool
) -> None:
    server = tmp_path / "python"
    server.write_text(script)
    server.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(server)],
        env={**os.environ, "PYTHONPATH": str(REPO / "scripts")},
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        if killed:
            deadline = time.monotonic() + 30
            while not Path(f"{server}.started").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)  # as the harness ends it
        _, stderr = process.communicate(timeout=60)
    assert killed or "the server ended (exit code 3)" in stderr
    assert gone(mark)


def test_each_side_s_server_has_its_own_path(tmp_path: Path) -> None:
    args = argparse.Namespace(
        **{"pairs": ["overlaid/stock", "again/stock"], "cases": [*CASES], "engine": "tiny"},
        **{"model": UPSTREAM, "client": None, "server": ["--max-num-seqs", "7"], "places": 1},
        **{"streams": 4, "clients": 2, "seconds": 2.0, "api_servers": 3, "gpus": []},
        front_end="python",
    )
    paths = {"stock": [tmp_path / "pristine"], "overlaid": [tmp_path / "overlaid"]}
    views: Any = SimpleNamespace(work=tmp_path, digests={}, paths=paths, site=UPSTREAM)
    run = serving.ServingRun(args, views)
    assert {run.origin(side) for side in ("stock", "overlaid", "mrv2")} == {"stock"}
    first = {side: run.spec(side)["path"].split(":")[0] for side in ("overlaid", "mrv2", "again")}
    pristine = str(tmp_path / "pristine")
    assert first == {"overlaid": str(tmp_path / "overlaid"), "mrv2": pristine, "again": pristine}
    assert [start.name for start in run.starts()] == [
        *("tiny, 3 API servers, overlaid/stock", "tiny, 3 API servers, again/stock"),
    ]
    assert run.starts()[0].cases["mixed, 4"] == "mixed"
    settings = json.loads(json.dumps(run.starts()[0].settings))
    flags = ["--api-server-count", "3", "--enforce-eager", "--max-num-seqs", "7"]
    assert settings["flags"][-5:] == flags
    spec = Spec(**settings, cores=[], memory=0.4, **run.spec("stock"))
    assert Load(*spec.load) == LOAD._replace(generated=False)
    assert spec.tokenizer == str(UPSTREAM)


def test_each_token_is_a_word_of_its_own(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model.write_tokenizer(tmp_path, 50) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 50
    assert tokenizer.decode([3, 1, 2, 49], skip_special_tokens=True) == "t3 t1 t2 t49"
    assert tokenizer.encode("t3 t1 t2 t49").ids == [3, 1, 2, 49]
