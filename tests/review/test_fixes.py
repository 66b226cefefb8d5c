"""Which fixes a release has, beside what the merge says of their patches."""

from typing import Any

import pytest
from review import fixes
from review.fixes import MENDS, READ, Mend
from review.merging import JudgedPatch
from support import series
from support.sites import OVERLAY
from vllm.v1.readiness import registry

EARLIER, SINCE, AFTER = "0.23.0", "0.24.0", "0.99.0"
SLUG = "edit-1"


def judged(**verdicts: str) -> list[JudgedPatch]:
    """The patches of the small series with these verdicts, by the name of each edit."""
    return [
        JudgedPatch(patch, verdicts.get(patch.name[5:11].replace("-", "_"), "applies"), "", ())
        for patch in series.series().patches
    ]


def judge(mend: Mend, release: str, verdict: str = "applies") -> dict[str, Any]:
    (entry,) = fixes.judge({"word": mend}, release, judged(edit_1=verdict))
    return entry


@pytest.mark.parametrize(
    ("mend", "release", "has", "because"),
    [
        (Mend(since=SINCE), EARLIER, "not mended", "0.24.0 has it"),
        (Mend(since=SINCE), SINCE, "mended", "since 0.24.0"),
        (Mend(since=SINCE), "0.24.0rc1", "not mended", "0.24.0 has it"),
        (Mend(since=SINCE), "0.24.0+cpu", "mended", "since 0.24.0"),
        (Mend(since=SINCE), AFTER, "mended", "since 0.24.0"),
        (Mend(), EARLIER, "not mended", f"no release up to {READ} has it"),
        (Mend(), READ, "not mended", f"no release up to {READ} has it"),
        (Mend(), AFTER, "not known", f"{READ} is the newest release that was read"),
        (
            Mend(since="0.30.0", partly={SINCE: "moves"}),
            SINCE,
            "mended in part",
            "moves since 0.24.0; 0.30.0 has the rest",
        ),
        (
            Mend(partly={SINCE: "moves", "0.30.0": "swaps"}),
            SINCE,
            "mended in part",
            f"moves since 0.24.0; no release up to {READ} has the rest",
        ),
        (
            Mend(partly={SINCE: "moves"}),
            AFTER,
            "not known",
            f"{READ} is the newest release that was read; moves since 0.24.0",
        ),
    ],
)
def test_a_release_has_a_fix_or_not(mend: Mend, release: str, has: str, because: str) -> None:
    entry = judge(mend, release)
    assert (entry["has"], entry["because"]) == (has, because)


@pytest.mark.parametrize(
    ("release", "verdict", "todo", "look"),
    [
        (SINCE, "obsolete", "drop it; drop 0001", True),
        (
            *(SINCE, "applies"),
            "drop it; drop 0001, though it applies: upstream mended it elsewhere",
            True,
        ),
        (
            SINCE,
            "moved",
            "drop it; drop 0001, though it applies: upstream mended it elsewhere",
            True,
        ),
        (SINCE, "conflicts", "drop it; drop 0001 rather than resolve it", True),
        (EARLIER, "applies", "keep it", False),
        (EARLIER, "moved", "keep it", False),
        (EARLIER, "conflicts", "keep it, and resolve 0001", False),
        (EARLIER, "obsolete", "read the release: 0001 is obsolete, and no mend is known", True),
    ],
)
def test_the_two_facts_together_say_what_to_do(
    release: str, verdict: str, todo: str, look: bool
) -> None:
    entry = judge(Mend(since=SINCE, patches=(SLUG,)), release, verdict)
    assert entry["patches"] == [{"name": "0001-edit-1.patch", "verdict": verdict}]
    assert (entry["todo"], entry["look"]) == (todo, look)
    assert list(fixes.warnings([entry])) == (
        [f"the fix word is {entry['has']} ({entry['because']}): {todo}"] if look else []
    )


def test_a_patch_that_another_fix_needs_stays() -> None:
    mends = {
        "old": Mend(since=SINCE, patches=(SLUG,)),
        "older": Mend(since=EARLIER, patches=(SLUG, "edit-2")),
        "open": Mend(patches=(SLUG,)),
    }
    old, older, still = fixes.judge(mends, SINCE, judged(edit_2="obsolete"))
    assert old["todo"] == "drop it; keep 0001 for open"
    assert older["todo"] == "drop it; keep 0001 for open; drop 0002"
    assert still["todo"] == "keep it"


@pytest.mark.parametrize("slugs", [(), ("dropped-already",)])
def test_a_fix_without_a_patch_can_go_too(slugs: tuple[str, ...]) -> None:
    entry = judge(Mend(since=SINCE, patches=slugs), SINCE)
    assert entry["todo"] == "drop it; no patch is its own"
    assert entry["patches"] == []


# The table.


def test_every_fix_has_its_entry() -> None:
    assert MENDS.keys() == registry.FIXES.keys()


def test_every_patch_of_a_fix_is_in_the_series() -> None:
    titles = {
        patch.name.partition("-")[2].removesuffix(".patch") for patch in OVERLAY.series.patches
    }
    for name, mend in MENDS.items():
        assert set(mend.patches) <= titles, name
