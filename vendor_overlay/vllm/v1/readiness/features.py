"""The overlay's features: the words that VLLM_READINESS accepts, and what they mean."""

from collections.abc import Mapping
from types import MappingProxyType

#: Feature name to one line on what it does. A name is lower-case with dashes, and
#: never "on" or "off".
FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "history": "token_ids_cpu holds each sampled token that has arrived; waits only by name",
        "readback": "outputs come by one pinned copy and its event; no blocking copy",
        "thinking-budget": "markers searched in new tokens only; waits where a force may be due",
        "penalties": "penalties from counts on the device; no cost grows with the output",
        "bad-words": "bad words matched and masked on the device; nothing waits",
        "allowed-tokens": "a row holds what is its own request's, allowed tokens first of all",
        "plugin-processors": "a logits processor from an entry point reads each sampled token",
        "sampler-copies": "logits are copied and converted only where something changes them",
    }
)

#: Feature name to the features that it builds on: off with them.
NEEDS: Mapping[str, frozenset[str]] = MappingProxyType(
    dict.fromkeys(("penalties", "bad-words", "thinking-budget"), frozenset({"history"}))
)


def without(name: str, on: frozenset[str]) -> frozenset[str]:
    """The features that are left of ``on`` when one is off: its dependents go with it."""
    return frozenset(each for each in on if each != name and name not in NEEDS.get(each, ()))
