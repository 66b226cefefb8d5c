"""Start-up of an engine: check the switches, log the overlay, compare ranks, guard the runner."""

# mirrors: nothing

from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import identity, ranks, switch
from vllm.v1.readiness.version import __version__
from vllm.v1.readiness.watch import replaced, scopes, sync_guard

logger = init_logger(__name__)

#: The package of Model Runner V2, and vLLM's variable that chooses between the two.
_V2, _CHOICE = "vllm.v1.worker.gpu.", "VLLM_USE_V2_MODEL_RUNNER"


def start(runner: object) -> None:
    """Check the switches, log version, digest, features and fixes, compare the ranks, guard.

    Called first in each model runner's constructor, where the process groups are there and
    nothing has run. Logs one line per node with all that acts under this runner; further ones
    for what is on and does nothing here, for what is not installed, and for the guard.

    Args:
        runner: the model runner, which need not be constructed yet.

    Raises:
        VariableError: one of the overlay's variables holds a value that it may not.
        RanksError: the ranks of the engine run different overlays, or a rank runs none.
    """
    on = switch.enabled()
    idle = on - registry.ON_V2 if _is_v2(type(runner)) else frozenset()
    listed = [", ".join(sorted(group & on - idle)) or "none" for group in registry.GROUPS.values()]
    digest = identity.digest()
    logger.info_once(
        "Readiness overlay %s, digest %s, features: %s; fixes: %s",
        __version__,
        digest or "unknown (not installed)",
        *listed,
    )
    if idle:
        logger.info_once(
            "Readiness overlay: Model Runner V2 serves, under which these do nothing: %s. "
            "%s=0 takes V1",
            ", ".join(sorted(idle)),
            _CHOICE,
        )
    if left_out := identity.left_out():
        logger.info_once(
            "Readiness overlay: not installed, because `apply` was told so: %s",
            ", ".join(sorted(left_out)),
        )
    for limit in (switch.slots, switch.grammar_seconds, switch.grammar_memory):
        limit()
    replaced.report()
    ranks.check(digest)
    scopes.install()
    sync_guard.install(runner)


def _is_v2(kind: type) -> bool:
    """Whether a runner's class is Model Runner V2's, or derived from it."""
    return any(base.__module__.startswith(_V2) for base in kind.__mro__)
