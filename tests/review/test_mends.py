"""Which fixes a release has, beside what the merge says of their patches."""

from typing import Any

import pytest
from overlay.patches import parse
from review import words
from review.merging import JudgedPatch
from review.words import Found
from support import series

EARLIER, SINCE, READ, AFTER = "0.23.0", "0.24.0", "0.33.0", "0.99.0"
MENDED = {"mended": SINCE}


def judge(
    erratum: dict[str, Any],
    release: str,
    verdict: str = "applies",
    serves: str = "fix",
    **others: dict[str, Any],
) -> Found:
    """Judge a fix with one patch of its own, which others may share, and that patch's verdict."""
    files = series.patch_files(serves=(serves, "another", "another"))
    patches = [
        JudgedPatch(parse(name, data), verdict if name[:4] == "0001" else "applies", "", ())
        for name, data in files.items()
    ]
    errata = {
        name: {"word": name, "upstream": ["text"], **facts}
        for name, facts in {"fix": erratum, **others}.items()
    }
    return words.mends({"read": READ, "errata": errata}, release, patches)["fix"]


@pytest.mark.parametrize(
    ("erratum", "release", "state", "because"),
    [
        (MENDED, EARLIER, "not mended", "0.24.0 has it"),
        (MENDED, SINCE, "mended", "since 0.24.0"),
        (MENDED, "0.24.0rc1", "not mended", "0.24.0 has it"),
        (MENDED, "0.24.0+cpu", "mended", "since 0.24.0"),
        ({}, READ, "not mended", f"no release up to {READ} has it"),
        ({}, AFTER, "not known", f"{READ} is the newest release that was read"),
        (
            {"mended": "0.30.0", "partly": {SINCE: "moves"}},
            *(SINCE, "mended in part", "moves since 0.24.0; 0.30.0 has the rest"),
        ),
    ],
)
def test_what_a_release_has(
    erratum: dict[str, Any], release: str, state: str, because: str
) -> None:
    found = judge(erratum, release)
    assert (found.state, found.because) == (state, because)
    assert found.decide is (state != "not mended")


def test_a_fix_of_two_errata_is_mended_with_the_later_one() -> None:
    """Until then it is mended in part."""
    later = {"word": "fix", "mended": "0.25.0"}
    assert judge(MENDED, SINCE, later=later).because == "fix since 0.24.0; 0.25.0 has the rest"
    assert judge(MENDED, "0.25.0", later=later).because == "since 0.25.0"


@pytest.mark.parametrize("verdict", ["applies", "conflicts", "obsolete"])
def test_a_fix_that_is_mended_goes_with_its_patch(verdict: str) -> None:
    assert judge(MENDED, SINCE, verdict).todo == "drop it; drop 0001"


def test_a_patch_that_another_fix_needs_stays() -> None:
    found = judge(MENDED, SINCE, serves="fix, other", other={})
    assert found.todo == "drop it; keep 0001 for other"


@pytest.mark.parametrize(
    ("verdict", "todo", "decide"),
    [
        ("applies", "keep it", False),
        ("conflicts", "keep it, and resolve 0001", False),
        ("obsolete", "read the release: 0001 is obsolete, no mend is known", True),
    ],
)
def test_what_to_do_about_a_fix_that_is_not(verdict: str, todo: str, decide: bool) -> None:
    found = judge({}, READ, verdict)
    assert (found.todo, found.decide) == (todo, decide)
