"""vLLM's server and client as child processes: what fails is named, and nothing is left."""

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from bench.compare import installations
from bench.compare.installations import Installations
from bench.errors import Failure
from bench.servers import processes
from bench.servers.load import CASES
from bench.servers.processes import MRV2, Client, Server, Setting
from support.processes import gone, started_with
from support.sites import UPSTREAM

PLAIN, PENALTY, LOGPROBS = CASES


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable that marks the processes of a test."""
    value = f"{uuid.uuid4()}"
    monkeypatch.setenv("MARK", value)
    return f"MARK={value}"


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Of a stock side alone, whose model is missing."""
    stock = Installations.__new__(Installations)
    stock.paths = {"stock": [UPSTREAM]}
    monkeypatch.setattr(stock, "check_import", lambda *_: None)
    (tmp_path / "out").mkdir()
    return Setting(stock, sys.executable, tmp_path, tmp_path / "out", tmp_path / "no-model")


def program(setting: Setting, name: str, text: str) -> None:
    """Put a shell script in the place of Python."""
    file = setting.work / name
    file.write_text(f"#!/bin/sh\n{text}")
    file.chmod(0o755)
    setting.python = str(file)


@pytest.mark.slow
def test_a_server_that_ends_is_named_with_its_log(setting: Setting, mark: str) -> None:
    server = Server(setting, "stock", 1)
    with pytest.raises(Failure) as failed, server:
        server.wait()
    first = str(failed.value).partition("\n")[0]
    log = setting.out / "stock-round-1-server.log"
    assert first == f"the server of stock round 1 did not start (exit code 1); log: {log}"
    assert "no-model" in log.read_text()
    assert gone(mark)


#: A server that does not serve, ignores SIGTERM, and has started another.
STUBBORN = """trap '' TERM
sleep 60 &
echo started
for second in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 1; done
"""


def test_a_server_that_does_not_serve_is_ended_with_all_that_it_started(
    setting: Setting, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(setting, "stubborn", STUBBORN)
    setting.timeout = 1.0
    monkeypatch.setattr(processes, "GRACE", 0.5)
    server = Server(setting, "stock", 1)
    with pytest.raises(Failure, match="did not serve within 1 s"), server:
        server.wait()
    assert (setting.out / "stock-round-1-server.log").read_text() == "started\n"
    assert gone(mark)


def test_a_second_ctrl_c_leaves_no_process(setting: Setting, mark: str) -> None:
    program(setting, "stubborn", STUBBORN)
    client = Client(setting, "stock", 1, "http://nowhere")
    client.__enter__()
    deadline = time.monotonic() + 5
    while client.log.read_text() != "started\n" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(started_with(mark)) >= 2
    wait = client._process.wait
    interrupted = mock.Mock(side_effect=[KeyboardInterrupt, 0])
    with mock.patch.object(client._process, "wait", interrupted), pytest.raises(KeyboardInterrupt):
        client.__exit__()
    wait()
    assert gone(mark)


@pytest.mark.parametrize(
    ("then", "sentence"),
    [
        ("exit 3", "ended at 'presence_penalty 1.5' (exit code 3)"),
        ("exec sleep 20", "did not finish 'presence_penalty 1.5' in 1 s"),
    ],
)
def test_a_client_that_fails_at_a_case_has_given_those_before(
    setting: Setting, mark: str, then: str, sentence: str
) -> None:
    program(setting, "client", f'echo \'{{"package": ""}}\' > "$4"\n{then}\n')
    setting.timeout = 1.0
    with Client(setting, "stock", 1, "http://nowhere") as client:
        client.files[PLAIN].write_text('{"completed": 4}')
        results = client.results()
        while not client._package.exists():
            time.sleep(0.02)
        assert next(results) == (PLAIN, {"completed": 4})
        with pytest.raises(Failure) as failed:
            next(results)
    assert str(failed.value).startswith(f"the client of stock round 1 {sentence}; log: ")
    assert gone(mark)


def test_the_servers_differ_in_what_they_should(setting: Setting) -> None:
    setting.load = replace(setting.load, server=("--x", "a b"))
    for side, runner in (("stock", "0"), (MRV2, "1")):
        origin, line, environment = Server(setting, side, 3).command()
        assert origin == "stock"
        assert environment["VLLM_USE_V2_MODEL_RUNNER"] == runner
        assert line[-2:] == ["--x", "a b"]


def test_the_client_sends_each_case_its_parameters(setting: Setting) -> None:
    _, line, environment = Client(setting, "stock", 1, "http://here").command()
    cases: list[dict[str, Any]] = json.loads(line[-1])
    assert [case["single"].get("presence_penalty") for case in cases] == [None, 1.5, None]
    assert cases[1]["arguments"][-1] == '{"presence_penalty": 1.5}'
    assert cases[2]["arguments"][-2:] == ["--logprobs", "5"]
    assert environment["NO_PROXY"] == "127.0.0.1"


#: Starts a child on a side made up, and waits to be killed.
PARENT = """
import signal, sys
from pathlib import Path
from bench.compare.installations import Installations

stock = Installations.__new__(Installations)
stock.paths = {"stock": [Path("/side")]}
child = "import os, time; print(os.environ['PYTHONPATH'], flush=True); time.sleep(60)"
stock.start("stock", [sys.executable, "-c", child], Path(sys.argv[1]), {})
signal.pause()
"""


def test_a_child_imports_its_side_and_dies_with_its_parent(tmp_path: Path, mark: str) -> None:
    log, scripts = tmp_path / "log", str(installations.SCRIPTS)
    env = {**os.environ, "PYTHONPATH": scripts}
    with subprocess.Popen([sys.executable, "-c", PARENT, str(log)], env=env) as parent:
        deadline = time.monotonic() + 30
        while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.kill()
    assert log.read_text().strip() == os.pathsep.join(["/side", scripts, scripts])
    assert gone(mark)
