"""Inputs of a step: token ids, block tables, slot mappings, Mamba states."""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine.doors import door

if TYPE_CHECKING:  # for editors
    from vllm.v1.readiness.inputs import mamba_metadata

__getattr__ = door(__name__)
