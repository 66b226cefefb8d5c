"""Start-up checks, the sync guard, scopes and the probe."""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine.doors import door

if TYPE_CHECKING:  # for editors
    from vllm.v1.readiness.watch import (
        startup,
    )

__getattr__ = door(__name__)
