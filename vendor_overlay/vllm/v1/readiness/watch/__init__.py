"""Start-up checks, the sync guard, scopes and the probe."""

# mirrors: nothing

from vllm.v1.readiness.engine.doors import door

__getattr__ = door(__name__, "startup")
