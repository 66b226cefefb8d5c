"""A headless Chromium, and its complaints about a page."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from environment import programs
from playwright.sync_api import Browser, Page, Route, sync_playwright

DESKTOP = (1280, 900)
PHONE = (390, 844)


@dataclass
class Opened:
    """An open page.

    Attributes:
        page: Playwright's page.
        complaints: console messages, errors, dialogs, and requests that left the page.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start the Chromium of the tests; without one the test is skipped, and counted at the end.

    A Chromium that ``$CHROMIUM`` names and that does not start is an error.
    """
    if (program := programs.CHROMIUM.find()) is None:
        pytest.skip(programs.CHROMIUM.lacking)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=list(programs.FLAGS))
        try:
            yield started
        finally:
            started.close()


Show = Callable[[Path, tuple[int, int], Literal["light", "dark"]], Opened]


@contextmanager
def opening(started: Browser) -> Iterator[Show]:
    """Yield a function that opens a file at a size, in a colour scheme.

    None of the pages may have complaints in the end.
    """
    pages: list[Opened] = []

    def show(file: Path, size: tuple[int, int], scheme: Literal["light", "dark"]) -> Opened:
        width, height = size
        context = started.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        stack.callback(context.close)
        opened = Opened(context.new_page())
        pages.append(opened)
        complain = opened.complaints.append
        address = file.as_uri()

        def route(request: Route) -> None:
            if request.request.url == address:
                request.continue_()
            else:
                complain(f"request: {request.request.url}")
                request.abort()

        opened.page.route("**/*", route)
        opened.page.on("console", lambda message: complain(f"console: {message.text}"))
        opened.page.on("pageerror", lambda error: complain(f"error: {error}"))
        opened.page.on("dialog", lambda dialog: dialog.dismiss())
        opened.page.on("dialog", lambda dialog: complain(f"dialog: {dialog.message}"))
        opened.page.goto(address)
        return opened

    with ExitStack() as stack:
        yield show
    assert [complaint for page in pages for complaint in page.complaints] == []
