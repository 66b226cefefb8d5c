"""Two clients of one server: the honest one's replies are those that it gets alone.

The server schedules asynchronously, on a simulated device.
"""

import json
import random
import urllib.error
from pathlib import Path

import pytest
from support import clients
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
        for grammar, variable in clients.BEYOND_BOUNDS:
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.generate([9], max_tokens=1, structured_outputs=grammar)
            assert refused.value.code == 400
            message = json.loads(refused.value.read())["error"]["message"]
            assert f"larger {variable}." in message
        assert clients.differences(server, exact=False) == []


def test_without_the_fixes_the_server_fails(folder: Path, overlaid: Engine) -> None:
    """Else the other test would say little. On a CPU, stock pins memory that it does not have."""
    folder, plugins, variables = setup(folder / "without fixes", "features,cpu-pinning")
    requests = clients.honest(random.Random(1))
    with clients.serving(folder, overlaid, plugins, variables, ARGUMENTS) as server:
        # Stock ends with an error when a prompt with a seed is cut, so that none has one before.
        clients.ask(server, clients.honest(random.Random(1), alone=False)[:20])
        with (
            clients.beside(server, clients.hostile(random.Random(2), 0, True)),
            pytest.raises(OSError) as failed,
        ):
            clients.ask(server, requests)
    # A server that ends may cut a connection before it answers.
    assert getattr(failed.value, "code", 500) == 500
    assert not isinstance(failed.value, TimeoutError)
