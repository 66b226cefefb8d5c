"""What makes the classes with our seams, derives from them, and replaces them."""

from pathlib import Path

import pytest
from review import review
from support import series
from support.classes import BASE, CHANGED, UNCHANGED
from support.reviews import release, reviewed


@pytest.mark.parametrize("name", CHANGED)
def test_a_seam_that_does_not_run_any_more_is_noticed(name: str, tmp_path: Path) -> None:
    texts, expected = CHANGED[name]
    result = reviewed(tmp_path, release(texts), series.upstream(BASE))
    assert expected in [each.name for each in result.changes]
    assert result.verdict == review.CHANGED
    report = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text().replace("\\", "")
    assert expected.rpartition(".")[2] in report


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_change_that_does_not_concern_a_seam_is_not(name: str, tmp_path: Path) -> None:
    result = reviewed(tmp_path, release(UNCHANGED[name]), series.upstream(BASE))
    assert (result.verdict, result.changes) == (review.UNCHANGED, [])
    report = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()
    assert f"**{review.UNCHANGED}; tried: not run: it was not asked for.**" in report
