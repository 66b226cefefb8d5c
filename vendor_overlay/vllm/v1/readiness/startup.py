"""Start-up of an engine: check the switches, log the overlay, install the sync guard."""

# mirrors: nothing

from vllm.logger import init_logger
from vllm.v1.readiness import features, identity, scopes, switch, sync_guard
from vllm.v1.readiness.version import __version__

logger = init_logger(__name__)


def start(runner: object) -> None:
    """Check the switches, log version, digest, features and fixes, and guard the runner.

    Called first in each model runner's constructor; logs one line a node, and one for the
    guard if that is on.

    Args:
        runner: the model runner, which need not be constructed yet.

    Raises:
        VariableError: one of the overlay's variables holds a value that it may not.
    """
    on = switch.enabled()
    listed = [", ".join(sorted(group & on)) or "none" for group in features.GROUPS.values()]
    digest = identity.digest() or "unknown (not installed)"
    logger.info_once(
        "Readiness overlay %s, digest %s, features: %s; fixes: %s", __version__, digest, *listed
    )
    switch.slots()
    scopes.install()
    sync_guard.install(runner)
