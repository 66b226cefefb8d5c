"""Start-up of a model runner: checks, log lines, comparison of ranks, sync guard."""

# mirrors: nothing

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import identity, ranks, switch
from vllm.v1.readiness.version import __version__
from vllm.v1.readiness.watch import exports, metrics, scopes, sync_guard

logger = init_logger(__name__)

#: Package of Model Runner V2, and vLLM's variable that selects V1 or V2.
_V2, _CHOICE = "vllm.v1.worker.gpu.", "VLLM_USE_V2_MODEL_RUNNER"


def start(runner: object) -> None:
    """Check the variables, log what is on, compare ranks, and install scopes and the sync guard.

    Called first in each model runner's constructor. One log line per node lists the features and
    fixes that take effect. Further lines list those without effect under this runner or on this
    device, and those left out by `apply`.

    Raises:
        VariableError: one of the overlay's variables is invalid.
        RanksError: the ranks run different overlays, or a rank runs none.
    """
    switch.check()
    on = switch.enabled()
    is_v2 = any(base.__module__.startswith(_V2) for base in type(runner).__mro__)
    name, device = "V2" if is_v2 else "V1", "cpu" if current_platform.is_cpu() else "gpu"
    elsewhere = {word for word in on if registry.WORDS[word].device not in ("", device)}
    idle = on - elsewhere - registry.ON_V2 if is_v2 else frozenset()
    acting = on - elsewhere - idle
    digest = identity.digest()
    logger.info_once(
        "Readiness overlay %s, digest %s, features: %s; fixes: %s; runner: %s on %s",
        *(__version__, digest or "unknown (not installed)"),
        *(", ".join(sorted(group & acting)) or "none" for group in registry.GROUPS.values()),
        *(name, device.upper()),
    )
    if idle:
        logger.info_once(
            "Readiness overlay: no effect under Model Runner V2: %s. Set %s=0 to use V1",
            *(", ".join(sorted(idle)), _CHOICE),
        )
    if elsewhere:
        logger.info_once(
            "Readiness overlay: no effect on this device: %s", ", ".join(sorted(elsewhere))
        )
    if left_out := identity.left_out():
        logger.info_once("Readiness overlay: left out by `apply`: %s", ", ".join(sorted(left_out)))
    exports.export_info(metrics.info(name, acting))
    ranks.check(digest)
    scopes.install()
    sync_guard.install(runner)
