"""Two clients of one server: the honest one's replies are those that it gets alone.

The server schedules asynchronously, on a simulated device.
"""

import urllib.error
from pathlib import Path
from typing import Any

import pytest
from support import clients, forked
from support.asynchronous import announce, register
from support.engine import Engine

pytestmark = pytest.mark.slow


def differences(folder: Path, engine: Engine, switch: str) -> list[Any]:
    """Serve both clients with a value of VLLM_READINESS; see :func:`clients.differences`."""
    folder = folder / f"two clients {switch}"
    plugins = announce(folder / "plugins", register, forked.fork)
    variables = {**forked.ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_READINESS": switch}
    arguments = ["--dtype", "float32", "--enforce-eager", "--async-scheduling"]
    with clients.serving(folder, [engine.site, plugins], variables, arguments) as server:
        return clients.differences(server, exact=False)


def test_an_honest_client_notices_nothing_of_a_hostile_one(folder: Path, overlaid: Engine) -> None:
    assert differences(folder, overlaid, "on") == []


def test_without_the_fixes_the_server_fails(folder: Path, overlaid: Engine) -> None:
    """Else the other test would say little."""
    with pytest.raises(urllib.error.HTTPError, match="500"):
        differences(folder, overlaid, "-fixes")
