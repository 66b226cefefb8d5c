"""Done once when an engine starts: say which overlay this is, and put up the sync guard."""

from vllm.logger import init_logger
from vllm.v1.readiness import identity, switch, sync_guard
from vllm.v1.readiness.version import __version__

logger = init_logger(__name__)


def start(runner: object) -> None:
    """Check the switches, log version, digest and features, and guard the runner if asked.

    Called by each model runner's constructor; logs one line a node, and one of the guard.

    Args:
        runner: the model runner, which need not be constructed any further yet.

    Raises:
        SwitchError: one of our variables holds a word that means nothing.
        NumberError: one of them holds no number, or none that it may hold.
    """
    features = ", ".join(sorted(switch.enabled())) or "none"
    digest = identity.digest() or "unknown (not installed)"
    logger.info_once(
        "Readiness overlay %s, digest %s, features on: %s", __version__, digest, features
    )
    switch.slots()
    sync_guard.install(runner)
