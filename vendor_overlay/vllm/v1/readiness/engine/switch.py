"""The overlay's environment variables: their values and readers.

- ``VLLM_READINESS``: the features and fixes that are on, in the style of ``TORCH_LOGS``. ``on``
  (default) or ``off``; ``-penalties,-fixes``: all but these; ``history,readback``: only these and
  their dependencies. ``features`` and ``fixes`` each name a group. Anything that is off falls back
  to upstream.
- ``VLLM_READINESS_SYNC_GUARD``: if a step syncs with the device, ``warn`` logs the stack and
  ``error`` raises. ``off`` (default) installs no guard.
- ``VLLM_READINESS_SLOTS``: maximum number of requests with penalties or bad words on the device;
  by default max_num_seqs.
- ``VLLM_READINESS_RANKS``: if the ranks of an engine run different overlays, ``error`` (default)
  refuses to start and ``warn`` logs a warning. ``off`` does not compare.
- ``VLLM_READINESS_GRAMMAR_BYTES``, ``..._GRAMMAR_DEPTH``, ``..._GRAMMAR_RULES``,
  ``..._GRAMMAR_CHOICES``, ``..._GRAMMAR_REPEATS`` and ``VLLM_READINESS_SCHEMA_ITEMS``: bounds of
  one request's structured outputs (:data:`BOUNDS`). ``0`` or ``off``: no bound.
- ``VLLM_READINESS_PROBE``: 1, or a file for the probe's metrics; unset (default): no probe.

Each reader raises :class:`VariableError` if its variable is invalid.
"""

# mirrors: nothing

import os
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache, partial
from types import MappingProxyType

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import identity

NAME = "VLLM_READINESS"
SYNC_GUARD = "VLLM_READINESS_SYNC_GUARD"
RANKS = "VLLM_READINESS_RANKS"
SLOTS = "VLLM_READINESS_SLOTS"
GRAMMAR_BYTES = "VLLM_READINESS_GRAMMAR_BYTES"
GRAMMAR_DEPTH = "VLLM_READINESS_GRAMMAR_DEPTH"
GRAMMAR_RULES = "VLLM_READINESS_GRAMMAR_RULES"
GRAMMAR_CHOICES = "VLLM_READINESS_GRAMMAR_CHOICES"
GRAMMAR_REPEATS = "VLLM_READINESS_GRAMMAR_REPEATS"
SCHEMA_ITEMS = "VLLM_READINESS_SCHEMA_ITEMS"
PROBE = "VLLM_READINESS_PROBE"
#: Bounds of structured outputs, with their defaults. docs/operations.md says why.
BOUNDS: Mapping[str, int] = MappingProxyType(
    {
        GRAMMAR_BYTES: 256 << 10,
        GRAMMAR_DEPTH: 128,
        GRAMMAR_RULES: 500,
        GRAMMAR_CHOICES: 10_000,
        GRAMMAR_REPEATS: 5000,
        SCHEMA_ITEMS: 100_000,
    }
)
#: Largest number of digits of a bound.
_DIGITS = 18
#: Directory of exported metrics: set by an engine's first process, inherited by the others.
EXPORTS = "VLLM_READINESS_EXPORTS"


class VariableError(ValueError):
    """A variable has an invalid value. The message says how to correct it."""

    def __init__(self, name: str, value: str, sentence: str) -> None:
        self.name, self.value = name, value
        super().__init__(f"{name}={value!r}: {sentence}")


class SwitchError(VariableError):
    """A word in a variable is unknown, or contradicts another word."""


class NumberError(VariableError):
    """The value of a variable is not a number, or is out of range."""


class PathError(VariableError):
    """The file that a variable names cannot be written."""


@cache
def parse(value: str) -> frozenset[str]:
    """Return the words that are on for a value of ``VLLM_READINESS``; empty counts as unset.

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
        problem = f"{', '.join(map(repr, unknown))} is not understood"
        for name in registry.REMOVED.keys() & set(names):
            problem += f" ({name} was removed: {registry.REMOVED[name]})"
        raise _not_understood(value, problem)
    members = frozenset().union(*map(_members, names))
    if all(excluding):
        return registry.without(members, registry.ALL)
    if any(excluding):
        raise _not_understood(value, "it mixes names with '-' (all but these) and names without")
    return registry.with_needs(members)


def _members(name: str) -> frozenset[str]:
    """Return the members of a group, or a single word; empty if unknown."""
    return registry.GROUPS.get(name, registry.ALL & {name})


def _not_understood(value: str, problem: str) -> SwitchError:
    """Return an error whose message lists the valid words and suggests a value."""
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
    """Yield the closest valid words; if words have ``-``, skip those without."""
    excluding = ",-" in f",{value.replace(' ', '')}"
    known = [*registry.GROUPS, *sorted(registry.ALL), *(() if excluding else ("on", "off"))]
    words = [word.strip() for word in value.lower().split(",")]
    for word in dict.fromkeys(words):
        if excluding and not word.startswith("-"):
            continue
        sign = "-" * excluding
        if word.removeprefix(sign) in registry.REMOVED:
            continue
        if matches := get_close_matches(word.removeprefix(sign).strip(), known, 1):
            if matches[0] in ("on", "off") and len(words) > 1:
                continue
            yield sign + matches[0]


def enabled() -> frozenset[str]:
    """Read the features and fixes that are on; those that `apply` left out are off."""
    return _installed(os.environ.get(NAME, ""))


@cache
def _installed(value: str) -> frozenset[str]:
    return registry.without(identity.left_out(), parse(value))


def sync_guard() -> str:
    """Read the sync guard's mode: ``warn``, ``error`` or ``off``."""
    return _mode(SYNC_GUARD, "off", "for no guard")


def ranks() -> str:
    """Read the mode of the rank comparison: ``error``, ``warn`` or ``off``."""
    return _mode(RANKS, "error", "to refuse ranks that differ")


def _mode(name: str, default: str, purpose: str) -> str:
    value = os.environ.get(name, "")
    word = value.strip() or default
    if word not in ("off", "warn", "error"):
        sentence = f"{word!r} is not understood. Valid: off, warn, error. Unset it {purpose}."
        raise SwitchError(name, value, sentence)
    return word


def slots() -> int | None:
    """Read the maximum number of requests with a slot, 0 or more; None for no limit."""
    value = os.environ.get(SLOTS, "").strip()
    if not value:
        return None
    if value.isascii() and value.isdigit():
        return int(value)
    raise NumberError(
        SLOTS,
        value,
        "this is not a number of requests. Set a whole number, 0 or more, or unset the variable "
        "to allow every request.",
    )


def bound(name: str) -> int | None:
    """Read a bound of structured outputs, 1 or more; None for no bound."""
    value = os.environ.get(name, "").strip()
    if not value:
        return BOUNDS[name]
    if value == "off":
        return None
    if value.isascii() and value.isdigit() and len(value) <= _DIGITS:
        return int(value) or None
    raise NumberError(
        name,
        value,
        "this is not a bound. Set a whole number, or 0 or off for no bound, or unset the variable "
        f"for {BOUNDS[name]}.",
    )


def probe() -> str | None:
    """Read ``1``, or the absolute path of the probe's snapshot; None for no probe."""
    value = os.environ.get(PROBE, "")
    if value.strip() in ("", "0", "1"):
        return "1" if value.strip() == "1" else None
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
    raise PathError(PROBE, value, f"{wrong}; or unset it to record nothing.")


def shown(path: str) -> str:
    """Return a path with escapes for bytes that are not valid text."""
    return os.fsencode(path).decode(errors="backslashreplace")


#: Readers by variable name, as in ``vllm.envs.environment_variables``. None affects torch.compile.
VARIABLES: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        NAME: enabled,
        SYNC_GUARD: sync_guard,
        RANKS: ranks,
        SLOTS: slots,
        **{name: partial(bound, name) for name in BOUNDS},
        PROBE: probe,
        EXPORTS: lambda: os.environ.get(EXPORTS),
    }
)


def check() -> None:
    """Read every variable.

    Raises:
        VariableError: a variable is invalid.
    """
    for read in VARIABLES.values():
        read()
