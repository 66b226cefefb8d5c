"""The state of each feature and fix on a release, with the real patches and modules."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import overlay.words
import pytest
from review import merging, words
from review.merging import JudgedPatch
from review.words import Word
from support.releases import pinned
from support.sites import OVERLAY

registry = overlay.words.registry(OVERLAY)
EARLIER, SINCE, AFTER = "0.23.0", "0.24.0", "0.99.0"
FIX = "cpu-seeds"


@cache
def patches() -> list[JudgedPatch]:
    """All patches on their own release, where each applies."""
    return merging.merge(OVERLAY.series, pinned(), pinned()).patches


def number(name: str) -> str:
    """The number of the patch whose name holds a text."""
    (patch,) = [p.name for p in OVERLAY.series.patches if name in p.name]
    return patch[:4]


def judged_as(verdict: str, name: str) -> list[JudgedPatch]:
    wanted = number(name)
    return [replace(each, verdict=verdict) if each.number == wanted else each for each in patches()]


def states(
    judged: list[JudgedPatch] | None = None,
    release: str = EARLIER,
    without_v1: bool = False,
    errata: Sequence[dict[str, Any]] = (),
) -> dict[str, Word]:
    listed = {f"e{n}": {"word": FIX, **facts} for n, facts in enumerate(errata)}
    facts = {"errata": listed}
    found = words.judge(OVERLAY, judged or patches(), facts, release, without_v1)
    return {word.name: word for word in found}


def unlike(found: dict[str, Word], state: str = words.LIVES) -> set[str]:
    return {name for name, word in found.items() if word.state != state}


def test_on_its_own_release_every_word_lives() -> None:
    found = states()
    assert found.keys() == registry.ALL
    assert unlike(found) == set()
    assert words.switch(found.values()) == ""
    assert {name for name, word in found.items() if word.on_v2} == registry.ON_V2


def test_a_conflict_takes_its_words_alone() -> None:
    found = states(judged_as("conflicts", "copy-logits-only"))
    assert unlike(found) == {"sampler-copies"}
    word = found["sampler-copies"]
    because = (f"{number('copy-logits-only')} conflicts",)
    assert (word.state, word.because) == (words.CONFLICT, because)
    assert words.switch(found.values()) == "-sampler-copies"
    assert unlike(states(judged_as("conflicts", "environment-variables"))) == set()


def test_what_builds_on_a_word_goes_with_it() -> None:
    found = states(judged_as("conflicts", "settle-sampled"))
    assert {"history", "penalties", "bad-words", "thinking-budget"} <= unlike(found)
    assert "needs history" in found["penalties"].because


def test_an_obsolete_patch_takes_its_word() -> None:
    found = states(judged_as("obsolete", "drop-block-ids"))
    assert unlike(found) == {"block-ids"}
    assert found["block-ids"].state == words.LOST


def test_without_model_runner_v1_its_words_are_gone() -> None:
    found = states(without_v1=True)
    assert unlike(found) == registry.ALL - registry.ON_V2
    assert {found[name].state for name in unlike(found)} == {words.LOST}


@pytest.mark.parametrize(
    ("errata", "release", "todo"),
    [
        ([{"mended": SINCE}], EARLIER, ""),
        ([{"mended": SINCE}], SINCE, "is mended (since 0.24.0): drop"),
        ([{"mended": SINCE}], AFTER, "is mended (since 0.24.0): drop"),
        ([{"mended": SINCE}], "0.24.0rc1", ""),
        ([{"mended": SINCE}], "0.24.0+cpu", "is mended (since 0.24.0): drop"),
        ([{}], AFTER, ""),
        ([{"mended": "0.30.0", "partly": {SINCE: "x"}}], SINCE, "in part (x since 0.24.0)"),
        ([{"mended": SINCE}, {"mended": "0.25.0"}], SINCE, "in part (e0 since 0.24.0)"),
        ([{"mended": SINCE}, {"mended": "0.25.0"}], "0.25.0", "is mended (since 0.25.0)"),
        ([{"mended": SINCE}, {}], AFTER, "in part (e0 since 0.24.0)"),
    ],
)
def test_what_a_release_has_of_a_fix(errata: list[dict[str, Any]], release: str, todo: str) -> None:
    found = states(release=release, errata=errata)[FIX]
    assert (found.state == words.MENDED) is ("drop" in found.todo)
    assert todo in found.todo
    assert bool(todo) == bool(found.todo)


@pytest.mark.parametrize("verdict", ["applies", "conflicts", "obsolete"])
def test_a_fix_that_the_release_has_goes_with_its_patch(verdict: str) -> None:
    judged = judged_as(verdict, "let-each-seed-count")
    found = states(judged, SINCE, errata=[{"mended": SINCE}])
    assert unlike(found) == {FIX}
    assert found[FIX].because == ("the release has it since 0.24.0",)
    assert found[FIX].todo.partition(": drop ")[2].endswith(number("let-each-seed-count"))
    assert words.switch(found.values()) == ""


def test_a_patch_that_another_fix_needs_stays() -> None:
    header = "Serves: cpu-seeds, mamba-blocks\n"
    (own,) = [p for p in patches() if p.number == number("let-each-seed-count")]
    shared = replace(own, patch=replace(own.patch, header=header))
    assert "drop its word" in states([shared], SINCE, errata=[{"mended": SINCE}])[FIX].todo
