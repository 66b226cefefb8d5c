"""The overlay's environment variables: what each may hold, and how it is read.

``VLLM_READINESS`` says which features and fixes are on, in the manner of ``TORCH_LOGS``:

- ``on`` (the default) and ``off``: all, or none;
- ``-penalties,-fixes``: all but these;
- ``history,readback``: only these, and the features that they build on.

``features`` and ``fixes`` name a whole group. Where something is off, vLLM's own code runs.

``VLLM_READINESS_SYNC_GUARD`` says what happens to a step that waits for the device:
``warn`` or ``error``; ``off`` (the default) installs no guard.

``VLLM_READINESS_SLOTS`` limits how many requests at a time may keep penalties or bad words
on the device; unset (the default), all requests that vLLM runs at a time may.

``VLLM_READINESS_RANKS`` says what happens to an engine whose ranks run different overlays:
``error`` (the default) refuses to start, ``warn`` starts all the same, ``off`` does not compare.

``VLLM_READINESS_GRAMMAR_SECONDS`` and ``VLLM_READINESS_GRAMMAR_MEMORY`` limit the CPU time and the
MiB of memory that compiling one request's grammar may take; unset, 30 and 1024.

``VLLM_READINESS_PROBE`` names the file that the probe records into; the process's label is
appended. Unset (the default), nothing is recorded.
"""

# mirrors: nothing

import os
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import identity

NAME = "VLLM_READINESS"
SYNC_GUARD = "VLLM_READINESS_SYNC_GUARD"
RANKS = "VLLM_READINESS_RANKS"
SLOTS = "VLLM_READINESS_SLOTS"
GRAMMAR_SECONDS = "VLLM_READINESS_GRAMMAR_SECONDS"
GRAMMAR_MEMORY = "VLLM_READINESS_GRAMMAR_MEMORY"
PROBE = "VLLM_READINESS_PROBE"
#: Longer numbers than this are refused: the kernel takes 64 bits.
_DIGITS = 10
#: Set by the probe itself, for the other processes of an engine.
PROBE_ENGINE = "VLLM_READINESS_PROBE_ENGINE"


class VariableError(ValueError):
    """A variable holds a value that it may not.

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
    """A variable holds a word that is not understood, or words that do not go together."""


class NumberError(VariableError):
    """A variable holds no number, or one that is out of range."""


class PathError(VariableError):
    """A variable names a file that cannot be written."""


@cache
def parse(value: str) -> frozenset[str]:
    """Parse a value of ``VLLM_READINESS``.

    Args:
        value: the variable's value; an empty one means unset.

    Returns:
        The names of the features and fixes that are on.

    Raises:
        SwitchError: a word is unknown, or words with and without ``-`` are mixed.
    """
    words = [word.strip() for word in value.split(",")]
    if words in ([""], ["on"]):
        return registry.ALL
    if words == ["off"]:
        return frozenset()
    names = [word.removeprefix("-") for word in words]
    excluding = [word.startswith("-") for word in words]
    unknown = [w for w, name in zip(words, names, strict=True) if not _members(name)]
    if unknown:
        raise _not_understood(value, f"{', '.join(map(repr, unknown))} is not understood")
    members = frozenset().union(*map(_members, names))
    if all(excluding):
        return registry.without(members, registry.ALL)
    if any(excluding):
        raise _not_understood(value, "it names some with '-' (all but these) and some without")
    return registry.with_needs(members)


def _members(name: str) -> frozenset[str]:
    """The features and fixes that a word names, a group's or its own; empty if unknown."""
    return registry.GROUPS.get(name, registry.ALL & {name})


def _not_understood(value: str, problem: str) -> SwitchError:
    """The error for a value, with the valid words and the line that was probably meant."""
    groups = "; ".join(
        f"{group} ({', '.join(sorted(members))})" for group, members in registry.GROUPS.items()
    )
    meant = ",".join(_probable(value))
    return SwitchError(
        NAME,
        value,
        f"{problem}. Valid: on, off, -name,-name (all but these), or name,name (only these), "
        f"where a name is a group or one of its members: {groups}. "
        f"{f'Did you mean {NAME}={meant}? ' if meant else ''}Unset it to have everything on.",
    )


def _probable(value: str) -> Iterator[str]:
    """The words of a value that can be kept or corrected; of a mixture, those with ``-``."""
    excluding = ",-" in f",{value.replace(' ', '')}"
    known = [*registry.GROUPS, *sorted(registry.ALL), *(() if excluding else ("on", "off"))]
    words = [word.strip() for word in value.lower().split(",")]
    for word in dict.fromkeys(words):
        if excluding and not word.startswith("-"):
            continue
        sign = "-" * excluding
        if matches := get_close_matches(word.removeprefix(sign).strip(), known, 1):
            if matches[0] in ("on", "off") and len(words) > 1:
                continue
            yield sign + matches[0]


def enabled() -> frozenset[str]:
    """Read which features and fixes are on in this process.

    Those that are not installed are off, whatever the variable says.

    Raises:
        SwitchError: see :func:`parse`.
    """
    return _installed(os.environ.get(NAME, ""))


@cache
def _installed(value: str) -> frozenset[str]:
    """What a value turns on, less what `apply` has left out and what needs that."""
    return registry.without(identity.left_out(), parse(value))


def sync_guard() -> str:
    """Read the guard's mode: ``warn``, ``error``, or ``off`` for no guard.

    Raises:
        SwitchError: the variable holds anything else.
    """
    return _mode(SYNC_GUARD, "off", "for no guard")


def ranks() -> str:
    """Read the mode of the comparison of ranks: ``error``, ``warn``, or ``off`` for none.

    Raises:
        SwitchError: the variable holds anything else.
    """
    return _mode(RANKS, "error", "to refuse ranks that differ")


def _mode(name: str, default: str, purpose: str) -> str:
    """Read a variable that holds ``off``, ``warn`` or ``error``."""
    value = os.environ.get(name, "")
    word = value.strip() or default
    if word not in ("off", "warn", "error"):
        sentence = f"{word!r} is not understood. Valid: off, warn, error. Unset it {purpose}."
        raise SwitchError(name, value, sentence)
    return word


def slots() -> int | None:
    """Read how many requests may have a slot on the device; None for all that vLLM runs.

    Raises:
        NumberError: the variable holds anything but a whole number, 0 or more.
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


def grammar_seconds() -> int:
    """Read how many seconds of CPU time compiling one grammar may take.

    Raises:
        NumberError: the variable holds anything but a whole number, 1 or more.
    """
    return _limit(GRAMMAR_SECONDS, 30, "seconds")


def grammar_memory() -> int:
    """Read how many MiB of memory compiling one grammar may take.

    Raises:
        NumberError: the variable holds anything but a whole number, 1 or more.
    """
    return _limit(GRAMMAR_MEMORY, 1024, "MiB")


def _limit(name: str, default: int, unit: str) -> int:
    """Read a variable that holds a whole number, 1 or more; the default if it is unset."""
    value = os.environ.get(name, "").strip()
    if not value:
        return default
    number = 0
    if value.isascii() and value.isdigit() and len(value) < _DIGITS:
        number = int(value)
    if not number:
        raise NumberError(
            name,
            value,
            f"this is not a number of {unit}. Set a whole number, 1 or more, or unset the "
            f"variable for {default}.",
        )
    return number


def probe() -> str | None:
    """Read the absolute path of the file that the probe records into; None for no probe.

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
    """Escape what a log cannot hold: bytes of a path that are not text."""
    return os.fsencode(path).decode(errors="backslashreplace")


#: The overlay's variables in the form of ``vllm.envs.environment_variables``: name to the
#: function that reads it. None of them changes what torch.compile sees.
VARIABLES: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        NAME: enabled,
        SYNC_GUARD: sync_guard,
        RANKS: ranks,
        SLOTS: slots,
        GRAMMAR_SECONDS: grammar_seconds,
        GRAMMAR_MEMORY: grammar_memory,
        PROBE: probe,
        PROBE_ENGINE: lambda: os.environ.get(PROBE_ENGINE),
    }
)
