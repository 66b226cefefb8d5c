"""Said once when an engine starts: which overlay, which files, which features."""

from vllm.logger import init_logger
from vllm.v1.readiness import identity, switch
from vllm.v1.readiness.version import __version__

logger = init_logger(__name__)


def start() -> None:
    """Check the switch, and log the overlay's version, digest and features.

    Called by each model runner's constructor; logs one line a node.

    Raises:
        SwitchError: VLLM_READINESS holds a word that means nothing.
    """
    features = ", ".join(sorted(switch.enabled())) or "none"
    digest = identity.digest() or "unknown (not installed)"
    logger.info_once(
        "Readiness overlay %s, digest %s, features on: %s", __version__, digest, features
    )
