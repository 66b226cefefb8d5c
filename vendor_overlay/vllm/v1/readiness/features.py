"""The overlay's features: the words that VLLM_READINESS accepts, and what they mean."""

from collections.abc import Mapping
from types import MappingProxyType

#: Feature name to one line on what it does. A name is lower-case with dashes, and
#: never "on" or "off".
FEATURES: Mapping[str, str] = MappingProxyType({})
