"""Which fixes a release has, beside what the merge says of their patches."""

import pytest
from review import mends
from review.mends import READ, Found, Mend
from review.merging import JudgedPatch
from support import series

EARLIER, SINCE, AFTER = "0.23.0", "0.24.0", "0.99.0"
OWN = ("0001-edit-1.patch",)


def judge(mend: Mend, release: str, verdict: str = "applies", **others: Mend) -> Found:
    patches = [
        JudgedPatch(patch, verdict if number == 1 else "applies", "", ())
        for number, patch in enumerate(series.series().patches, 1)
    ]
    return mends.judge({"word": mend, **others}, release, patches)["word"]


@pytest.mark.parametrize(
    ("mend", "release", "state", "because"),
    [
        (Mend(since=SINCE), EARLIER, "not mended", "0.24.0 has it"),
        (Mend(since=SINCE), SINCE, "mended", "since 0.24.0"),
        (Mend(since=SINCE), "0.24.0rc1", "not mended", "0.24.0 has it"),
        (Mend(since=SINCE), "0.24.0+cpu", "mended", "since 0.24.0"),
        (Mend(), READ, "not mended", f"no release up to {READ} has it"),
        (Mend(), AFTER, "not known", f"{READ} is the newest release that was read"),
        (
            Mend(since="0.30.0", partly={SINCE: "moves"}),
            SINCE,
            "mended in part",
            "moves since 0.24.0; 0.30.0 has the rest",
        ),
    ],
)
def test_what_a_release_has(mend: Mend, release: str, state: str, because: str) -> None:
    found = judge(mend, release)
    assert (found.state, found.because) == (state, because)
    assert found.decide is (state != "not mended")


@pytest.mark.parametrize("verdict", ["applies", "conflicts", "obsolete"])
def test_a_fix_that_is_mended_goes_with_its_patch(verdict: str) -> None:
    assert judge(Mend(since=SINCE, patches=OWN), SINCE, verdict).todo == "drop it; drop 0001"


def test_a_patch_that_another_fix_needs_stays() -> None:
    other = Mend(patches=OWN)
    found = judge(Mend(since=SINCE, patches=OWN), SINCE, other=other)
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
    found = judge(Mend(patches=OWN), READ, verdict)
    assert (found.todo, found.decide) == (todo, decide)
