"""VLLM_READINESS: which features are on.

``on`` (the default) and ``off`` speak for all features; otherwise the variable holds a
comma-separated list of features to leave off. Off means that upstream's code runs.
"""

import os
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from vllm.v1.readiness.features import FEATURES, NEEDS

NAME = "VLLM_READINESS"


class SwitchError(ValueError):
    """The variable holds a word that means nothing.

    Attributes:
        value: the variable's value.
        words: the words in it that mean nothing.
    """

    def __init__(self, value: str, words: Collection[str], features: Collection[str]) -> None:
        self.value = value
        self.words = tuple(words)
        known = f"a comma-separated list of {', '.join(sorted(features))}" if features else ""
        valid = ", ".join(["on", "off", *([f"or {known}"] if known else [])])
        super().__init__(
            f"{NAME}={value!r}: {', '.join(map(repr, self.words))} is not understood. "
            f"Valid: {valid}. Unset it to have every feature on."
        )


def parse(value: str, features: Collection[str]) -> frozenset[str]:
    """The features that ``value`` leaves on.

    Args:
        value: the variable's value; empty means unset.
        features: every feature there is.

    Raises:
        SwitchError: a word is neither ``on``, ``off`` nor a feature, or ``on`` or
            ``off`` is one word among several.
    """
    words = [word.strip() for word in value.split(",")]
    if words in ([""], ["on"]):
        return frozenset(features)
    if words == ["off"]:
        return frozenset()
    if unknown := [word for word in words if word not in features]:
        raise SwitchError(value, unknown, features)
    return frozenset(features) - frozenset(words)


def enabled() -> frozenset[str]:
    """The features that are on in this process; one whose needs are off is off.

    Raises:
        SwitchError: see :func:`parse`.
    """
    on = parse(os.environ.get(NAME, ""), FEATURES)
    return frozenset(name for name in on if NEEDS.get(name, frozenset()) <= on)


#: Our environment variables, in the form of ``vllm.envs.environment_variables``: name
#: to a function that reads it. None of them changes what torch.compile sees.
VARIABLES: Mapping[str, Callable[[], object]] = MappingProxyType({NAME: enabled})
