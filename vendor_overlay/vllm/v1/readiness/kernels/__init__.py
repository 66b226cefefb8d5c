"""Triton kernels that are not in the file of one feature, and launches of upstream's kernels.

Import a module that imports Triton itself only where it has a driver, or under its interpreter.
"""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine.doors import door

if TYPE_CHECKING:  # for editors
    from vllm.v1.readiness.kernels import launches, mamba_layers

__getattr__ = door(__name__)
