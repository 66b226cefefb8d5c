"""A browser for the pages of reviews."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from review import markdown, page
from review.markdown import FileTexts
from support import reviews
from support.browser import DESKTOP, browser, opening


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    """One Chromium for all tests."""
    with browser() as chromium:
        yield chromium


@pytest.fixture
def show(started: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open the page of a review; no page may log a message, fail, or load anything."""
    files = (tmp_path / f"page-{number}.html" for number in count())

    def showing(
        review: dict[str, Any],
        texts: dict[str, FileTexts] | None = None,
        size: tuple[int, int] = DESKTOP,
    ) -> Page:
        file = next(files)
        document = markdown.document(review, reviews.texts() if texts is None else texts)
        file.write_text(page.render(markdown.title(review), document), encoding="utf-8")
        return open_file(file, size, "light").page

    with opening(started) as open_file:
        yield showing
