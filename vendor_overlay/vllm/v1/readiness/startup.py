"""Start-up of an engine: check the switches, log the overlay, compare ranks, guard the runner."""

# mirrors: nothing

from vllm.logger import init_logger
from vllm.v1.readiness import features, identity, ranks, replaced, scopes, switch, sync_guard
from vllm.v1.readiness.version import __version__

logger = init_logger(__name__)


def start(runner: object) -> None:
    """Check the switches, log version, digest, features and fixes, compare the ranks, guard.

    Called first in each model runner's constructor, where the process groups are there and
    nothing has run; logs one line a node, one for what is not installed, if anything, and one
    for the guard if that is on.

    Args:
        runner: the model runner, which need not be constructed yet.

    Raises:
        VariableError: one of the overlay's variables holds a value that it may not.
        RanksError: the ranks of the engine run different overlays, or a rank runs none.
    """
    on = switch.enabled()
    listed = [", ".join(sorted(group & on)) or "none" for group in features.GROUPS.values()]
    digest = identity.digest()
    logger.info_once(
        "Readiness overlay %s, digest %s, features: %s; fixes: %s",
        __version__,
        digest or "unknown (not installed)",
        *listed,
    )
    if left_out := identity.left_out():
        logger.info_once(
            "Readiness overlay: not installed, because `apply` was told so: %s",
            ", ".join(sorted(left_out)),
        )
    switch.slots()
    replaced.report()
    ranks.check(digest)
    scopes.install()
    sync_guard.install(runner)
