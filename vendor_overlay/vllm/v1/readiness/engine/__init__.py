"""Shared by every process of an engine: switch, ranks, identity, fences, gauges."""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine.doors import door

if TYPE_CHECKING:  # for editors
    from vllm.v1.readiness.engine import (
        lora_slots,
        lost_wakeups,
        pinning,
        switch,
    )

__getattr__ = door(__name__)
