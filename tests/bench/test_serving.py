"""The benchmark of serving: its model, results of vLLM's client, and its processes."""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
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
from bench.harness import manifest, outputs
from bench.harness.pairs import problems
from bench.results.run_file import load
from bench.servers import weights
from bench.servers.child import FIGURES, TEXTS, Spec, measure, read
from bench.servers.load import (
    CASES,
    Load,
    case_arguments,
    client_arguments,
    server_arguments,
    single_request,
)
from demo import model
from safetensors.torch import load_file
from support import forked, rust
from support.asynchronous import announce
from support.benches import bench
from support.processes import gone
from support.sites import REPO, UPSTREAM
from tokenizers import Tokenizer
from vllm.benchmarks.serve import add_cli_args

#: One round of the smallest size.
TINY = ("--size", "tiny", "--rounds", "1", "--pairs", "overlaid/stock")
LOAD = Load({}, requests=4, concurrency=2, prompt=8, output=3)
PLAIN, PENALTY, LOGPROBS = CASES
SPEC = Spec("tiny", "model", True, [], None, "", [], 0.4, True)
#: Figures of the times between tokens.
BETWEEN = {figure for figure in FIGURES if figure.startswith(("TPOT", "ITL"))}


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
        for side in one["sides"]:
            figures = {figure: one["figures"][side][figure] for figure in FIGURES}
            # A reply that comes in one piece has no time between its tokens.
            absent = [figure for figure, value in figures.items() if value <= 0]
            assert not absent or (bursts and {*absent} <= BETWEEN), (figures, one["problems"])
    return run


@pytest.mark.slow
def test_both_sides_serve_every_request_whole(tmp_path: Path, mark: str) -> None:
    run = measured(tmp_path / "out")
    cases = [(one["case"], one["order"]) for one in run["slices"]]
    assert cases == [(case, order) for case in CASES for order in (0, 1)]
    for one in run["slices"]:
        assert {TEXTS, "token ids of one request alone"} <= one["digests"]["stock"].keys()
        kept = "logprobs of one request alone" in one["digests"]["stock"]
        assert kept == (one["case"] == LOGPROBS)
    assert run["digests"]["stock"] != run["digests"]["overlaid"]
    assert gone(mark)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the binary is for x86-64")
def test_both_sides_serve_behind_the_rust_front_end(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    program = tmp_path / "vllm-rs"
    program.write_text(f'#!/bin/sh\necho >> "{started}"\nexec "{rust.binary()}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", str(program))
    run = measured(tmp_path / "out", "--front-end", "rust", "--cases", PLAIN, LOGPROBS)
    assert len(run["slices"]) == 4
    assert len(started.read_text()) >= 2
    assert gone(mark)


#: A user's own requests and server.
CLIENT = "--dataset-name random --random-input-len 8 --random-output-len 16 --num-prompts 4"
CLIENT += " --request-rate 20 --ignore-eos --temperature 0"
FLAGS = "--enforce-eager --max-model-len 128 --max-num-seqs 3"


@pytest.mark.slow
def test_own_traffic_is_driven_with_the_servers_own_flags(tmp_path: Path, mark: str) -> None:
    run = measured(tmp_path / "out", "--client", CLIENT, "--server", FLAGS)
    assert run["title"].startswith(f"`vllm bench serve {CLIENT}`, served with `{FLAGS}`. ")
    assert run["title"].endswith("Texts are not compared.")
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
    for own in ([], ["--seed", "5"]):
        client = client_arguments("model", "tokenizer", "http://there", 3, own)
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        seeds.append(parser.parse_args(client).seed)
    assert seeds == [3, 5]


def test_cases_differ_in_their_parameters_and_slices_in_their_prompts() -> None:
    requests = [single_request(case, LOAD, 1) for case in CASES]
    assert [one.get("presence_penalty") for one in requests] == [None, 1.5, None]
    assert [one.get("logprobs") for one in requests] == [None, None, 5]
    assert case_arguments(PENALTY, LOAD)[-1] == '{"presence_penalty": 1.5}'
    assert case_arguments(LOGPROBS, LOAD)[-2:] == ["--logprobs", "5"]
    prompts = [single_request(PLAIN, LOAD, seed)["prompt"] for seed in (1, 2)]
    assert prompts[0] != prompts[1]
    assert prompts[0] != requests[1]["prompt"]
    assert single_request(PLAIN, LOAD, 1) == requests[0]


def answers(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The client's result and the single reply of a case of 4 requests and 3 tokens."""
    logprobs = {"token_logprobs": [-0.5] * 3, "top_logprobs": [dict.fromkeys("abcde", -0.5)] * 3}
    client = {
        **dict.fromkeys(FIGURES.values(), 2.0),
        "mean_itl_ms": 2.0,
        "completed": 4,
        "total_output_tokens": 12,
        "input_lens": [8] * 4,
        "generated_texts": [f" t{n} t1 t2" for n in range(4)],
        "errors": [""] * 4,
    }
    return client, {"token_ids": [3, 4, 5], "logprobs": logprobs if case == LOGPROBS else None}


def lose_response(client: Any, _: Any) -> None:
    client |= {"completed": 3, "total_output_tokens": 9}
    client["generated_texts"][1] = ""
    client["errors"][1] = "Traceback\n  ...\nConnectionError: gone\n"


def send_whole(client: Any, _: Any) -> None:
    client |= {"median_itl_ms": 0.0, "mean_itl_ms": 0.0, "median_tpot_ms": -0.001}


def result(case: str, alter: Callable[[Any, Any], object] = lambda *_: None) -> dict[str, Any]:
    client, single = answers(case)
    alter(client, single)
    return read(client, single, case, LOAD, SPEC, {})


@pytest.mark.parametrize(
    ("case", "alter", "wanted"),
    [
        *((case, lambda *_: None, []) for case in CASES),
        (
            PENALTY,
            lambda client, _: client["generated_texts"].__setitem__(2, "t2 t1 t9"),
            ["texts of stock and overlaid differ: request 2, position 2: t2"],
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
            ["token ids of one request alone of stock and overlaid differ"],
        ),
        (
            LOGPROBS,
            lambda _, single: single["logprobs"]["top_logprobs"].__setitem__(1, {"a": -0.5}),
            ["2 of 3 logprobs of one request"],
        ),
        (
            LOGPROBS,
            lambda _, single: single["logprobs"]["token_logprobs"].__setitem__(2, -0.6),
            ["logprobs of one request alone of stock and overlaid differ"],
        ),
        (PLAIN, lambda client, _: client.update(mean_itl_ms=10.0), ["tokens came in bursts"]),
        (PLAIN, send_whole, ["overlaid: most tokens came in bursts"]),
        (
            PLAIN,
            lambda client, _: client["input_lens"].__setitem__(0, 9),
            ["lengths of the prompts of stock and overlaid differ"],
        ),
    ],
)
def test_a_fault_is_a_problem(
    case: str, alter: Callable[[Any, Any], object], wanted: Sequence[str]
) -> None:
    sides = {"stock": result(case), "overlaid": result(case, alter)}
    found = problems(tuple(sides), sides)
    assert bool(found) == bool(wanted)
    for text in wanted:
        assert any(text in one for one in found), found
    texts = outputs.unpack(sides["stock"]["outputs"][TEXTS])
    assert texts == [[f"t{n}", "t1", "t2"] for n in range(4)]


@pytest.mark.parametrize(("compared", "kinds"), [(True, 2), (False, 1)])
def test_texts_of_own_traffic_are_compared_only_if_batches_do_not_matter(
    compared: bool, kinds: int
) -> None:
    client, _ = answers(PLAIN)
    lose_response(client, None)
    found = read(client, None, "own traffic", LOAD, SPEC._replace(compared=compared), {})
    assert len(found["outputs"]) == kinds
    assert found["counts"] == {"responses": (3, 4)}
    assert found["problems"] == ["request 1 failed: ConnectionError: gone"]


class Health(BaseHTTPRequestHandler):
    """A server that answers a number of times that it is well."""

    left = 0

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200 if Health.left > 0 else 503)
        self.end_headers()
        Health.left -= 1


@pytest.mark.parametrize("well", [0, 1])
def test_a_server_that_ends_within_a_case_fails_it(
    well: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that was cut is a whole one to vLLM's client, which is not run here."""
    client, _ = answers(PLAIN)
    monkeypatch.setattr("vllm.benchmarks.serve.main", lambda _: client)
    monkeypatch.setattr(Health, "left", well)
    spec = SPEC._replace(own=[])
    with HTTPServer(("127.0.0.1", 0), Health) as served:
        threading.Thread(target=served.serve_forever).start()
        url = f"http://127.0.0.1:{served.server_port}"
        try:
            if well:
                assert measure(url, os.getpid(), spec, PLAIN, 1)["problems"] == []
            else:
                with pytest.raises(OSError, match=f"has not outlived '{PLAIN}': .* 503"):
                    measure(url, os.getpid(), spec, PLAIN, 1)
        finally:
            served.shutdown()


#: Starts a server that is a shell script, which starts another process.
PARENT = """
import sys
from pathlib import Path
from bench.servers import child
sys.executable = sys.argv[1]
child._GRACE = 0.5
with child.serving(child.Spec("tiny", "model", True, [], None, "", [], 0.4, True)):
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
        **{"pairs": ["overlaid/stock", "again/stock"], "cases": [*CASES], "size": "tiny"},
        **{"model": UPSTREAM, "client": None, "server": ["--max-num-seqs", "7"], "places": 1},
        front_end="rust",
    )
    paths = {"stock": [tmp_path / "pristine"], "overlaid": [tmp_path / "overlaid"]}
    views: Any = SimpleNamespace(work=tmp_path, digests={}, paths=paths)
    run = serving.ServingRun(args, views)
    assert {run.origin(side) for side in ("stock", "overlaid", "mrv2")} == {"stock"}
    first = {side: run.spec(side)["path"].split(":")[0] for side in ("overlaid", "mrv2", "again")}
    pristine = str(tmp_path / "pristine")
    assert first == {"overlaid": str(tmp_path / "overlaid"), "mrv2": pristine, "again": pristine}
    assert [start.name for start in run.starts()] == [
        *("vllm serve, overlaid/stock", "vllm serve, again/stock"),
    ]
    settings = run.starts()[0].settings
    assert settings["flags"][-3:] == ["--enforce-eager", "--max-num-seqs", "7"]
    assert json.loads(json.dumps(settings)) == {**settings, "flags": settings["flags"]}
    assert Spec(**settings, cores=[], memory=0.4, **run.spec("stock")).front_end == "rust"
    assert "Both sides have the Rust front end." in run.title


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
