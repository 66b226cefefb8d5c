"""A headless Chromium, and its complaints about a page."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from environment import chromium
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
    """Start the Chromium that ``scripts/environment test`` found."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium.ensure(), args=list(chromium.FLAGS)
        )
        try:
            yield started
        finally:
            started.close()


@contextmanager
def open_page(
    started: Browser,
    file: Path,
    size: tuple[int, int] = DESKTOP,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[Opened]:
    """Open a file at a size, in a colour scheme."""
    width, height = size
    context = started.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        opened = Opened(context.new_page())
        address = file.as_uri()

        def route(request: Route) -> None:
            if request.request.url == address:
                request.continue_()
            else:
                opened.complaints.append(f"request: {request.request.url}")
                request.abort()

        opened.page.route("**/*", route)
        opened.page.on(
            "console", lambda message: opened.complaints.append(f"console: {message.text}")
        )
        opened.page.on("pageerror", lambda error: opened.complaints.append(f"error: {error}"))
        opened.page.on("dialog", lambda dialog: dialog.dismiss())
        opened.page.on(
            "dialog", lambda dialog: opened.complaints.append(f"dialog: {dialog.message}")
        )
        opened.page.goto(address)
        yield opened
    finally:
        context.close()


Show = Callable[[Path, tuple[int, int], Literal["light", "dark"]], Opened]


@contextmanager
def opening(started: Browser) -> Iterator[Show]:
    """Yield a function that opens files; none of them may have complaints in the end."""
    pages: list[Opened] = []
    with ExitStack() as stack:

        def show(file: Path, size: tuple[int, int], scheme: Literal["light", "dark"]) -> Opened:
            pages.append(stack.enter_context(open_page(started, file, size, scheme)))
            return pages[-1]

        yield show
        complaints = [each for page in pages for each in page.complaints]
    assert complaints == []
