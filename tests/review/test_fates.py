"""The fate of names that the overlay uses: same, body, signature, moved or gone."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import OverlayError
from review.fates import fates
from review.uses import Use, upstream_uses
from support.names import (
    BASE,
    BATCH,
    EXTRA,
    HELPERS,
    OURS,
    PACKAGE,
    USER,
    changed,
    lay_out,
    line_of,
    uses_of_release,
)
from support.series import upstream

ROOT = BASE[BATCH][BASE[BATCH].index("class Root") : BASE[BATCH].index("class Batch")]


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> list[Use]:
    """The uses of the small release."""
    return uses_of_release(tmp_path_factory.mktemp("made"))


def fates_in(uses: list[Use], release: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    entries = fates(uses, upstream(BASE), upstream(release))
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry for entry in entries}


def test_layout_comments_and_docstrings_change_nothing(uses: list[Use]) -> None:
    release = changed(
        BATCH,
        ('    """Items in rows."""\n\n', ""),
        ("# In order.", "# Some other words."),
        ('"""Take one more."""', '"""Take\n\n        another.\n        """'),
        ("item: Item, front", 'item: "Item",\n        front'),
    )
    assert {entry["fate"] for entry in fates_in(uses, release).values()} == {"same"}


#: Name, file, the text that is replaced, its replacement, fate, and detail.
CHANGES: dict[str, tuple[str, str, str, str, str, str]] = {
    "renamed function": (
        *("helpers.scale", HELPERS, "def scale(", "def enlarge("),
        *("gone", "vllm.v1.helpers.enlarge has the same body."),
    ),
    "new parameter": (
        *("helpers.scale", HELPERS, "factor: int = 2", "factor: int = 2, base: int = 0"),
        *("signature", "Parameter base: int = 0 is new."),
    ),
    "new default": (
        *("helpers.scale", HELPERS, "factor: int = 2", "factor: int = 4"),
        *("signature", "Parameter factor: int = 2 is gone; parameter factor: int = 4 is new."),
    ),
    "parameter that we pass is gone": (
        *("helpers.scale", HELPERS, "factor: int = 2, ", ""),
        *("signature", "Parameter factor: int = 2 is gone. We pass factor by name."),
    ),
    "parameter that we pass is one of any": (
        *("helpers.scale", HELPERS, "factor: int = 2, *, exact: bool = True", "**any: int"),
        *(
            "signature",
            "Parameter factor: int = 2 is gone; parameter * is gone; "
            "parameter exact: bool = True is gone; parameter **any: int is new.",
        ),
    ),
    "keyword-only parameter made positional": (
        *("helpers.scale", HELPERS, "factor: int = 2, *, exact", "factor: int = 2, exact"),
        *("signature", "Parameter * is gone."),
    ),
    "made asynchronous": (
        *("helpers.scale", HELPERS, "def scale(", "async def scale("),
        *("signature", "Async is new."),
    ),
    "new decorator": (
        *("helpers.scale", HELPERS, "def scale(", "@os.register\ndef scale("),
        *("signature", "@os.register is new."),
    ),
    "changed body": (
        *("helpers.scale", HELPERS, "value * factor", "value + factor"),
        *("body", "Statements: 1 of 2 are gone, 1 are new."),
    ),
    "changed constant": (
        *("helpers.LIMIT", HELPERS, "LIMIT = 8", "LIMIT = 9"),
        *("body", "Where it was assigned 8, it is 9 now."),
    ),
    "overridden method gone": (
        *("helpers.Holder.update", HELPERS, "def update(", "def count("),
        *("gone", "vllm.v1.helpers.Holder.count has the same body."),
    ),
    "new base class": (
        *("helpers.Holder", HELPERS, "class Holder:", "class Holder(dict):"),
        *("signature", "Base dict is new."),
    ),
    "deleted attribute": (
        *("batch.Batch.left", BATCH, "self.left, self.right = width, width", "self.right = width"),
        *("gone", ""),
    ),
    "attribute assigned something else": (
        *("batch.Batch.rows", BATCH, "list[Item] = []", "list[Item] = list(range(width))"),
        *("body", "Where it was assigned [], it is list(range(width)) now."),
    ),
    "attribute of another type": (
        *("batch.Batch.rows", BATCH, "rows: list[Item] =", "rows: dict[int, Item] ="),
        *("signature", "Annotated list[Item] is gone; annotated dict[int, Item] is new."),
    ),
    "attribute no more assigned twice": (
        *("batch.Batch.width", BATCH, "        self.width = scale(self.width)\n", ""),
        *("body", "Where it was assigned scale(self.width), it is nothing now."),
    ),
    "renamed field": (
        *("batch.Item.size", BATCH, "size: int = 0", "length: int = 0"),
        *("gone", ""),
    ),
    "class of the renamed field": (
        *("batch.Item", BATCH, "size: int = 0", "length: int = 0"),
        *("signature", "Field size: int = 0 is gone; field length: int = 0 is new."),
    ),
    "fields in another order": (
        *("batch.Item", BATCH, "key: str\n    size: int = 0\n", "size: int = 0\n    key: str\n"),
        *("signature", "Another order: field size: int = 0, field key: str."),
    ),
    "member of an enumeration": (
        *("batch.Colour", BATCH, "RED = 1", "RED = 2"),
        *("signature", "Field RED = 1 is gone; field RED = 2 is new."),
    ),
    "property made a method": (
        *("batch.Batch.full", BATCH, "    @property\n", ""),
        *("signature", "It was a property, and is a function."),
    ),
    "inherited method of a class that lost it": (
        *(
            "batch.Root.drop",
            BATCH,
            ROOT,
            f"class Root:\n    pass\n\n\n{ROOT.replace('Root', 'New')}",
        ),
        *("gone", ""),
    ),
    "uncertain and renamed": (
        *("batch.Runner.launch", BATCH, "def launch", "def start"),
        *("gone", "vllm.v1.batch.Runner.start has the same body."),
    ),
    "key of a dictionary": (
        *("batch['budget']", BATCH, '"budget"', '"limit"'),
        *("gone", ""),
    ),
}


@pytest.mark.parametrize(
    ("name", "path", "old", "new", "fate", "detail"), CHANGES.values(), ids=CHANGES
)
def test_one_change(
    uses: list[Use], name: str, path: str, old: str, new: str, fate: str, detail: str
) -> None:
    entry = fates_in(uses, changed(path, (old, new)))[f"vllm.v1.{name}"]
    assert (entry["fate"], entry["detail"]) == (fate, detail)
    assert (entry["now"] is None) == (fate == "gone")
    # The key of a dictionary has no text of its own.
    assert bool(re.search("^[-+]", entry["diff"], re.MULTILINE)) == ("[" not in name)


def test_a_diff_has_the_lines_of_the_files(uses: list[Use]) -> None:
    edits = ("class Colour", "LIMIT = 2\n\n\nclass Colour"), ("return 1", "return 7")
    release = changed(BATCH, *edits)
    before, after = BASE[BATCH].split("\n"), release[BATCH].split("\n")
    diff = fates_in(uses, release)["vllm.v1.batch.Runner.launch"]["diff"]
    header, *lines = diff.removesuffix("\n").split("\n")
    old, new = (int(at) for at in re.findall(r"[-+](\d+)", header))
    for sign, text, first in (("-", before, old), ("+", after, new)):
        side = [line[1:] for line in lines if line[0] in (" ", sign)]
        assert side == text[first - 1 : first - 1 + len(side)]
    assert old != new


MOVED = "vllm/v1/moved.py"
CLASS = BASE[HELPERS][BASE[HELPERS].index("class Holder") :]


def without_holder(instead: str) -> dict[str, str]:
    return {**changed(HELPERS, (CLASS, instead)), MOVED: CLASS}


def test_a_class_that_moved_is_found_with_its_methods(uses: list[Use]) -> None:
    entries = fates_in(uses, without_holder(""))
    for name in ("Holder", "Holder.update", "Holder.tokens"):
        entry = entries[f"vllm.v1.helpers.{name}"]
        assert (entry["fate"], entry["now"]) == (
            "moved",
            f"{MOVED}:{line_of(CLASS, {'Holder': 'class'}.get(name, name.split('.')[-1]))}",
        )
        assert entry["detail"] == f"It is vllm.v1.moved.{name} now."
    assert entries["vllm.v1.helpers"]["fate"] == "same"


def test_a_class_that_moved_and_is_imported_in_the_old_place_is_not_gone(uses: list[Use]) -> None:
    entries = fates_in(uses, without_holder("from vllm.v1.moved import Holder\n"))
    entry = entries["vllm.v1.helpers.Holder"]
    assert entry["fate"] == "moved"
    assert entry["detail"] == "It is vllm.v1.moved.Holder now; the old name still works."


def test_a_method_that_moved_to_a_base_class_is_inherited(uses: list[Use]) -> None:
    push = BASE[BATCH][BASE[BATCH].index("    def push") : BASE[BATCH].index("class Runner")]
    release = changed(BATCH, (push, "\n"), ("class Root:\n", "class Root:\n" + push))
    entry = fates_in(uses, release)["vllm.v1.batch.Batch.push"]
    assert entry["fate"] == "moved"
    assert entry["detail"] == "It is vllm.v1.batch.Root.push now; the old name still works."


def test_a_namesake_that_was_there_before_is_no_move(uses: list[Use]) -> None:
    namesake = {**BASE, MOVED: CLASS}
    entries = fates(
        uses, upstream(namesake), upstream({**changed(HELPERS, (CLASS, "")), MOVED: CLASS})
    )
    fate = {entry["name"]: entry["fate"] for entry in entries}
    assert fate["vllm.v1.helpers.Holder"] == fate["vllm.v1.helpers.Holder.update"] == "gone"


def test_a_name_that_is_no_more_exported_is_gone_from_there_alone(uses: list[Use]) -> None:
    entries = fates_in(uses, {**BASE, EXTRA: ""})
    assert entries["vllm.v1.extra.shift"]["fate"] == "moved"
    assert "old name" not in entries["vllm.v1.extra.shift"]["detail"]
    assert entries["vllm.v1.helpers.shift"]["fate"] == "same"


def test_a_module_may_be_gone_or_become_a_package(uses: list[Use]) -> None:
    less = {path: text for path, text in BASE.items() if path != BATCH}
    gone = fates_in(uses, less)
    assert {gone[f"vllm.v1.{n}"]["fate"] for n in ("batch", "batch.Batch", "batch.Batch.push")} == {
        "gone"
    }
    package = fates_in(uses, {**less, "vllm/v1/batch/__init__.py": BASE[BATCH]})
    assert (
        package["vllm.v1.batch"]["detail"] == "It is vllm.v1.batch now; the old name still works."
    )
    elsewhere = fates_in(uses, {**less, "vllm/v2/batch.py": BASE[BATCH]})
    assert elsewhere["vllm.v1.batch"]["now"] == "vllm/v2/batch.py:1"
    assert elsewhere["vllm.v1.batch.Batch.push"]["fate"] == "moved"


def test_of_several_that_may_be_meant_a_lost_one_is_mentioned(tmp_path: Path) -> None:
    twice = {**BASE, EXTRA: "class Other:\n    def launch(self) -> int:\n        return 2\n"}
    ours = USER.replace("import shift", "import Other") + "\n\nprint(Other)\n"
    tree = lay_out(tmp_path / "tree", {**twice, f"{PACKAGE}/__init__.py": "", OURS: ours})
    uses = upstream_uses(tree, upstream(twice), {})

    def launch(*changes: tuple[str, str]) -> dict[str, Any]:
        release = dict(twice)
        for path, new in changes:
            release[path] = release[path].replace("def launch", new)
        entries = fates(uses, upstream(twice), upstream(release))
        (entry,) = [each for each in entries if each["name"] == "launch"]
        return entry

    assert launch()["fate"] == "same"
    assert launch((EXTRA, "async def launch"))["fate"] == "signature"
    half = launch((EXTRA, "def start"))
    assert half["fate"] == "moved"
    assert "vllm.v1.extra.Other.launch: gone" in half["detail"]
    assert "As before: vllm.v1.batch.Runner.launch." in half["detail"]
    assert launch((EXTRA, "def start"), (BATCH, "def start"))["fate"] == "gone"


def test_the_worst_comes_first(uses: list[Use]) -> None:
    release = changed(
        HELPERS, ("def shift(", "def push("), ("value * factor", "value"), ("LIMIT", "LIMIT: int")
    )
    release[BATCH] = release[BATCH].replace("def launch", "def start")
    entries = fates(uses, upstream(BASE), upstream(release))
    assert [(e["fate"], e["certain"]) for e in entries][:5] == [
        ("gone", True),
        ("gone", True),
        ("gone", False),
        ("signature", True),
        ("body", True),
    ]


def test_a_release_that_cannot_be_parsed_is_refused(uses: list[Use]) -> None:
    with pytest.raises(OverlayError, match=r"vllm/v1/helpers\.py: cannot be parsed") as caught:
        fates_in(uses, {**BASE, HELPERS: "def scale(:\n"})
    assert "newer" in caught.value.next_step or "Python" in caught.value.next_step
