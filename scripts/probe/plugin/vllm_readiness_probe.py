"""The probe as a plugin of vLLM, for installations with and without the overlay.

With this directory on PYTHONPATH, vLLM finds the entry point beside this file, and calls it in
every process. Where the overlay is installed, its own probe is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib.util import find_spec
from pathlib import Path

from vllm import envs

#: The directory of the overlay's package in a checkout or archive.
PACKAGE = Path(__file__).resolve().parents[3] / "vendor_overlay" / "vllm" / "v1"


def install() -> None:
    """Start the probe in this process, if VLLM_READINESS_PROBE is set.

    Raises:
        ImportError: neither the installed overlay nor this checkout has a probe.
    """
    import vllm.v1

    if find_spec("vllm.v1.readiness") is None:
        vllm.v1.__path__.append(str(PACKAGE))
    from vllm.v1.readiness.engine import switch
    from vllm.v1.readiness.watch import probe
    from vllm.v1.readiness.watch.probe import metrics

    probe.install()
    metrics.install()
    _make_known(switch.VARIABLES)


def _make_known(variables: Mapping[str, Callable[[], object]]) -> None:
    """Make vLLM accept our variables, and not report them as misspelt ones of its own.

    They are in its table only while it validates: a permanent entry would change the key of its
    caches of compiled code.
    """
    validate = envs.validate_environ
    lacking = {name: get for name, get in variables.items() if name not in _table()}
    if not lacking:
        return

    @wraps(validate)
    def validate_environ(hard_fail: bool) -> None:
        _table().update(lacking)
        try:
            validate(hard_fail)
        finally:
            for name in lacking:
                _table().pop(name, None)

    envs.validate_environ = validate_environ


def _table() -> dict[str, Callable[[], object]]:
    table: dict[str, Callable[[], object]] = envs.environment_variables
    return table
