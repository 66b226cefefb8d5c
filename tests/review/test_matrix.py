"""Several releases in one table: its cells, where they lead, and how it ends."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from overlay.errors import Exit, OverlayError
from review import __main__ as program
from review import matrix, review
from review.matrix import Column
from review.wheels import Release
from support import worded
from support.reviews import prepare

RELEASES: dict[str, Callable[[str], Release]] = {
    "0.23.0": worded.release,
    "0.23.1": lambda version: worded.release(version, *worded.TAKEN_OVER),
    "0.24.0": lambda version: worded.release(version, *worded.CONFLICT),
    "0.25.0": lambda version: worded.release(version, *worded.CHANGED),
}


@dataclass
class Made:
    """A matrix that the program has made: its folder, exit code, and table by first cell."""

    folder: Path
    code: int

    @property
    def cells(self) -> dict[str, list[str]]:
        """The cells of each row behind its first; every row has as many."""
        text = (self.folder / matrix.MARKDOWN).read_text()
        found = [re.split(r"(?<!\\) ?\| ?", row)[1:-1] for row in re.findall(r"^\|.*", text, re.M)]
        assert len({len(row) for row in found}) == 1
        return {row[0]: row[1:] for row in found}


def make(
    root: Path, wanted: str, releases: dict[str, Callable[[str], Release]], *flags: str
) -> Made:
    """Run the program on these releases."""
    out, checkout = root / "out", root / "checkout"
    if not checkout.exists():
        worded.checkout(checkout)
    base = worded.upstream()
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch, checkout, base, lambda wanted: releases[wanted](wanted))
        code = program.main(["matrix", wanted, "--out", str(out), *flags])
    return Made(out, code)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The matrix of :data:`RELEASES`."""
    return make(tmp_path_factory.mktemp("matrix"), ",".join(RELEASES), RELEASES)


def failing(error: BaseException) -> Callable[[str], Release]:
    """In place of a release, the error that it raises."""

    def fail(_: str) -> Release:
        raise error

    return fail


FAILURES: dict[str, Callable[[str], Release]] = {
    "0.23.0": worded.release,
    "0.24.0": failing(OverlayError(Exit.ABSENT, "no <wheel>", next_step="name another")),
    "0.26.0": failing(RuntimeError("a fault of ours")),
    "0.27.0": failing(OSError(28, "No space left on device", "/x")),
}


def test_each_cell_is_the_state_of_the_word_and_leads_to_it(made: Made) -> None:
    def state(version: str, word: str, text: str) -> str:
        return f"[{text}]({version}/review.html#word-{word})"

    cells = made.cells
    assert cells["`alpha`"] == [
        f"{state(v, 'alpha', 'conflicts' if v == '0.24.0' else 'lives')} (V1)" for v in RELEASES
    ]
    assert cells["`beta`"] == [
        f"{state(v, 'beta', 'mended' if v >= '0.24.0' else 'lives')} (V1)" for v in RELEASES
    ]
    assert cells["`gamma`"] == [state(v, "gamma", "lives") for v in RELEASES]
    for version in RELEASES:
        page = (made.folder / version / review.PAGE).read_text()
        for word in ("alpha", "beta", "gamma", "frame"):
            assert page.count(f'id="word-{word}"') == 1


def test_the_first_rows_say_verdict_conflicts_and_runner(made: Made) -> None:
    cells = made.cells
    assert cells["**verdict**"] == [
        review.UNCHANGED, review.CHANGED, review.CONFLICT, review.CHANGED
    ]  # fmt: skip
    assert cells["**patches that conflict**"] == ["0", "0", "1", "0"]
    assert cells["**model runner**"] == ["not read yet"] * 4
    text = (made.folder / matrix.MARKDOWN).read_text()
    assert "The newest release without a conflict is 0.25.0" in text.replace("\\", "")
    assert (made.folder / matrix.HTML).is_file()


def test_a_check_ends_with_the_worst_verdict(made: Made, tmp_path: Path) -> None:
    assert made.code == 0  # it was not asked to check
    assert make(tmp_path, "0.23.0", RELEASES, "--check").code == 0
    assert make(tmp_path, "0.23.0,0.23.1", RELEASES, "--check").code == 10
    assert make(tmp_path, ",".join(RELEASES), RELEASES, "--check").code == 11


@pytest.mark.parametrize(
    ("codes", "worst"),
    [([0, 0], 0), ([0, 10], 10), ([11, 10], 11), ([11, 3], 3), ([1, 4, 10], 4), ([10, 1], 1)],
)
def test_a_failure_is_worse_than_any_verdict(codes: list[int], worst: int) -> None:
    assert matrix.worst([Column("1", None, code) for code in codes]) == worst


def test_a_release_that_cannot_be_reviewed_does_not_stop_the_others(tmp_path: Path) -> None:
    made = make(tmp_path, ",".join(FAILURES), FAILURES)
    assert made.code == Exit.DENIED
    verdicts = made.cells["**verdict**"]
    assert verdicts == [
        review.UNCHANGED, *(f"not reviewed, exit code {code}" for code in (3, 1, 8))
    ]  # fmt: skip
    text = (made.folder / matrix.MARKDOWN).read_text().replace("\\", "")
    assert "0.24.0: no <wheel>" in text
    assert "RuntimeError: a fault of ours; next: please report it" in text
    assert "no <wheel>" not in (made.folder / matrix.HTML).read_text()


def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path, "", RELEASES)
    assert made.code == Exit.USAGE
    assert not made.folder.exists()
