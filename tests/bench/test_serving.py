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
from concurrent.futures.process import BrokenProcessPool
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import serving
from bench.errors import Failure
from bench.run import Run
from bench.servers import server
from bench.servers.client import Clients, Reply, Window, request
from demo import model
from support import rust, sites
from support.benches import measured
from support.processes import gone
from support.sites import REPO, UPSTREAM
from tokenizers import Tokenizer
from vllm.benchmarks.serve import add_cli_args

#: One round of the smallest size, in windows longer than a machine stalls.
TINY = ("--engine", "tiny", "--rounds", "1", "--pairs", "overlaid/stock", "--seconds", "4")
#: Figures of a window that are above 0, whatever the machine.
FIGURES = ("tokens/s", "chunks/s", "TTFT p50", "TTFT p99", "API server us/chunk")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable that marks the processes of a test."""
    value = f"{uuid.uuid4()}"
    monkeypatch.setenv("MARK", value)
    return f"MARK={value}"


def measure(out: Path, *arguments: str) -> Run:
    """A run of the smallest engine."""
    return measured("serving", out, *TINY, *arguments)


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
    run = measure(tmp_path / "out", "--api-servers", str(servers), "--cases", *cases)
    assert [(one.case, one.order) for one in run.slices] == [
        (f"{case}, 4", order) for case in cases for order in (0, 1)
    ]
    for one in run.slices:
        for figures in one.figures:
            assert all(figures[name] > 0 for name in FIGURES), figures
            used = {name.partition(",")[0] for name in figures if name.endswith(", cores")}
            assert used - {"others"} == kinds | {"engine core", "workers", "clients"}
    assert run.digests["stock"] != run.digests["overlaid"]
    assert "by 4 client processes" in run.title
    assert gone(mark)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the binary is for x86-64")
def test_streams_are_measured_behind_the_rust_front_end(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", str(rust.binary()))
    run = measure(tmp_path / "out", "--front-end", "rust", "--cases", "mixed")
    assert run.title.endswith("served with the Rust front end.")
    for one in run.slices:
        for figures in one.figures:
            assert all(figures[name] > 0 for name in (*FIGURES, "API server, cores")), figures
            assert "launcher, cores" in figures
    assert gone(mark)


#: A user's own requests and server.
CLIENT = "--dataset-name random --random-input-len 8 --random-output-len 16 --num-prompts 4"
CLIENT += " --request-rate 20 --ignore-eos --temperature 0"
FLAGS = "--enforce-eager --max-model-len 128 --max-num-seqs 3"


@pytest.mark.slow
def test_own_traffic_is_driven_with_the_servers_own_flags(tmp_path: Path, mark: str) -> None:
    run = measure(tmp_path / "out", "--client", CLIENT, "--server", FLAGS)
    assert run.title == f"`vllm bench serve {CLIENT}`, served with 1 API server {FLAGS}."
    assert len(run.slices) == 2
    assert all(figures["tokens/s"] > 0 for one in run.slices for figures in one.figures)
    assert gone(mark)


def test_a_seed_of_the_user_s_own_is_taken() -> None:
    seeds = []
    for words in ([], ["--seed", "5"]):
        spec = {"model": "model", "tokenizer": "tokenizer", "own": words}
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        seeds.append(parser.parse_args(server.client_arguments(spec, "http://there", 3)).seed)
    assert seeds == [3, 5]


def test_requests_are_drawn_by_seed_and_differ_by_stream_number_and_case() -> None:
    drawn = [request("tiny", "plain", 1, stream, n) for stream in range(4) for n in range(3)]
    assert len({one["messages"][0]["content"] for one in drawn}) == len(drawn)
    assert request("tiny", "plain", 1, 0, 0) == drawn[0] != request("tiny", "plain", 2, 0, 0)
    mixed = [request("tiny", "mixed", 1, stream, 1) for stream in range(4)]
    assert [one.get("top_logprobs") for one in mixed] == [5] * 4
    assert [one.get("presence_penalty") for one in mixed] == [0.5, None, None, None]
    words = mixed[0]["messages"][0]["content"].split()
    assert all(word[0] == "t" and 9 <= int(word[1:]) < 1024 for word in words)


def event(text: str, **more: Any) -> bytes:
    """A chunk of a stream."""
    chunk = {"choices": [{"delta": {"content": text}}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


def reply(*lines: bytes, window: Window, at: float = 0.0) -> None:
    """Read a reply of 3 tokens whose lines arrive a second after one another."""
    read = Reply(3, window)
    read._last = at
    for second, line in enumerate(lines, 1):
        read.take(line, at + second)
    read.end(at + len(lines))


def test_chunks_and_tokens_count_in_the_window_in_which_they_arrive() -> None:
    window = Window(1.5, 9.5)
    lines = (event(""), event("t1 t2"), b": alive\n", event(" t3"), USAGE, DONE)
    reply(*lines, window=window)  # the first token after 2 s, the last one 2 s later
    reply(*lines, window=window, at=6.0)  # ends after the window
    reply(*lines, window=window, at=-1.0)  # begins before it
    reply(*lines, window=window, at=-5.0)  # ends before it
    assert window.firsts == [2.0, 2.0]
    assert window.gaps == [2.0, 2.0]
    assert (window.tokens, window.requests) == (2 + 1 + 2 + 1, 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((event("t1 t2"), event(" t3"), USAGE), r"3 expected, without \[DONE\]"),
        ((event("t1 t2"), USAGE, DONE), "2 tokens in its chunks, 3 by its usage and 3 expected"),
        ((event("t1 t2 t3"), DONE), "3 tokens in its chunks, 0 by its usage"),
        ((event("t1"), b'data: {"error": {"message": "no"}}\n\n'), 'has an error: .*"no"'),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(lines: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(Failure, match=message):
        reply(*lines, window=Window(0.0, 9.0))


def test_figures_are_those_of_the_whole_window() -> None:
    window = Window(10.0, 14.0, tokens=1600, requests=8, cpu=[1.0, 2.0])
    window.add(Window(10.0, 14.0, [0.5] * 4, [n / 1000 for n in range(396)], cpu=[1.0]))
    found = server.figures(window, {"API server 0": 0.5, "API server 1": 0.25, "workers": 1.0})
    assert found == {
        "tokens/s": 400.0,
        "requests/s": 2.0,
        "chunks/s": 100.0,
        **{"TTFT p50": 500.0, "TTFT p99": 500.0, "gap p50": 198.0, "gap p99": 392.0},
        **{"API server 0, cores": 0.5, "API server 1, cores": 0.25, "workers, cores": 1.0},
        "clients, cores": 1.0,
        "API server us/chunk": 7500.0,
        "client us/chunk": 10000.0,
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


def test_a_client_process_that_ends_and_a_refused_request_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(Endless) as url:
        clients = Clients(url, "tiny", 4, 2)
        now = time.monotonic()
        running = clients.begin("plain", 1, Window(now + 60, now + 120))
        os.kill(next(iter(clients._pool._processes)), signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            clients.wait(running, 60)
        monkeypatch.setattr(Endless, "refuses", True)
        with pytest.raises(Failure, match="refused with HTTP status 400"):
            Clients(url, "tiny", 4, 2).warm_up("plain", 1)


#: A result of `vllm bench serve` for 4 requests of 3 tokens.
RESULT: dict[str, Any] = {
    **dict.fromkeys(server.OWN_FIGURES.values(), 2.0),
    **{"mean_itl_ms": 2.0, "completed": 4, "total_output_tokens": 12, "errors": [""] * 4},
}


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, []),
        ({"mean_itl_ms": 10.0}, ["most tokens came in bursts"]),
        (
            {"median_itl_ms": 0.0, "mean_itl_ms": 0.0, "median_tpot_ms": -0.001},
            ["most tokens came in bursts"],
        ),
    ],
)
def test_bursts_limit_own_traffic(changes: dict[str, Any], limits: list[str]) -> None:
    assert server.read_own(RESULT | changes)["limits"] == limits


def test_a_request_of_own_traffic_that_fails_is_an_error() -> None:
    errors = ["", "Traceback\n  ...\nConnectionError: gone\n", "", ""]
    with pytest.raises(Failure, match="request 1 failed: ConnectionError: gone"):
        server.read_own(RESULT | {"errors": errors})


class Health(BaseHTTPRequestHandler):
    """A server that is well, or not."""

    well = True

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200 if self.well else 503)
        self.end_headers()


@pytest.mark.parametrize("well", [True, False])
def test_a_server_that_ends_within_its_traffic_is_an_error(
    well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that was cut is a whole one to vLLM's client, which is not run here."""
    monkeypatch.setattr("vllm.benchmarks.serve.main", lambda _: RESULT)
    monkeypatch.setattr(Health, "well", well)
    made: Any = server.Server.__new__(server.Server)
    made._spec = {"own": [], "model": "m", "tokenizer": "t"}
    made._process = SimpleNamespace(pid=os.getpid())
    expected: Any = contextlib.nullcontext()
    if not well:
        expected = pytest.raises(Failure, match="the server has not outlived 'own traffic'")
    with served(Health) as made._url, expected:
        assert made.measure("own traffic", 1)["figures"]["tokens/s"] == 2.0


#: Starts a server that is a shell script, which starts another process.
PARENT = """
import sys
from pathlib import Path
from bench.servers import server
sys.executable = sys.argv[1]
server._GRACE = 0.5
spec = {"model": "model", "tokenizer": "model", "flags": [], "front_end": "python"}
server.Server({**spec, "path": "", "memory": 0.4})
"""
STUBBORN = """
trap '' TERM
sleep 60 &
touch "$0.started"
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; done
"""


@pytest.mark.parametrize(("script", "killed"), [("exit 3", False), (STUBBORN, True)])
def test_a_server_ends_with_the_process_that_drives_it(
    tmp_path: Path, mark: str, script: str, killed: bool
) -> None:
    server = sites.script(tmp_path / "python", script)
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


def test_servers_are_started_as_the_options_say(tmp_path: Path) -> None:
    args = argparse.Namespace(
        **{"pairs": [("overlaid", "stock"), ("again", "stock")], "cases": ["plain", "mixed"]},
        **{"model": UPSTREAM, "client": ["--num-prompts", "4"], "places": 1, "engine": "tiny"},
        **{"server": ["--max-num-seqs", "7"], "front_end": "python", "api_servers": 3},
        **{"streams": 4, "clients": 2, "seconds": 2.0, "gpus": []},
    )
    views: Any = SimpleNamespace(work=tmp_path)
    plan = serving.plan(args, views)
    assert (plan.client, plan.load) == ("stock", "own")
    assert [start.sides for start in plan.starts] == args.pairs
    start = plan.starts[0]
    assert start.engine == f"{UPSTREAM.resolve().name}, 3 API servers"
    assert start.cases == {"own traffic": "own traffic"}
    flags = ["--api-server-count=3", "--enforce-eager", "--max-num-seqs", "7"]
    assert start.spec["flags"] == flags
    args.model, args.client, args.front_end = None, None, "rust"
    plan = serving.plan(args, views)
    assert (plan.load, plan.starts[0].engine) == ("streams", "tiny, the Rust front end")
    assert plan.starts[0].cases == {"plain, 4": "plain", "mixed, 4": "mixed"}
    flags = plan.starts[0].spec["flags"]
    assert flags[-3:] == ["--enforce-eager", "--max-num-seqs", "7"]
    assert {"--load-format=dummy", "--max-num-seqs=256"} <= {*flags}
    assert (tmp_path / "model" / "tokenizer" / "tokenizer.json").exists()


def test_each_token_is_a_word_of_its_own(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model.write_tokenizer(tmp_path, 50) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 50
    assert tokenizer.decode([3, 1, 2, 49], skip_special_tokens=True) == "t3 t1 t2 t49"
    assert tokenizer.encode("t3 t1 t2 t49").ids == [3, 1, 2, 49]
