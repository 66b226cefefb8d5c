"""Whole reviews: each change of upstream's that may concern us needs eyes, and is shown once."""

import html
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import OverlayError
from review import review
from review.wheels import Release
from support import series
from support.series import BASE, OTHER, PATH, RUNNER, replaced

NOTES = Path("vendor_overlay/vllm/v1/readiness/notes.py")
#: A file that no patch changes.
LIBRARY = {**BASE, OTHER: "def helper(rows):\n    return rows\n\n\nWIDTH = 3\n"}


def reviewed(root: Path, files: dict[str, str], mirrors: str = "nothing") -> dict[str, Any]:
    overlay = series.checkout(root / "checkout")
    notes = root / "checkout" / NOTES
    notes.write_text(f"{notes.read_text()}\n\n# mirrors: {mirrors}\n")
    release = Release("0.23.0", "vllm-0.23.0.whl", "a" * 64, "a test's", series.upstream(files))
    return review.of_release(overlay, series.upstream(LIBRARY), release, root / "reviews", mends={})


def shown(result: dict[str, Any]) -> dict[str, str]:
    """The section that shows the diff of each changed definition, which only one does."""
    sections = {
        name["name"].removeprefix("vllm.v1."): "names"
        for name in result["names"]
        if name["fate"] != "same"
    }
    for key in ("mirrors", "callees", "patched"):
        for found in result[key]:
            if not found["elsewhere"]:
                what = found["what"].removeprefix("vllm.v1.")
                assert what not in sections
                assert found["diff"]
                sections[what] = key
    return sections


def runner(*edits: tuple[str, str]) -> dict[str, str]:
    return {**LIBRARY, PATH: replaced(RUNNER, *edits)}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(files, expected, id=name)
        for name, files, expected in (
            ("what a seam is in", runner(("prepare(logits)", "prepare(logits + [])")),
             {"runner.Runner.sample": "names"}),
            ("what a seam calls", runner(("return None", "return 1")),
             {"runner.Runner.wait": "callees"}),
            ("a new method", runner(("    def drop", "    def sort(self):\n        self.rows.sort()"
                                     "\n\n    def drop")),
             {"runner.Runner.sort": "patched"}),
            ("a new caller", runner(("self.rows.remove(row)", "self.prepare([row])")),
             {"runner.Runner.drop": "patched"}),
            ("an import", runner(("LIMIT = 8\n", "import vllm.other\n\nLIMIT = 8\n")),
             {"runner.imports": "patched"}),
            ("what is mirrored", {**LIBRARY, OTHER: LIBRARY[OTHER].replace("rows\n", "-rows\n")},
             {"other.helper": "mirrors"}),
        )
    ],
)  # fmt: skip
def test_one_change_is_shown_in_one_section(
    files: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    result = reviewed(tmp_path, files, "vllm.v1.other:helper")
    assert result["verdict"] == "needs eyes"
    assert shown(result) == expected
    (what,) = expected
    if expected[what] != "names":
        assert any(what.rpartition(".")[2] in warning for warning in result["warnings"])
    for file in (review.MARKDOWN, review.PAGE):
        text = (tmp_path / "reviews" / "0.23.0" / file).read_text()
        assert what.rpartition(".")[2] in html.unescape(text)


def test_what_is_used_and_mirrored_has_one_diff_and_both_warnings(tmp_path: Path) -> None:
    files = runner(("return len(self.rows)", "return -len(self.rows)"))
    result = reviewed(tmp_path, files, "vllm.v1.runner:Runner.prepare")
    assert shown(result) == {"runner.Runner.prepare": "names"}
    (found,) = result["mirrors"]
    assert found["elsewhere"] is True
    assert any(warning.startswith("notes re-implements") for warning in result["warnings"])


def test_the_members_of_a_mirrored_class_are_shown_with_it(tmp_path: Path) -> None:
    files = runner(("self.rows.remove(row)", "self.rows.pop(row)"))
    result = reviewed(tmp_path, files, "vllm.v1.runner:Runner")
    assert shown(result) == {"runner.Runner": "mirrors"}
    assert result["mirrors"][0]["detail"] == "Changed in it: drop."


@pytest.mark.parametrize(
    "files",
    [LIBRARY, {**LIBRARY, OTHER: LIBRARY[OTHER].replace("WIDTH = 3", "WIDTH = 4")},
     runner(('"""Holds rows."""', '"""Has rows."""'), ("LIMIT = 8\n", "LIMIT = 8  # rows\n"))],
    ids=["nothing", "a file that we do not use", "comments"],
)  # fmt: skip
def test_what_does_not_concern_us_needs_no_eyes(files: dict[str, str], tmp_path: Path) -> None:
    result = reviewed(tmp_path, files)
    assert (result["verdict"], result["warnings"], shown(result)) == ("unchanged", [], {})


def test_a_mirror_that_the_pinned_release_lacks_refuses_the_review(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match="other:gone is not in the pinned release"):
        reviewed(tmp_path, LIBRARY, "vllm.v1.other:gone")
    assert not (tmp_path / "reviews").exists()
