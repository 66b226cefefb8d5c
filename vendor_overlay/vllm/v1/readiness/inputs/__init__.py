"""Inputs of a step: token ids, block tables, slot mappings, Mamba states."""

# mirrors: nothing

from vllm.v1.readiness.engine.doors import door

__getattr__ = door(__name__, "draft_gates")
