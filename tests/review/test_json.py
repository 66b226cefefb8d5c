"""The JSON of reviews and matrices has the fields that docs/review-json.md documents, and no more.

A new field needs a row there, and one of the releases below in which it occurs.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit, OverlayError
from overlay.pin import Pin
from review import (
    fixes,
    matrix,
    merging,
    moves,
    reach,
    review,
    selecting,
    trying,
    uses,
    verdicts,
)
from review.changes import FATES
from review.wheels import Release
from support import documented, series, worded
from support.documented import PAGE, form
from support.worded import CONFIG, V1

#: A release without what chose the model runner, and one that has a name of ours.
GONE = ((CONFIG, "def use_v2_model_runner", "def use_another"),)
TAKEN = ((V1, "LIMIT = 8\n", "LIMIT = 8\n\n\ndef alpha():\n    return LIMIT\n"),)
RELEASES: dict[str, Callable[[], Release]] = {
    "0.23.0": partial(worded.release, "0.23.0"),
    "0.23.1": lambda: worded.release("0.23.1", *worded.TAKEN_OVER, torch="torch==2.12.0"),
    "0.24.0": lambda: worded.release("0.24.0", *worded.CONFLICT),
    "0.25.0": lambda: worded.release("0.25.0", *worded.CHANGED),
    "0.26.0": lambda: worded.release("0.26.0", *GONE),
    "0.27.0": lambda: worded.release("0.27.0", *TAKEN),
    "0.28.0": partial(worded.moved, "0.28.0"),
}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By release, what is in review.json; one was tried, and one is the overlay's own."""
    root = tmp_path_factory.mktemp("json")
    overlay, base = worded.checkout(root / "checkout"), worded.upstream()
    made = {}
    for version, make in RELEASES.items():
        # Nothing of a candidate that conflicts is run.
        trial = partial(trying.examine, root) if version == "0.24.0" else None
        folder = root / "reviews"
        made[version] = review.of_release(
            overlay, base, make(), folder, mends=worded.MENDS, trial=trial
        )
    made["own"] = review.of_itself(overlay, base, root / "reviews")
    plain = series.checkout(root / "plain")
    release = Release("0.23.0", "vllm.whl", "a" * 64, "a test's", series.upstream(series.BASE))
    made["plain"] = review.of_release(
        plain, series.upstream(series.BASE), release, root / "plain-reviews", mends={}
    )
    return made


@pytest.fixture(scope="module")
def table(reviews: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is in matrix.json."""

    def fail() -> dict[str, Any]:
        raise OverlayError(Exit.ABSENT, "there is none", next_step="wait")

    columns = [
        matrix.column(version, partial(reviews.__getitem__, version)) for version in RELEASES
    ]
    columns.append(matrix.column("0.29.0", fail))
    pin = Pin("0.22.0", reviews["own"]["base"]["overlay"], {}, {}, {})
    return matrix.assemble("0.23.0..0.29.0", pin, columns)


def test_a_review_has_the_documented_fields(reviews: dict[str, dict[str, Any]]) -> None:
    known = form(review.JSON)
    for each in reviews.values():
        known.check(each)
    assert known.faults == set()
    assert known.unseen == set()


def test_a_matrix_has_the_documented_fields(table: dict[str, Any]) -> None:
    known = form(matrix.JSON)
    known.check(table)
    assert known.faults == set()
    assert known.unseen == set()


def test_the_number_of_the_form_is_the_documented_one(
    reviews: dict[str, dict[str, Any]], table: dict[str, Any]
) -> None:
    assert {each["schema"] for each in reviews.values()} == {review.SCHEMA}
    assert table["schema"] == matrix.SCHEMA
    text = PAGE.read_text()
    assert f"`schema`, which is **{review.SCHEMA}** now" in text
    for number in (review.SCHEMA, matrix.SCHEMA):
        assert f"| the version of this form, {number} |" in text


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("verdict", review.CODES),
        ("runners.changed[].fate", {*FATES[1:], "new"}),
        ("classes[].what", {reach.MADE, reach.OVERRIDDEN, reach.REPLACED}),
        ("words[].group", {verdicts.FEATURES, verdicts.FIXES, verdicts.FRAME}),
        ("words[].verdict",
         {verdicts.CANNOT, verdicts.EYES, verdicts.DROPPABLE, verdicts.HOLDS}),
        ("patches[].verdict",
         {merging.CONFLICTS, merging.OBSOLETE, merging.MOVED, merging.APPLIES}),
        ("patches[].files[].hunks[].verdict",
         {merging.CONFLICTS, merging.MOVED, merging.APPLIES, merging.ADOPTED, merging.GONE}),
        ("fixes[].has", {fixes.MENDED, fixes.PARTLY, fixes.NOT_MENDED, fixes.UNKNOWN}),
        ("names[].fate", FATES),
        ("names[].how", uses.HOW),
        ("mirrors[].kind", FATES[1:]),
        ("callees[].kind", FATES[1:]),
        ("moves[].fate", {moves.MOVED, moves.GONE, moves.TAKEN}),
        ("tried[].step", trying.STEPS),
        ("tried[].outcome", {trying.PASSED, trying.FAILED, trying.NOT_DONE}),
    ],
)  # fmt: skip
def test_the_documented_values_are_the_code_s(path: str, values: Any) -> None:
    assert form(review.JSON).fields[path].values == set(values)


def test_the_documented_values_of_a_matrix_are_the_code_s() -> None:
    fields, single = form(matrix.JSON).fields, form(review.JSON).fields
    outcomes = {matrix.REVIEWED, matrix.NO_WHEEL, matrix.REFUSED, matrix.ERROR}
    assert fields["releases[].outcome"].values == outcomes
    assert fields["releases[].verdict"].values == single["verdict"].values
    assert fields["words[].group"].values == single["words[].group"].values
    verdict = single["words[].verdict"].values
    assert fields["words[].cells[].verdict"].values == verdict
    assert fields["words[].first.state"].values == verdict - {verdicts.HOLDS} | {matrix.DEAD}
    # A model that no list names.
    assert f"`{selecting.OTHER}` stands for all" in PAGE.read_text()


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("new", 1, "new is not documented"),
        ("patches.0.new", "", "patches[].new is not documented"),
        ("base.new", "", "base.new is not documented"),
        ("verdict", "fine", "verdict is 'fine', and documented as one of"),
        ("verdict", None, "verdict is null"),
        ("own", 1, "own is 1, and documented as true or false"),
        ("summary", ["", 1], "summary is ['', 1], and documented as list of texts"),
        ("names.0.how", "set", "names[].how is 'set', and documented as some of"),
        ("patches.0.header.Bug", 5, "and documented as texts by name"),
    ],
)
def test_what_is_not_documented_is_found(
    path: str, value: Any, fault: str, reviews: dict[str, dict[str, Any]]
) -> None:
    content: Any = copy.deepcopy(reviews["0.24.0"])
    place = content
    *outer, last = path.split(".")
    for key in outer:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    known = form(review.JSON)
    known.check(content)
    assert any(fault in each for each in known.faults), known.faults


def test_what_is_missing_is_found(reviews: dict[str, dict[str, Any]]) -> None:
    content = copy.deepcopy(reviews["0.24.0"])
    del content["patches"][1]["files"][0]["path"]
    known = form(review.JSON)
    known.check(content)
    assert known.faults == {"patches[].files[].path is not there"}
    assert "mirrors[].diff" in known.unseen


def test_a_page_without_the_table_is_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text("| field |\n")
    monkeypatch.setattr(documented, "PAGE", tmp_path / "page.md")
    with pytest.raises(AssertionError, match="has no table"):
        form(review.JSON)
