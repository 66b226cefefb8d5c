"""The state of each feature and fix on a release, with the real patches and modules."""

from dataclasses import replace
from functools import cache

import overlay.words
from review import merging, words
from review.merging import JudgedPatch
from review.words import Found, Word
from support.releases import pinned
from support.sites import OVERLAY

registry = overlay.words.registry(OVERLAY)


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
    mends: dict[str, Found] | None = None,
    without_v1: bool = False,
) -> dict[str, Word]:
    found = words.judge(registry, judged or patches(), mends or {}, without_v1)
    return {word.name: word for word in found}


def unlike(found: dict[str, Word], state: str = words.LIVES) -> set[str]:
    return {name for name, word in found.items() if word.state != state}


def test_on_its_own_release_every_word_lives() -> None:
    found = states()
    assert found.keys() == {*registry.ALL, words.FRAME}
    assert unlike(found) == set()
    assert words.switch(found.values()) == ""
    assert {name for name, word in found.items() if word.on_v2} == {*registry.ON_V2, words.FRAME}


def test_a_conflict_takes_its_words_alone() -> None:
    found = states(judged_as("conflicts", "copy-logits-only"))
    assert unlike(found) == {"sampler-copies"}
    word = found["sampler-copies"]
    assert (word.state, word.because) == (
        words.CONFLICT,
        (f"{number('copy-logits-only')} conflicts",),
    )
    assert words.switch(found.values()) == "-sampler-copies"


def test_what_builds_on_a_word_goes_with_it() -> None:
    found = states(judged_as("conflicts", "settle-sampled"))
    assert {"history", "penalties", "bad-words", "thinking-budget"} <= unlike(found)
    assert "needs history" in found["penalties"].because


def test_a_conflict_in_what_all_share_is_the_frame_s() -> None:
    found = states(judged_as("conflicts", "environment-variables"))
    assert unlike(found) == {words.FRAME}


def test_an_obsolete_patch_takes_its_word() -> None:
    found = states(judged_as("obsolete", "drop-block-ids"))
    assert unlike(found) == {"block-ids"}
    assert found["block-ids"].state == words.LOST


def test_a_fix_that_the_release_has_is_mended_whatever_else() -> None:
    mended = Found("cpu-seeds", words.MENDED, "since 0.24.0", "drop it", True)
    found = states(judged_as("conflicts", "let-each-seed-count"), mends={"cpu-seeds": mended})
    assert unlike(found) == {"cpu-seeds"}
    assert found["cpu-seeds"].because == ("the release has it since 0.24.0",)
    assert words.switch(found.values()) == ""


def test_without_model_runner_v1_its_words_are_gone() -> None:
    found = states(without_v1=True)
    assert unlike(found) == registry.ALL - registry.ON_V2
    assert {found[name].state for name in unlike(found)} == {words.LOST}
