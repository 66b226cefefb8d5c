"""A real headless Chromium, and what it says of a page."""

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
    """A page, and everything about it that should not be.

    Attributes:
        complaints: console messages, errors, and requests that left the page.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)


@contextmanager
def browser() -> Iterator[Browser]:
    """The Chromium that ``scripts/environment test`` has found."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium.ensure(), args=list(chromium.FLAGS)
        )
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(
    started: Browser,
    file: Path,
    size: tuple[int, int] = DESKTOP,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[Opened]:
    """Open a file at a size, in a colour scheme."""
    width, height = size
    context = started.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        found = Opened(context.new_page())
        address = file.as_uri()

        def route(asked: Route) -> None:
            if asked.request.url == address:
                asked.continue_()
            else:
                found.complaints.append(f"request: {asked.request.url}")
                asked.abort()

        found.page.route("**/*", route)
        found.page.on("console", lambda said: found.complaints.append(f"console: {said.text}"))
        found.page.on("pageerror", lambda error: found.complaints.append(f"error: {error}"))
        found.page.on("dialog", lambda dialog: dialog.dismiss())
        found.page.on("dialog", lambda dialog: found.complaints.append(f"dialog: {dialog.message}"))
        found.page.goto(address)
        yield found
    finally:
        context.close()


Show = Callable[[Path, tuple[int, int], Literal["light", "dark"]], Opened]


@contextmanager
def opening(started: Browser) -> Iterator[Show]:
    """Opens files; at the end, nothing may have been amiss with any of them."""
    pages: list[Opened] = []
    with ExitStack() as stack:

        def show(file: Path, size: tuple[int, int], scheme: Literal["light", "dark"]) -> Opened:
            pages.append(stack.enter_context(opened(started, file, size, scheme)))
            return pages[-1]

        yield show
        complaints = [each for page in pages for each in page.complaints]
    assert complaints == []
