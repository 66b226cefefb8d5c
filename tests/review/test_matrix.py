"""Several releases in one table: what its cells say, where they lead, and how it ends."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit, OverlayError
from playwright.sync_api import Browser, Page
from review import __main__ as program
from review import definitions, matrix, review, wheels
from review.selecting import OTHER
from review.wheels import Release
from support import series, worded
from support.browser import DESKTOP, PHONE, browser, opening
from support.reviews import HOSTILE

RELEASES: dict[str, Callable[[str], Release]] = {
    "0.23.0": worded.release,
    "0.23.1": lambda version: worded.release(version, *worded.TAKEN_OVER),
    "0.24.0": lambda version: worded.release(version, *worded.CONFLICT),
    "0.25.0": lambda version: worded.release(version, *worded.CHANGED),
}


@dataclass
class Made:
    """A matrix that the program has made.

    Attributes:
        folder: where it is.
        code: the program's exit code.
        json: the contents of matrix.json.
        printed: what went to standard output, and to standard error.
        inferred: how often the names that our modules use were inferred.
        parsed: how often a file was parsed that all releases have alike.
    """

    folder: Path
    code: int
    json: dict[str, Any]
    printed: tuple[str, str]
    inferred: int
    parsed: int

    def cells(self, word: str) -> dict[str, tuple[str | None, list[str]]]:
        """By release, the verdict on a word and the models on which it is dead."""
        (row,) = [row for row in self.json["words"] if row["name"] == word]
        return {cell["release"]: (cell["verdict"], cell["dead"]) for cell in row["cells"]}


def make(
    root: Path, wanted: str, releases: dict[str, Callable[[str], Release]], *flags: str
) -> Made:
    """Run the program on these releases."""
    out, checkout = root / "out", root / "checkout"
    if not checkout.exists():
        worded.checkout(checkout)
    base = worded.upstream()
    calls: Counter[str] = Counter()
    infer, parse = review.uses_of, definitions.Module

    def uses_of(*arguments: Any) -> Any:
        calls["inferred"] += 1
        return infer(*arguments)

    def module(path: str, data: bytes) -> definitions.Module:
        calls[path] += 1
        return parse(path, data)

    def obtain(version: str, _: str | None, kept: Path, __: object) -> Release:
        assert kept == out / "wheels"
        return releases[version](version)

    printed = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(printed[0]),
        redirect_stderr(printed[1]),
    ):
        patch.setattr(program, "ROOT", checkout)
        patch.setattr(program, "_base", lambda *_: base)
        patch.setattr(wheels, "obtain", obtain)
        patch.setattr(review, "uses_of", uses_of)
        patch.setattr(definitions, "Module", module)
        patch.setattr(review, "of_release", partial(review.of_release, mends=worded.MENDS))
        code = program.main(["matrix", wanted, "--out", str(out), *flags])
    file = out / matrix.JSON
    result = json.loads(file.read_text()) if file.exists() else {}
    texts = printed[0].getvalue(), printed[1].getvalue()
    return Made(out, code, result, texts, calls["inferred"], calls[series.OTHER])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The matrix of :data:`RELEASES`."""
    return make(tmp_path_factory.mktemp("matrix"), ",".join(RELEASES), RELEASES)


def failing(error: BaseException) -> Callable[[str], Release]:
    """In place of a release, what happens when it is asked for."""

    def fail(_: str) -> Release:
        raise error

    return fail


GONE = OverlayError(Exit.ABSENT, f"nobody has a wheel {HOSTILE}", next_step="name another")
FAILURES: dict[str, Callable[[str], Release]] = {
    "0.23.0": worded.release,
    "0.24.0": failing(GONE),
    "0.25.0": failing(OverlayError(Exit.RELEASE, "is not proven", next_step="give SHA256")),
    "0.26.0": failing(RuntimeError("a fault\nof ours")),
    "0.27.0": failing(OSError(28, "No space left on device", "/x")),
    "0.28.0": worded.release,
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The matrix of releases of which most cannot be reviewed."""
    return make(tmp_path_factory.mktemp("broken"), ",".join(FAILURES), FAILURES)


def test_each_cell_is_the_verdict_of_the_review(made: Made) -> None:
    two = ["TwoForCausalLM"]
    assert made.cells("alpha") == {
        "0.23.0": ("holds", []),
        "0.23.1": ("holds", two),
        "0.24.0": ("cannot hold", []),
        "0.25.0": ("needs eyes", []),
    }
    assert made.cells("beta")["0.24.0"] == ("droppable", [])
    assert [row["group"] for row in made.json["words"]] == ["features", "fixes", "fixes", "frame"]
    for each in made.json["releases"]:
        single = json.loads((made.folder / each["version"] / review.JSON).read_text())
        assert each["verdict"] == single["verdict"]
        assert each["code"] == review.CODES[single["verdict"]]
        assert each["warnings"] == len(single["warnings"])
        for word in single["words"]:
            assert made.cells(word["name"])[each["version"]] == (word["verdict"], word["dead"])


def test_the_first_rows_say_verdict_runner_and_conflicts(made: Made) -> None:
    facts = [(e["verdict"], e["conflicts"]) for e in made.json["releases"]]
    assert facts == [("unchanged", 0), ("needs eyes", 0), ("conflicts", 1), ("needs eyes", 0)]
    runners = made.json["releases"][1]["runners"]
    assert runners["v2"] == ["OneForCausalLM", "TwoForCausalLM"]
    rows = [line.strip("| ").split(" | ") for line in text(made).splitlines() if line[:1] == "|"]
    assert rows[2][0] == "verdict"
    assert rows[3] == [
        "model runner",
        "V1; V2 for One",
        "V1; V2 for One, Two",
        *["V1; V2 for One"] * 2,
    ]
    assert rows[4] == ["patches that conflict", "0", "0", "1", "0"]
    assert [row[0] for row in rows[6:]] == [
        *("**Features**", "alpha", "**Fixes**", "beta", "gamma", "**What all share**", "frame"),
    ]


def test_it_says_how_far_one_can_move_and_what_is_lost_where(made: Made) -> None:
    assert made.json["newest"] == "0.25.0"
    first = {row["name"]: row["first"] for row in made.json["words"]}
    dead = {"release": "0.23.1", "state": "dead"}
    assert first == {
        "alpha": dead, "beta": dead, "gamma": dead,
        "frame": {"release": "0.25.0", "state": "needs eyes"},
    }  # fmt: skip
    cannot = {row["name"]: row["cannot"] for row in made.json["words"]}
    assert cannot == {"alpha": "0.24.0", "beta": None, "gamma": None, "frame": None}
    assert made.json["summary"] == [
        "the newest release without a conflict is 0.25.0",
        "on 0.23.1 these stop holding as they are: dead (3): alpha, beta, gamma",
        "a patch first conflicts on 0.24.0 for alpha",
    ]


def test_what_all_releases_share_is_read_once(made: Made) -> None:
    """It takes longer than all that is left for one release."""
    assert made.inferred == 1
    # The pinned release's file once, and each release's own.
    assert made.parsed <= 1 + len(RELEASES)


def test_a_check_ends_with_the_worst_verdict(tmp_path: Path) -> None:
    assert make(tmp_path, "0.23.0", RELEASES, "--check").code == 0
    assert make(tmp_path, "0.23.0,0.23.1", RELEASES, "--check").code == 10
    assert make(tmp_path, ",".join(RELEASES), RELEASES, "--check").code == 11


def test_the_program_says_where_the_page_is(made: Made) -> None:
    """It has reported, and so it has not failed; see :func:`matrix.code` for a check."""
    assert matrix.code(made.json) == 11
    assert made.code == 0
    printed, complaints = made.printed
    lines = printed.splitlines()
    assert lines[:2] == ["vLLM 0.23.0: unchanged", "vLLM 0.23.1: needs eyes"]
    assert f"  {made.json['summary'][0]}" in lines
    assert lines[-1] == f"page: {made.folder / matrix.PAGE}"
    assert complaints == ""
    assert made.json["command"] == f"make review RELEASES={','.join(RELEASES)}"
    assert sorted(file.name for file in made.folder.iterdir()) == sorted(
        [*RELEASES, matrix.JSON, matrix.MARKDOWN, matrix.PAGE]
    )


@pytest.mark.parametrize(
    ("codes", "worst"),
    [([0, 0], 0), ([0, 10], 10), ([11, 10], 11), ([11, 3], 3), ([1, 4, 10], 4), ([10, 1], 1)],
)
def test_a_failure_is_worse_than_any_verdict(codes: list[int], worst: int) -> None:
    assert matrix.code({"releases": [{"code": code} for code in codes]}) == worst


# Releases that cannot be reviewed


def test_a_column_says_why_there_is_no_review(broken: Made) -> None:
    columns = {each["version"]: each for each in broken.json["releases"]}
    outcomes = {version: (each["outcome"], each["code"]) for version, each in columns.items()}
    assert outcomes == {
        "0.23.0": ("reviewed", 0),
        "0.24.0": ("no wheel", 3),
        "0.25.0": ("refused", 4),
        "0.26.0": ("error", 1),
        "0.27.0": ("refused", 8),
        "0.28.0": ("reviewed", 10),
    }
    assert columns["0.25.0"]["because"] == "is not proven"
    assert columns["0.25.0"]["next"] == "give SHA256"
    assert columns["0.26.0"]["because"] == "RuntimeError: a fault of ours"
    assert "No space left on device" in columns["0.27.0"]["because"]
    assert broken.cells("alpha") == {
        version: ("holds" if columns[version]["url"] else None, []) for version in FAILURES
    }
    assert broken.json["newest"] == "0.28.0"
    assert "not reviewed: 0.24.0 (no wheel), 0.25.0 (refused)" in broken.json["summary"][1]
    assert broken.code == 8
    # A fault of ours can be reported.
    assert "Traceback" in broken.printed[1]
    assert "vLLM 0.26.0: error: RuntimeError: a fault of ours\n" in broken.printed[0]
    assert "0.25.0: is not proven; next: give SHA256\n" in text(broken).replace("\\", "")


def test_releases_of_which_none_can_be_reviewed(tmp_path: Path) -> None:
    made = make(tmp_path, "0.24.0", FAILURES)
    assert (made.code, made.json["newest"], made.json["words"]) == (3, None, [])
    assert made.json["summary"] == ["not reviewed: 0.24.0 (no wheel)"]


def test_an_interrupted_run_says_what_is_done(tmp_path: Path) -> None:
    stopped = {**FAILURES, "0.24.0": failing(KeyboardInterrupt())}
    made = make(tmp_path, "0.23.0,0.24.0", stopped)
    assert made.code == 130
    assert "reviewed until then: 0.23.0; an earlier matrix is unchanged" in made.printed[1]
    assert (made.folder / "0.23.0" / review.JSON).is_file()
    assert not list(made.folder.glob("*matrix*"))


def test_only_json_is_printed_if_that_is_asked_for(tmp_path: Path) -> None:
    made = make(tmp_path, "0.23.0", RELEASES, "--json")
    assert json.loads(made.printed[0]) == made.json
    assert made.printed[1] == "vLLM 0.23.0: unchanged\n"


def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path, "", RELEASES)
    assert made.code == Exit.USAGE
    assert "next" in made.printed[1]
    assert not made.folder.exists()


# Words for runners


@pytest.mark.parametrize(
    ("v1", "v2", "unclear", "words"),
    [
        ([], [OTHER], [], "V2"),
        ([OTHER], [], [], "V1"),
        ([OTHER], ["AForCausalLM", "BForConditionalGeneration"], [], "V1; V2 for A, B"),
        (["AForCausalLM"], [OTHER], [], "V2; V1 for A"),
        ([OTHER], list("ABCDE"), [], "V1; V2 for 5 models"),
        ([OTHER], [], ["A"], "V1; not clear for A"),
        ([], [], ["A", OTHER], "not clear for every model"),
        (
            ["hybrid models"],
            ["dense models", "AForCausalLM (dense)"],
            ["pooling models"],
            "V2 for dense models, A (dense); V1 for hybrid models; not clear for pooling models",
        ),
        ([], ["dense models", *"ABCDE"], [], "V2 for dense models, 5 more"),
    ],
)
def test_the_runner_in_few_words(
    v1: list[str], v2: list[str], unclear: list[str], words: str
) -> None:
    runners = {"v1": v1, "v2": v2, "unclear": unclear}
    assert matrix.runner({"outcome": "reviewed", "runners": runners}) == words


def test_a_runner_that_is_not_known() -> None:
    assert matrix.runner({"outcome": "reviewed", "runners": None}) == "not known"
    assert matrix.runner({"outcome": "refused", "runners": None}) == ""


# Markdown


def text(made: Made) -> str:
    return (made.folder / matrix.MARKDOWN).read_text()


def test_cells_of_the_markdown_are_links_as_long_as_it_fits_a_comment(made: Made) -> None:
    assert "| alpha | [holds](0.23.0/review.html#word-alpha) | " in text(made)
    assert "[holds](0.23.1/review.html#word-alpha); dead on Two" in text(made)
    longer = {**made.json, "words": made.json["words"] * 150}
    short = matrix.report(longer)
    assert "#word-alpha" not in short
    assert "| alpha | holds | holds; dead on Two | cannot hold | needs eyes |" in short


# The page


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    """One Chromium for all tests."""
    with browser() as chromium:
        yield chromium


@pytest.fixture
def show(started: Browser) -> Iterator[Callable[..., Page]]:
    """Open the page of a matrix; it may log nothing, and load nothing."""
    with opening(started) as opened:

        def showing(made: Made, size: tuple[int, int] = DESKTOP) -> Page:
            return opened(made.folder / matrix.PAGE, size, "light").page

        yield showing


def test_every_cell_leads_to_its_reason(made: Made, show: Callable[..., Page]) -> None:
    links = show(made).eval_on_selector_all(
        "#matrix a", "all => all.map(e => [e.getAttribute('href'), e.textContent])"
    )
    assert ["0.24.0/review.html#word-alpha", "cannot hold"] in links
    assert len(links) == (1 + 1 + len(made.json["words"])) * len(RELEASES)
    for address, _ in links:
        file, _, anchor = address.partition("#")
        target = (made.folder / file).read_text()
        assert not anchor or target.count(f'id="{anchor}"') == 1


def test_the_keyboard_stops_at_the_releases_and_not_at_each_cell(
    made: Made, show: Callable[..., Page]
) -> None:
    shown = show(made)
    stops = []
    for _ in range(20):
        shown.keyboard.press("Tab")
        stop = shown.evaluate("document.activeElement.textContent.trim().split('\\n')[0]")
        if stop in stops or shown.evaluate("document.activeElement === document.body"):
            break
        stops.append(stop)
    assert stops == ["To the table", "vLLM", *RELEASES]
    shown.reload()
    shown.keyboard.press("Tab")
    shown.keyboard.press("Enter")
    assert shown.evaluate("location.hash") == "#matrix"


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=str)
def test_the_table_scrolls_in_a_box_and_the_words_stay(
    size: tuple[int, int], broken: Made, show: Callable[..., Page]
) -> None:
    """Also where the reason of a refusal is hostile."""
    shown = show(broken, size)
    assert shown.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert shown.locator("script, img").count() == 0
    box = shown.locator("#matrix")
    wider = box.evaluate("e => { e.scrollLeft = 9999; return e.scrollWidth - e.clientWidth; }")
    assert wider > 0 or size == DESKTOP
    place = shown.get_by_role("rowheader", name="alpha").bounding_box()
    around = box.bounding_box()
    assert place is not None
    assert around is not None
    assert abs(place["x"] - around["x"]) <= 2
    assert place["width"] < size[0] / 2


def test_a_release_without_a_review_leads_to_why(broken: Made, show: Callable[..., Page]) -> None:
    shown = show(broken)
    for version, outcome in (("0.24.0", "no wheel, exit code 3"), ("0.26.0", "error, exit code 1")):
        assert shown.get_by_role("cell", name=outcome).count() == 1
        shown.get_by_role("link", name=version).click()
        target = shown.locator(":target")
        assert re.match(rf"{version}: ", target.inner_text())
    assert "a fault of ours; next: make review RELEASE=0.26.0" in target.inner_text()
