"""Recurrent layers (Mamba 2, gated delta nets): gates of drafts, and launches of their kernels."""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine.doors import door

if TYPE_CHECKING:  # for editors
    from vllm.v1.readiness.layers import draft_gates, gated_delta, mamba2

__getattr__ = door(__name__)
