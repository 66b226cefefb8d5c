"""What makes the classes with our seams, derives from them, and replaces them."""

from pathlib import Path

import pytest
from review import review
from review.review import Review
from review.wheels import Release
from support import series
from support.classes import BASE, CHANGED, UNCHANGED


def reviewed(texts: dict[str, str], root: Path) -> Review:
    overlay = series.checkout(root / "checkout")
    release = Release("0.23.0", "w.whl", "a" * 64, "a test's", series.upstream(texts))
    return review.of_release(overlay, series.upstream(BASE), release, root / "out", known={})


@pytest.mark.parametrize("name", CHANGED)
def test_a_seam_that_does_not_run_any_more_is_noticed(name: str, tmp_path: Path) -> None:
    texts, expected = CHANGED[name]
    result = reviewed(texts, tmp_path)
    assert expected in [each.name for each in result.changes]
    assert result.verdict == review.CHANGED
    report = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text().replace("\\", "")
    assert expected.rpartition(".")[2] in report


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_change_that_does_not_concern_a_seam_is_not(name: str, tmp_path: Path) -> None:
    result = reviewed(UNCHANGED[name], tmp_path)
    assert (result.verdict, result.changes) == (review.UNCHANGED, [])
    report = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()
    assert f"**{review.UNCHANGED}; tried: not run: it was not asked for.**" in report
