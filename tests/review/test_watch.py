"""The watch list: what is on it, and what becomes of each definition."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from overlay.errors import OverlayError
from review import merging, model, watch
from review.model import Change, Model
from support import names, series
from support.names import BASE, BATCH, EXTRA, HELPERS, USER, changed
from support.releases import pinned
from support.series import replaced, upstream
from support.sites import OVERLAY, REPO

OURS = REPO / "vendor_overlay" / "vllm" / "v1" / "readiness"
EDITS = tuple((before, seam + before) for before, seam in names.SEAMS.items())


def examined(
    root: Path, release: Mapping[str, str], base: Mapping[str, str] = BASE, ours: str = USER
) -> dict[str, Change]:
    """Return the changes of a release by name, without ``vllm.v1.``."""
    overlay = series.checkout(root, EDITS, base, BATCH)
    notes = root / "vendor_overlay" / names.PACKAGE / "notes.py"
    notes.write_text(ours)
    before, after = Model(upstream(base)), Model(upstream(release))
    # Judged on its own release: the patches' verdicts do not matter here.
    patches = merging.merge(overlay.series, upstream(base), upstream(base)).patches
    listed = watch.watch_list(overlay, patches, before)
    found = watch.changes(listed, overlay, patches, (before, after))
    assert len({each.name for each in found}) == len(found)
    return {each.name.removeprefix("vllm.v1."): each for each in found}


def test_layout_comments_and_docstrings_change_nothing(tmp_path: Path) -> None:
    release = changed(
        BATCH,
        ('    """Items in rows."""\n\n', ""),
        ("# In order.", "# Some other words."),
        ('"""Take one more."""', '"""Take\n\n        another.\n        """'),
        ("item: Item, front", "item: Item,\n        front"),
    )
    assert examined(tmp_path, release) == {}


#: Name, file, the text that is replaced, its replacement, and the fate.
CHANGES: dict[str, tuple[str, str, str, str, str]] = {
    "renamed function": ("helpers.scale", HELPERS, "def scale(", "def enlarge(", "gone"),
    "new parameter": (
        *("helpers.scale", HELPERS, "factor: int = 2", "factor: int = 2, base: int = 0"),
        "signature",
    ),
    "new default": (
        *("helpers.scale", HELPERS, "factor: int = 2", "factor: int = 4", "signature"),
    ),
    "parameter that we pass is gone": (
        *("helpers.scale", HELPERS, "factor: int = 2, ", "", "signature"),
    ),
    "parameter that we pass is one of any": (
        *("helpers.scale", HELPERS, "factor: int = 2, *, exact: bool = True", "**any: int"),
        "signature",
    ),
    "keyword-only parameter made positional": (
        *("helpers.scale", HELPERS, "factor: int = 2, *, exact", "factor: int = 2, exact"),
        "signature",
    ),
    "made asynchronous": ("helpers.scale", HELPERS, "def scale(", "async def scale(", "signature"),
    "new decorator": (
        *("helpers.scale", HELPERS, "def scale(", "@os.register\ndef scale(", "signature"),
    ),
    "changed body": ("helpers.scale", HELPERS, "value * factor", "value + factor", "body"),
    "changed constant": ("helpers.LIMIT", HELPERS, "LIMIT = 8", "LIMIT = 9", "body"),
    "overridden method gone": (
        *("helpers.Holder.update", HELPERS, "def update(", "def count(", "gone"),
    ),
    "method that our class inherits": (
        *("helpers.Holder.reset", HELPERS, "self.tokens.clear()", "self.tokens = []", "body"),
    ),
    "new base class": (
        *("helpers.Holder", HELPERS, "class Holder:", "class Holder(dict):", "signature"),
    ),
    "attribute assigned something else": (
        *("batch.Batch.rows", BATCH, "list[Item] = []", "list[Item] = list(range(width))", "body"),
    ),
    "attribute of another type": (
        *("batch.Batch.rows", BATCH, "rows: list[Item] =", "rows: dict[int, Item] =", "signature"),
    ),
    "attribute no more assigned twice": (
        *("batch.Batch.push", BATCH, "        self.width = scale(self.width)\n", "", "body"),
    ),
    "deleted attribute": (
        *("batch.Batch.__init__", BATCH, "self.left, self.right = width, width"),
        *("self.right = width", "body"),
    ),
    "renamed field": ("batch.Item.size", BATCH, "size: int = 0", "length: int = 0", "gone"),
    "class of the renamed field": (
        *("batch.Item", BATCH, "size: int = 0", "length: int = 0", "signature"),
    ),
    "fields in another order": (
        *("batch.Item", BATCH, "key: str\n    size: int = 0\n", "size: int = 0\n    key: str\n"),
        "signature",
    ),
    "member of an enumeration": ("batch.Colour", BATCH, "RED = 1", "RED = 2", "signature"),
    "property made a method": ("batch.Batch.full", BATCH, "    @property\n", "", "signature"),
    "inherited method": ("batch.Root.drop", BATCH, "def drop", "def lose", "gone"),
    "method that a text names": ("batch.Runner.launch", BATCH, "def launch", "def start", "gone"),
    "function with a seam": ("batch.Batch.push", BATCH, "# In order.", "pass", "body"),
}


@pytest.mark.parametrize(("name", "path", "old", "new", "fate"), CHANGES.values(), ids=CHANGES)
def test_one_change(name: str, path: str, old: str, new: str, fate: str, tmp_path: Path) -> None:
    change = examined(tmp_path, changed(path, (old, new)))[name]
    assert change.fate == fate
    assert (change.places[1] is None) == (fate == "gone")
    assert change.detail or any(line.startswith(("-", "+")) for line in change.diff)
    # Nothing of ours names the constructor: it is watched as a part of a patched file.
    assert (change.kind == model.PATCHED) == (not change.users) == (name == "batch.Batch.__init__")


def test_another_base_of_the_same_name_is_said(tmp_path: Path) -> None:
    release = changed(BATCH, ("class Root:", "from vllm.v1.extra import Root\n\n\nclass Base:"))
    change = examined(tmp_path, release)["batch.Batch"]
    assert (change.fate, change.detail) == (
        *("signature", "Its bases are vllm.v1.extra.Root now."),
    )


MOVED = "vllm/v1/moved.py"
CLASS = BASE[HELPERS][BASE[HELPERS].index("class Holder") :]


def test_a_class_that_moved_is_found_with_its_methods(tmp_path: Path) -> None:
    release = {**changed(HELPERS, (CLASS, "")), MOVED: CLASS}
    entries = examined(tmp_path, release)
    for name in ("Holder", "Holder.update", "Holder.tokens"):
        change = entries[f"helpers.{name}"]
        assert (change.fate, change.detail) == ("moved", f"It is vllm.v1.moved.{name} now.")
        assert change.places[1] is not None
        assert change.places[1].startswith(f"{MOVED}:")


def test_a_namesake_that_was_there_before_is_no_move(tmp_path: Path) -> None:
    base = {**BASE, MOVED: CLASS}
    release = {**changed(HELPERS, (CLASS, "")), MOVED: CLASS}
    assert examined(tmp_path, release, base)["helpers.Holder"].fate == "gone"


def test_a_name_that_is_no_more_exported_is_said(tmp_path: Path) -> None:
    entries = examined(tmp_path, {**BASE, EXTRA: ""})
    assert entries["extra.shift"].fate in ("gone", "moved")
    assert "helpers.shift" not in entries


def test_an_import_that_leads_to_another_function_is_said(tmp_path: Path) -> None:
    other = {EXTRA: "def shift(value: int) -> int:\n    return value - 1\n"}
    assert examined(tmp_path, {**BASE, **other})["extra.shift"].fate == "body"


def test_a_release_that_cannot_be_parsed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match=r"vllm/v1/helpers\.py: cannot be parsed") as caught:
        examined(tmp_path, {**BASE, HELPERS: "def scale(:\n"})
    assert "newer" in caught.value.next_step


# Mirrors


NAME = "vllm.v1.helpers"


@pytest.mark.parametrize(
    ("name", "old", "new", "fate"),
    [
        ("scale", "value * factor", "value + factor", "body"),
        ("scale", "(value: int, factor", "(value: int, bias, factor", "signature"),
        ("scale", "def scale", "def use", "gone"),
        ("LIMIT", "LIMIT = 8", "LIMIT = 9", "body"),
        ("Holder", "steps + len(self.tokens)", "steps", "body"),
        ("Holder", "class Holder:", "class Holder(dict):", "signature"),
        ("Holder.update", "steps + len(self.tokens)", "steps", "body"),
    ],
)
def test_a_change_of_what_is_mirrored_comes_first(
    name: str, old: str, new: str, fate: str, tmp_path: Path
) -> None:
    ours = f'"""Ours."""\n\n# mirrors: {NAME}:{name}\n'
    first = next(iter(examined(tmp_path, changed(HELPERS, (old, new)), ours=ours).values()))
    assert (first.kind, first.name, first.fate) == (model.MIRRORED, f"{NAME}.{name}", fate)
    assert first.users == ("notes",)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("vllm.v1.helpers:gone", "helpers:gone', which is not in the pinned release"),
        ("vllm.v1.none:apply", "vllm.v1.none:apply', which is not in the pinned release"),
        ("vllm.v1.helpers:Holder.lose", "Holder.lose', which is not in the pinned release"),
        ("apply", "'apply', which is no name of upstream's"),
        ("torch.nn:Linear", "'torch.nn:Linear', which is no name of upstream's"),
        ("", "'', which is no name of upstream's"),
    ],
)
def test_a_mirror_that_the_pinned_release_lacks_is_refused(
    word: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(OverlayError) as caught:
        examined(tmp_path, BASE, ours=f'"""Ours."""\n\n# mirrors: {word}\n')
    assert reason in str(caught.value)
    assert "vendor_overlay/vllm/v1/readiness/notes.py: line 3" in str(caught.value)


def test_all_that_is_declared_is_in_the_pinned_release() -> None:
    listed = watch.watch_list(OVERLAY, [], Model(pinned()))
    mirrored = {name for name, (kind, _) in listed.items() if kind == model.MIRRORED}
    assert {
        "vllm.model_executor.layers.utils.apply_penalties",
        "vllm.v1.sample.ops.bad_words.apply_bad_words",
        "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample",
    } <= mirrored


def test_each_module_says_what_it_mirrors() -> None:
    """Or that it mirrors nothing, which a reviewer can doubt."""
    for file in sorted(OURS.rglob("*.py")):
        if "provenance" in file.parts or file.name in ("__init__.py", "version.py"):
            continue
        said = [word for _, word in watch.mirrors(file.read_text())]
        assert said, file
        assert (watch.NOTHING in said) == (said == [watch.NOTHING]), file
        assert len(set(said)) == len(said), file


# Other changes in patched files


@pytest.mark.parametrize(
    ("old", "new", "fate", "what"),
    [
        pytest.param(*edit, id=name)
        for name, edit in {
            "import swapped": (
                *("from enum import Enum", "from enums import Enum", "body", "batch (statements)"),
            ),
            "import with effects": (
                *("from enum import Enum\n", "from enum import Enum\nimport vllm.patches\n"),
                *("body", "batch (statements)"),
            ),
            "new method": (
                "class Runner:\n",
                "class Runner:\n    def sort(self) -> None:\n        pass\n\n",
                *("new", "batch.Runner.sort"),
            ),
            "changed method": ("return 2", "return 3", "body", "batch.Runner.copy"),
            "method gone": ("def copy(self)", "def copied(self)", "gone", "batch.Runner.copy"),
            "decorator": (
                *("    def copy(", "    @cached\n    def copy(", "signature", "batch.Runner.copy"),
            ),
            "new class": ("class Runner:", "class New:\n    a = 1\n\n\nclass Runner:", "new",
                          "batch.New"),
            "call at the top level": (
                *("class Runner:", "register(Batch)\n\n\nclass Runner:", "body"),
                "batch (statements)",
            ),
            "monkeypatch": (
                *("class Runner:", "Batch.push = None\n\n\nclass Runner:", "body"),
                "batch (statements)",
            ),
        }.items()
    ],
)  # fmt: skip
def test_a_change_elsewhere_in_a_patched_file_is_named(
    old: str, new: str, fate: str, what: str, tmp_path: Path
) -> None:
    base = {**BASE, BATCH: BASE[BATCH].replace("# our state.copy() is a dictionary's", "# copy")}
    text = replaced(base[BATCH], (old, new))
    ours = '"""Ours."""\n\n# mirrors: nothing\n'
    change = examined(tmp_path, {**base, BATCH: text}, base, ours)[what]
    assert (change.kind, change.fate) == (model.PATCHED, fate)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# In order.", "# Sorted."),
        ('"""Items in rows."""', '"""Items\n\n    in rows.\n    """'),
        ("front: bool = False)", "front: bool = False,\n    )"),
        (
            "from dataclasses import dataclass\nfrom enum import Enum\n",
            "from enum import Enum\nfrom dataclasses import dataclass\n",
        ),
    ],
    ids=["comment", "docstring", "layout", "order of imports"],
)
def test_what_nothing_depends_on_is_not(old: str, new: str, tmp_path: Path) -> None:
    assert examined(tmp_path, changed(BATCH, (old, new))) == {}
