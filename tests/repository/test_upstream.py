"""patches/upstream.toml agrees with the registry, the patches' headers, and the pages."""

import datetime
import re
from collections.abc import Iterator
from typing import Any

import pytest
from overlay.patches import Patch, header_fields
from overlay.words import SERVES
from series import errata
from support.sites import OVERLAY, REPO
from vllm.v1.readiness import registry

FILE = f"patches/{errata.NAME}"
FACTS = errata.load(REPO)
WHO = {"any client", "operator", "race"}
HOW = {"sources", "run", "issue"}
KEYS = {"symptom", "severity", "who", "upstream", "looked", "word"}
OPTIONAL = {"perhaps", "mended", "partly", "note", "unmended", "reproducer"}
#: A release in a header.
RELEASE = re.compile(r"\b0\.\d\d\.\d+\b")


def complaints(facts: dict[str, Any]) -> Iterator[str]:
    """A sentence for each fault of the facts alone."""
    words = {erratum["word"] for erratum in facts["errata"].values()}
    for word in registry.FIXES.keys() - words:
        yield f"{FILE}: the fix {word} has no entry: add [errata.{word}], or `word` to others"
    for word in registry.FIXES.keys() ^ facts["fixes"].keys():
        yield f"{FILE}: [fixes] and the fixes of registry.py differ by {word}"
    if [*facts["fixes"]] != sorted(facts["fixes"]):
        yield f"{FILE}: [fixes] are not in the order of the alphabet"
    for word, fix in facts["fixes"].items():
        if "mend" not in fix or fix.keys() - errata.TEXTS or not all(map(str.strip, fix.values())):
            yield f"{FILE}: [fixes.{word}] has a mend, perhaps {[*errata.TEXTS]}, and no more"
    for word in registry.FEATURES.keys() ^ facts["features"].keys():
        yield f"{FILE}: [features] and the features of registry.py differ by {word}"
    if wrong := [release for release in facts["releases"] if not RELEASE.fullmatch(release)]:
        yield f"{FILE}: [releases] {wrong} are no releases"
    for name, entry in facts["errata"].items():
        yield from (f"{FILE}: [errata.{name}] {fault}" for fault in faults(entry))
    for name, entry in (*facts["errata"].items(), *facts["features"].items()):
        looked = entry.get("looked", {})
        if not isinstance(looked.get("on"), datetime.date) or looked.get("how") not in HOW:
            yield f"{FILE}: {name}: looked = {{ on = DATE, how = one of {sorted(HOW)} }}"
        for report in (*entry.get("upstream", ()), *entry.get("perhaps", ())):
            if not re.fullmatch(r"\d{5}|GHSA(-\w{4}){3}", report):
                yield f"{FILE}: {name}: {report!r} is no number of an issue, and no advisory"


def faults(entry: dict[str, Any]) -> Iterator[str]:
    if wrong := (KEYS - entry.keys()) | (entry.keys() - KEYS - OPTIONAL):
        yield f"lacks, or has and should not: {sorted(wrong)}"
        return
    if entry["word"] is not None and entry["word"] not in registry.FIXES:
        yield f"is no fix of registry.py ({entry['word']}): set `word`, or say why in `unmended`"
    if (entry["word"] is None) == ("reproducer" in entry):
        yield "needs a `reproducer` if a fix mends it, and none otherwise"
    if not (REPO / entry.get("reproducer", "")).exists():
        yield f"reproducer: {entry['reproducer']} does not exist"
    ranks = [
        [*errata.SEVERITIES].index(each) for each in entry["severity"] if each in errata.SEVERITIES
    ]
    if not ranks or ranks != sorted({*ranks}) or len(ranks) != len(entry["severity"]):
        yield f"severity: one or more of {[*errata.SEVERITIES]}, worst first"
    if entry["who"] not in WHO:
        yield f"who: one of {sorted(WHO)}"
    releases = [*entry.get("partly", ()), *filter(None, [entry.get("mended")])]
    if releases != sorted(releases) or not all(map(RELEASE.fullmatch, releases)):
        yield "partly and mended: releases, in their order"


def test_the_facts_are_complete() -> None:
    assert list(complaints(FACTS)) == []


def header_complaints(patch: Patch, facts: dict[str, Any]) -> Iterator[str]:
    """A sentence for each fact about upstream that a header has, and the facts have not."""
    header = header_fields(patch.header)
    served = {word.strip() for word in header[SERVES].split(",")}
    mending = [entry for entry in facts["errata"].values() if entry["word"] in served]
    entries = [*mending, *(facts["features"][word] for word in served & facts["features"].keys())]
    bug = header["Bug"].rpartition("/")[2]
    reports = {report for entry in entries for report in entry.get("upstream", ())}
    if served != {"all"} and bug != "none" and bug not in reports:
        yield f"{patch.name}: Bug {bug} is in {FILE} in no entry of {', '.join(sorted(served))}"
    whole = {entry.get("mended", facts["read"]) for entry in entries}  # "not in" the newest
    partly = {release for entry in entries for release in entry.get("partly", ())}
    for name, known in (("Applied-Upstream", whole), ("Drop-When", whole | partly)):
        for release in {*RELEASE.findall(header.get(name, ""))} - known:
            yield f"{patch.name}: {name} says {release}, and {FILE} does not"


@pytest.mark.parametrize("patch", OVERLAY.series.patches, ids=lambda patch: patch.name[:4])
def test_headers_say_what_the_facts_say(patch: Patch) -> None:
    assert list(header_complaints(patch, FACTS)) == []


def test_a_release_has_the_fixes_of_those_before_it() -> None:
    facts: list[dict[str, Any]] = [
        {"mended": "0.9.1"},
        {"mended": "0.27.0", "partly": {"0.26.0": "a half"}},
        {"mended": "0.25.1", "partly": {"0.24.0": "a half"}},
        {"partly": {"0.26.1": "a half"}},
        {},
    ]
    named = {str(number): each for number, each in enumerate(facts)}
    assert [errata.mended_by(named, r) for r in ("0.22.0", "0.26.0", "0.33.0")] == [
        (1, 0),
        (2, 1),
        (3, 1),
    ]


def test_a_release_leaves_what_it_does_not_mend_whole() -> None:
    named: dict[str, dict[str, Any]] = {
        "earlier": {"word": "a", "mended": "0.24.0"},
        "later": {"word": "b", "mended": "0.27.0"},
        "in part": {"word": "c", "partly": {"0.24.0": "a half"}},
        "nowhere": {"word": "d"},
        "not by the overlay": {"word": None},
    }
    assert errata.left_by(named, "0.26.0") == ["later", "in part", "nowhere"]


def test_readme_counts_the_errata() -> None:
    text = (REPO / "README.md").read_text()
    rows = re.findall(r"errata\.md#([\w-]+)\).* \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    shown = {anchor: (int(mended), int(left)) for anchor, mended, left in rows}
    counts = dict.fromkeys(errata.SEVERITIES, (0, 0))
    for entry in FACTS["errata"].values():
        mended, left = counts[entry["severity"][0]]
        is_mended = entry["word"] is not None
        counts[entry["severity"][0]] = mended + is_mended, left + (not is_mended)
    anchors = {
        severity: title.lower().replace(" ", "-") for severity, title in errata.SEVERITIES.items()
    }
    assert shown == {anchors[severity]: count for severity, count in counts.items()}, "README.md"
