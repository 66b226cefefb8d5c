"""Shared by every process of an engine: switch, ranks, identity, fences, gauges."""

# mirrors: nothing

from vllm.v1.readiness.engine.doors import door

__getattr__ = door(__name__, "lora_slots", "lost_wakeups", "pinning", "switch")
