"""Two clients of one server: the honest one's replies are those that it gets alone.

The server schedules asynchronously, on a simulated device.
"""

import json
import random
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support import adapters, clients
from support.asynchronous import announce, register
from support.engine import Engine

pytestmark = pytest.mark.slow


ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--async-scheduling"]


def setup(folder: Path, switch: str) -> tuple[Path, list[Path], dict[str, str]]:
    """Return a server's folder, its plugins and its variables."""
    return folder, [announce(folder / "plugins", register)], {"VLLM_READINESS": switch}


def test_an_honest_client_notices_nothing_of_a_hostile_one(folder: Path, overlaid: Engine) -> None:
    folder, plugins, variables = setup(folder / "two clients on", "on")
    with clients.serving(folder, overlaid, plugins, variables, ARGUMENTS) as server:
        assert clients.differences(server, exact=False) == []


def test_without_the_fixes_the_server_fails(folder: Path, overlaid: Engine) -> None:
    """Else the other test would say little. On a CPU, stock pins memory that it does not have."""
    folder, plugins, variables = setup(folder / "without fixes", "features,cpu-pinning")
    requests = clients.honest(random.Random(1))
    with clients.serving(folder, overlaid, plugins, variables, ARGUMENTS) as server:
        clients.ask(server, requests[:20])
        with (
            clients.beside(server, clients.hostile(random.Random(2), 0, True)),
            pytest.raises(urllib.error.HTTPError, match="500"),
        ):
            clients.ask(server, requests)


@pytest.mark.parametrize("switch", ["on", "-cache-keys"])
def test_an_adapters_name_as_a_salt_finds_none_of_its_blocks(
    folder: Path, overlaid: Engine, switch: str
) -> None:
    """The hostile client asks the base model for the honest one's prompt, with that salt."""
    folder, plugins, variables = setup(folder / f"salts {switch}", switch)
    adapter = adapters.write(folder / "adapter", seed=1)
    arguments = [*ARGUMENTS, "--enable-prefix-caching", "--enable-lora", "--max-lora-rank", "8"]
    arguments += ["--lora-modules", f"tenant={adapter}"]
    wrong = 0
    with clients.started(folder, overlaid, plugins, variables, arguments) as server:

        def reply(**fields: Any) -> Any:
            params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
            body = {"token_ids": prompt, "sampling_params": params, **fields}
            answer = json.loads(server.ask("/inference/v1/generate", body))
            return answer["choices"][0]["token_ids"]

        for number in range(8):
            prompt = [9 + (number * 101 + place * 7) % 900 for place in range(80)]
            base = reply(cache_salt="tenant")
            beside = reply(model="tenant")
            alone = reply(model="tenant", cache_salt=f"of its own {number}")
            assert base != alone
            wrong += beside != alone
    assert (wrong == 0) == (switch == "on")


@pytest.mark.parametrize("switch", ["on", "-stalled-requests"])
def test_prompts_of_the_models_length_stall_no_embeddings(
    folder: Path, overlaid: Engine, switch: str
) -> None:
    """The hostile client fills each row with a prompt that is computed in chunks."""
    folder, plugins, variables = setup(folder / f"embeddings {switch}", switch)
    arguments = [*ARGUMENTS, "--runner", "pooling", "--enable-chunked-prefill"]
    arguments += ["--no-enable-prefix-caching"]
    with clients.started(folder, overlaid, plugins, variables, arguments) as server:

        def embedding(length: int) -> Any:
            body = {"input": [9 + place % 900 for place in range(length)]}
            # Until the requests that are stalled give up, the server is busy with them.
            patience = 30 if switch == "on" else 10
            answer = json.loads(server.ask("/v1/embeddings", body, patience))
            return answer["data"][0]["embedding"]

        lengths = range(1, 201, 4)
        alone = [embedding(length) for length in lengths]
        with hostile(lambda: embedding(256)):
            if switch == "on":
                beside = [embedding(length) for length in lengths]
                assert beside == [pytest.approx(each, abs=1e-4) for each in alone]
            else:
                with pytest.raises(TimeoutError):
                    for length in range(1, 201):
                        embedding(length)


@contextmanager
def hostile(ask: Any) -> Iterator[None]:
    """Ask from more threads than the server has rows, until the block ends."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            with suppress(urllib.error.URLError, OSError):
                ask()

    threads = [threading.Thread(target=repeat) for _ in range(9)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
