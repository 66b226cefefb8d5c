"""Our environment variables: what they say, and what they may say.

``VLLM_READINESS`` says which features are on. ``on`` (the default) and ``off`` speak for
all features; otherwise the variable holds a comma-separated list of features to leave
off. Off means that upstream's code runs.

``VLLM_READINESS_SYNC_GUARD`` says what becomes of a step that waits for the device:
``warn`` or ``error``; ``off`` (the default) means that nobody looks.

``VLLM_READINESS_SLOTS`` says for how many requests at a time penalties and bad words may be
kept on the device; unset (the default) means for all that vLLM runs at a time.

``VLLM_READINESS_PROBE`` names the file that the probe records into, with the process
appended to its name; unset (the default) means that nothing is recorded.
"""

import os
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from vllm.v1.readiness.features import FEATURES, NEEDS

NAME = "VLLM_READINESS"
SYNC_GUARD = "VLLM_READINESS_SYNC_GUARD"
SLOTS = "VLLM_READINESS_SLOTS"
PROBE = "VLLM_READINESS_PROBE"


class VariableError(ValueError):
    """A variable holds what it may not.

    Attributes:
        name: the variable.
        value: the variable's value.
    """

    def __init__(self, name: str, value: str, sentence: str) -> None:
        """``sentence`` says what is wrong, and the next step to take."""
        self.name = name
        self.value = value
        super().__init__(f"{name}={value!r}: {sentence}")


class SwitchError(VariableError):
    """A variable holds a word that means nothing.

    Attributes:
        words: the words in it that mean nothing.
    """

    def __init__(
        self, name: str, value: str, words: Collection[str], valid: Collection[str], unset: str
    ) -> None:
        """The sentence says what is valid, and what it means to unset the variable."""
        self.words = tuple(words)
        super().__init__(
            *(name, value),
            f"{', '.join(map(repr, self.words))} is not understood. "
            f"Valid: {', '.join(valid)}. Unset it to have {unset}.",
        )


class NumberError(VariableError):
    """A variable holds no number, or none that it may hold."""


class PathError(VariableError):
    """A variable names a file that cannot be written."""


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
        valid = ["on", "off"]
        if features:
            valid.append(f"or a comma-separated list of {', '.join(sorted(features))}")
        raise SwitchError(NAME, value, unknown, valid, "every feature on")
    return frozenset(features) - frozenset(words)


def enabled() -> frozenset[str]:
    """The features that are on in this process; one whose needs are off is off.

    Raises:
        SwitchError: see :func:`parse`.
    """
    on = parse(os.environ.get(NAME, ""), FEATURES)
    return frozenset(name for name in on if NEEDS.get(name, frozenset()) <= on)


def sync_guard() -> str:
    """What becomes of a step that waits: ``warn``, ``error``, or ``off``: nobody looks.

    Raises:
        SwitchError: the variable holds anything else.
    """
    value = os.environ.get(SYNC_GUARD, "")
    word = value.strip() or "off"
    if word not in ("off", "warn", "error"):
        raise SwitchError(SYNC_GUARD, value, [word], ["off", "warn", "error"], "no guard")
    return word


def slots() -> int | None:
    """How many requests may have a slot on the device; None: as many as vLLM runs.

    Raises:
        NumberError: the variable holds anything but a whole number from 0 on.
    """
    value = os.environ.get(SLOTS, "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdigit()):
        raise NumberError(
            SLOTS,
            value,
            "this is not a number of requests. Set a whole number, 0 or more, or unset "
            "the variable to allow every request.",
        )
    return int(value)


def probe() -> str | None:
    """The absolute path of the file that the probe records into; None: nothing is recorded.

    Raises:
        PathError: the path is a directory, or the directory that it lies in does not exist
            or cannot be written to by this user.
    """
    value = os.environ.get(PROBE, "")
    if not value.strip():
        return None
    path = os.path.abspath(value)
    folder = os.path.dirname(path)
    if os.path.isdir(path) or value.endswith(os.sep):
        wrong = f"this is a directory. Name a file, such as {shown(os.path.join(path, 'probe'))}"
    elif not os.path.isdir(folder):
        wrong = f"there is no directory {shown(folder)}. Make it, or name a file elsewhere"
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = f"this user may not write to {shown(folder)}. Allow it, or name a file elsewhere"
    else:
        return path
    raise PathError(PROBE, value, f"{wrong}; or unset it to have nothing recorded.")


def shown(path: str) -> str:
    """A path as a log can hold it: bytes of its name that are no text are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


#: Our environment variables, in the form of ``vllm.envs.environment_variables``: name
#: to a function that reads it. None of them changes what torch.compile sees.
VARIABLES: Mapping[str, Callable[[], object]] = MappingProxyType(
    {NAME: enabled, SYNC_GUARD: sync_guard, SLOTS: slots, PROBE: probe}
)
