"""What our code relies on is found without running it, and each change of it is called so."""

import difflib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import OverlayError
from review import names
from review.names import Use
from series.upstream import Upstream
from support.sites import OVERLAY, REPO, UPSTREAM

PACKAGE = "vllm/v1/readiness"
BATCH, HELPERS, EXTRA = "vllm/v1/batch.py", "vllm/v1/helpers.py", "vllm/v1/extra.py"
OURS = f"{PACKAGE}/ours.py"

#: Upstream's, in the base release.
BASE = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    EXTRA: "from vllm.v1.helpers import shift\n",
    BATCH: '''\
"""Batches."""

from dataclasses import dataclass
from enum import Enum

from vllm.v1.helpers import scale


class Colour(Enum):
    RED = 1


@dataclass
class Item:
    key: str
    size: int = 0


class Root:
    def drop(self, index: int) -> None:
        self.gone = index


class Batch(Root):
    """Items in rows."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[Item] = []
        self.left, self.right = width, width

    @property
    def full(self) -> bool:
        """Whether there is no room."""
        return len(self.rows) >= self.width

    def push(self, item: Item, front: bool = False) -> None:
        """Take one more."""
        # In order.
        self.rows.append(item)
        self.width = scale(self.width)


class Runner:
    def launch(self) -> int:
        return 1

    def rest(self) -> dict[str, int]:
        state = {"budget": 3}
        return state
''',
    HELPERS: '''\
import os

LIMIT = 8


def scale(value: int, factor: int = 2, *, exact: bool = True) -> int:
    """Make it larger."""
    total = value * factor
    return total


def shift(value: int) -> int:
    return value + 1


class Holder:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def update(self, steps: int) -> int:
        """Count."""
        return steps + len(self.tokens)

    def reset(self) -> None:
        self.tokens.clear()
''',
}

#: One of our modules, which uses it.
USER = """\
import json
from typing import TYPE_CHECKING, Any

from vllm.v1 import helpers
from vllm.v1.extra import shift
from vllm.v1.helpers import LIMIT, Holder, scale

if TYPE_CHECKING:
    from vllm.v1.batch import Batch, Colour, Item, Runner

WATCHED = ("launch",)
MODULE = "vllm.v1.batch"


class Mine(Holder):
    def update(self, steps: int) -> int:
        self.own = json.dumps([])
        return super().update(steps) + len(self.tokens)


def use(batch: "Batch", item: "Item", colour: "Colour") -> int:
    if batch.full or item.size > LIMIT:
        return batch.left
    batch.push(item, front=True)
    batch.drop(1)
    batch.width = scale(2, factor=3, exact=False)
    return len(batch.rows) + helpers.shift(1) + shift(2)


def watch(thing: Any, state: Any) -> Any:
    for name in WATCHED:
        replace(thing, name)
    state["budget"] = state.copy()
    return thing.rest()


def replace(thing: Any, name: str) -> None:
    setattr(thing, name, getattr(thing, name))
"""

#: What the patch puts in, before and into a function.
SEAMS = {
    "from vllm.v1.helpers import scale\n": "from vllm.v1.readiness.ours import use\n",
    "        self.rows.append(item)\n": (
        "        if use(self, item, None) and self.right:\n            return\n"
    ),
}


def upstream(files: Mapping[str, str]) -> Upstream:
    return Upstream(tuple(sorted(files)), lambda path: files[path].encode())


def changed(path: str, *changes: tuple[str, str]) -> dict[str, str]:
    """The base release with texts of one file replaced."""
    text = BASE[path]
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return {**BASE, path: text}


def lay_out(folder: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> list[Use]:
    overlaid = BASE[BATCH]
    for before, seam in SEAMS.items():
        assert overlaid.count(before) == 1
        overlaid = overlaid.replace(before, seam + before)
    files = {**BASE, BATCH: overlaid, f"{PACKAGE}/__init__.py": "", OURS: USER}
    tree = lay_out(tmp_path_factory.mktemp("made") / "tree", files)
    seams = seam_lines(BASE[BATCH], overlaid)
    return names.relied_on(tree, upstream(BASE), {BATCH: seams})


def seam_lines(before: str, after: str) -> list[range]:
    """The lines of ``after`` that are not in ``before``, one-based."""
    sides = before.splitlines(), after.splitlines()
    operations = difflib.SequenceMatcher(None, *sides, autojunk=False).get_opcodes()
    return [range(j + 1, k + 1) for what, _, _, j, k in operations if what != "equal"]


def became(uses: list[Use], release: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    entries = names.fates(uses, upstream(BASE), upstream(release))
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry for entry in entries}


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_each_use_is_found_where_it_is(uses: list[Use]) -> None:
    found = became(uses, BASE)
    push = found["vllm.v1.batch.Batch.push"]
    assert (push["kind"], push["how"]) == ("function", ["holds a seam", "called"])
    assert push["users"] == [
        f"{BATCH}:{line_of(BASE[BATCH], '        self.rows.append') + 1} (seam)",
        f"{OURS}:{line_of(USER, 'batch.push')}",
    ]
    assert push["was"] == push["now"] == f"{BATCH}:{line_of(BASE[BATCH], 'def push')}"
    how = {name: entry["how"] for name, entry in found.items() if entry["certain"]}
    assert how == {
        "vllm.v1.batch": ["imported"],
        "vllm.v1.batch.Batch": ["imported"],
        "vllm.v1.batch.Batch.full": ["read"],
        "vllm.v1.batch.Batch.left": ["read"],
        "vllm.v1.batch.Batch.push": ["holds a seam", "called"],
        "vllm.v1.batch.Batch.right": ["read"],
        "vllm.v1.batch.Batch.rows": ["read"],
        "vllm.v1.batch.Batch.width": ["set"],
        "vllm.v1.batch.Colour": ["imported"],
        "vllm.v1.batch.Item": ["imported"],
        "vllm.v1.batch.Item.size": ["read"],
        "vllm.v1.batch.Root.drop": ["called"],
        "vllm.v1.batch.Runner": ["imported"],
        "vllm.v1.extra.shift": ["called", "imported"],
        "vllm.v1.helpers": ["read", "imported"],
        "vllm.v1.helpers.Holder": ["read", "imported"],
        "vllm.v1.helpers.Holder.tokens": ["read"],
        "vllm.v1.helpers.Holder.update": ["overridden", "called"],
        "vllm.v1.helpers.LIMIT": ["read", "imported"],
        "vllm.v1.helpers.scale": ["called", "imported"],
        "vllm.v1.helpers.shift": ["called", "imported"],
    }


def test_what_inference_cannot_tell_is_found_by_name_and_not_certain(uses: list[Use]) -> None:
    found = became(uses, BASE)
    assert {name: entry["users"] for name, entry in found.items() if not entry["certain"]} == {
        # A string that a loop hands to setattr, and a method of anything.
        "vllm.v1.batch.Runner.launch": [f"{OURS}:{line_of(USER, 'WATCHED')}"],
        "vllm.v1.batch.Runner.rest": [f"{OURS}:{line_of(USER, 'thing.rest')}"],
        "vllm.v1.batch['budget']": [f"{OURS}:{line_of(USER, 'state[')}"],
    }


def test_the_same_release_changes_nothing(uses: list[Use]) -> None:
    assert {entry["fate"] for entry in became(uses, BASE).values()} == {"same"}


def test_layout_comments_and_docstrings_change_nothing(uses: list[Use]) -> None:
    release = changed(
        BATCH,
        ('    """Items in rows."""\n\n', ""),
        ("# In order.", "# Some other words."),
        ('"""Take one more."""', '"""Take\n\n        another.\n        """'),
        ("item: Item, front", 'item: "Item",\n        front'),
    )
    assert {entry["fate"] for entry in became(uses, release).values()} == {"same"}


@pytest.mark.parametrize(
    ("name", "path", "changes", "fate", "detail"),
    [
        pytest.param(
            "helpers.scale",
            HELPERS,
            [("def scale(", "def enlarge(")],
            "gone",
            "vllm.v1.helpers.enlarge has the same body.",
            id="renamed function",
        ),
        pytest.param(
            "helpers.scale",
            HELPERS,
            [("factor: int = 2", "factor: int = 2, base: int = 0")],
            "signature",
            "Parameter base: int = 0 is new.",
            id="new parameter",
        ),
        pytest.param(
            "helpers.scale",
            HELPERS,
            [("factor: int = 2", "factor: int = 4")],
            "signature",
            "Parameter factor: int = 2 is factor: int = 4 now.",
            id="new default",
        ),
        pytest.param(
            "helpers.scale",
            HELPERS,
            [("factor: int = 2, ", "")],
            "signature",
            "Parameter factor: int = 2 is gone. We pass factor by name.",
            id="parameter that we pass is gone",
        ),
        pytest.param(
            "helpers.scale",
            HELPERS,
            [("factor: int = 2, *, exact", "factor: int = 2, exact")],
            "signature",
            "Parameter * is gone.",
            id="keyword-only parameter made positional",
        ),
        pytest.param(
            "helpers.scale",
            HELPERS,
            [("def scale(", "async def scale(")],
            "signature",
            "Async is new.",
            id="made asynchronous",
        ),
        pytest.param(
            "helpers.scale",
            HELPERS,
            [("def scale(", "@os.register\ndef scale(")],
            "signature",
            "@os.register is new.",
            id="new decorator",
        ),
        pytest.param(
            "helpers.scale",
            HELPERS,
            [("value * factor", "value + factor")],
            "body",
            "Statements: 1 of 2 are gone, 1 are new.",
            id="changed body",
        ),
        pytest.param(
            "helpers.LIMIT",
            HELPERS,
            [("LIMIT = 8", "LIMIT = 9")],
            "body",
            "Where it was assigned 8, it is 9 now.",
            id="changed constant",
        ),
        pytest.param(
            "helpers.Holder.update",
            HELPERS,
            [("def update(self, steps: int)", "def count(self, steps: int)")],
            "gone",
            "vllm.v1.helpers.Holder.count has the same body.",
            id="overridden method gone",
        ),
        pytest.param(
            "helpers.Holder",
            HELPERS,
            [("class Holder:", "class Holder(dict):")],
            "signature",
            "Base dict is new.",
            id="new base class",
        ),
        pytest.param(
            "batch.Batch.left",
            BATCH,
            [("self.left, self.right = width, width", "self.right = width")],
            "gone",
            "",
            id="deleted attribute",
        ),
        pytest.param(
            "batch.Batch.rows",
            BATCH,
            [("self.rows: list[Item] = []", "self.rows: list[Item] = list(range(width))")],
            "body",
            "Where it was assigned [], it is list(range(width)) now.",
            id="attribute assigned something else",
        ),
        pytest.param(
            "batch.Batch.rows",
            BATCH,
            [("self.rows: list[Item] = []", "self.rows: dict[int, Item] = []")],
            "signature",
            "Annotated list[Item] is dict[int, Item] now.",
            id="attribute of another type",
        ),
        pytest.param(
            "batch.Batch.width",
            BATCH,
            [("        self.width = scale(self.width)\n", "")],
            "body",
            "Where it was assigned scale(self.width), it is nothing now.",
            id="attribute no more assigned twice",
        ),
        pytest.param(
            "batch.Item.size",
            BATCH,
            [("size: int = 0", "length: int = 0")],
            "gone",
            "",
            id="renamed field",
        ),
        pytest.param(
            "batch.Item",
            BATCH,
            [("size: int = 0", "length: int = 0")],
            "signature",
            "Field size: int = 0 is gone; field length: int = 0 is new.",
            id="class of the renamed field",
        ),
        pytest.param(
            "batch.Item",
            BATCH,
            [("    key: str\n    size: int = 0\n", "    size: int = 0\n    key: str\n")],
            "signature",
            "Another order: size: int = 0, key: str.",
            id="fields in another order",
        ),
        pytest.param(
            "batch.Colour",
            BATCH,
            [("RED = 1", "RED = 2")],
            "signature",
            "Field RED = 1 is RED = 2 now.",
            id="member of an enumeration",
        ),
        pytest.param(
            "batch.Batch.full",
            BATCH,
            [("    @property\n", "")],
            "signature",
            "It was a property, and is a function.",
            id="property made a method",
        ),
        pytest.param(
            "batch.Root.drop",
            BATCH,
            [
                ("    def drop(self, index: int) -> None:\n        self.gone = index", "    pass"),
                ("class Batch(Root):", "class Base:\n    def drop(self, index: int) -> None:\n"
                 "        self.gone = index\n\n\nclass Batch(Base):"),
            ],
            "gone",
            "",
            id="inherited method of a class that lost it",
        ),
        pytest.param(
            "batch.Runner.launch",
            BATCH,
            [("def launch", "def start")],
            "gone",
            "vllm.v1.batch.Runner.start has the same body.",
            id="uncertain and renamed",
        ),
        pytest.param(
            "batch['budget']",
            BATCH,
            [('"budget"', '"limit"')],
            "gone",
            "",
            id="key of a dictionary",
        ),
    ],
)  # fmt: skip
def test_one_change_is_called_what_it_is(
    uses: list[Use], name: str, path: str, changes: list[tuple[str, str]], fate: str, detail: str
) -> None:
    found = became(uses, changed(path, *changes))
    entry = found[f"vllm.v1.{name}"]
    assert (entry["fate"], entry["detail"]) == (fate, detail)
    assert (entry["now"] is None) == (fate == "gone")


MOVED = "vllm/v1/moved.py"
CLASS = BASE[HELPERS][BASE[HELPERS].index("class Holder") :]


def without_holder(instead: str) -> dict[str, str]:
    return {**changed(HELPERS, (CLASS, instead)), MOVED: CLASS}


def test_a_class_that_moved_is_found_with_its_methods(uses: list[Use]) -> None:
    found = became(uses, without_holder(""))
    for name in ("Holder", "Holder.update", "Holder.tokens"):
        entry = found[f"vllm.v1.helpers.{name}"]
        assert (entry["fate"], entry["now"]) == (
            "moved",
            f"{MOVED}:{line_of(CLASS, {'Holder': 'class'}.get(name, name.split('.')[-1]))}",
        )
        assert entry["detail"] == f"It is vllm.v1.moved.{name} now."
    assert found["vllm.v1.helpers"]["fate"] == "same"


def test_a_class_that_moved_and_is_imported_in_the_old_place_is_not_gone(uses: list[Use]) -> None:
    found = became(uses, without_holder("from vllm.v1.moved import Holder\n"))
    entry = found["vllm.v1.helpers.Holder"]
    assert entry["fate"] == "moved"
    assert entry["detail"] == "It is vllm.v1.moved.Holder now; the old name still works."


def test_a_method_that_moved_to_a_base_class_is_inherited(uses: list[Use]) -> None:
    push = BASE[BATCH][BASE[BATCH].index("    def push") : BASE[BATCH].index("class Runner")]
    release = changed(BATCH, (push, "\n"), ("class Root:\n", "class Root:\n" + push))
    entry = became(uses, release)["vllm.v1.batch.Batch.push"]
    assert entry["fate"] == "moved"
    assert entry["detail"] == "It is vllm.v1.batch.Root.push now; the old name still works."


def test_a_namesake_that_was_there_before_is_no_move(uses: list[Use]) -> None:
    namesake = {**BASE, MOVED: CLASS}
    entries = names.fates(
        uses, upstream(namesake), upstream({**changed(HELPERS, (CLASS, "")), MOVED: CLASS})
    )
    fates = {entry["name"]: entry["fate"] for entry in entries}
    assert fates["vllm.v1.helpers.Holder"] == fates["vllm.v1.helpers.Holder.update"] == "gone"


def test_a_name_that_is_no_more_exported_is_gone_from_there_alone(uses: list[Use]) -> None:
    found = became(uses, {**BASE, EXTRA: ""})
    assert found["vllm.v1.extra.shift"]["fate"] == "moved"
    assert "old name" not in found["vllm.v1.extra.shift"]["detail"]
    assert found["vllm.v1.helpers.shift"]["fate"] == "same"


def test_a_module_may_be_gone_or_become_a_package(uses: list[Use]) -> None:
    less = {path: text for path, text in BASE.items() if path != BATCH}
    gone = became(uses, less)
    assert {gone[f"vllm.v1.{n}"]["fate"] for n in ("batch", "batch.Batch", "batch.Batch.push")} == {
        "gone"
    }
    package = became(uses, {**less, "vllm/v1/batch/__init__.py": BASE[BATCH]})
    assert (
        package["vllm.v1.batch"]["detail"] == "It is vllm.v1.batch now; the old name still works."
    )
    elsewhere = became(uses, {**less, "vllm/v2/batch.py": BASE[BATCH]})
    assert elsewhere["vllm.v1.batch"]["now"] == "vllm/v2/batch.py:1"
    assert elsewhere["vllm.v1.batch.Batch.push"]["fate"] == "moved"


def test_of_several_that_may_be_meant_a_lost_one_is_mentioned(tmp_path: Path) -> None:
    twice = {**BASE, EXTRA: "class Other:\n    def launch(self) -> int:\n        return 2\n"}
    ours = USER.replace("import shift", "import Other") + "\n\nprint(Other)\n"
    tree = lay_out(tmp_path / "tree", {**twice, f"{PACKAGE}/__init__.py": "", OURS: ours})
    uses = names.relied_on(tree, upstream(twice), {})

    def launch(*changes: tuple[str, str]) -> dict[str, Any]:
        release = dict(twice)
        for path, new in changes:
            release[path] = release[path].replace("def launch", new)
        entries = names.fates(uses, upstream(twice), upstream(release))
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
    entries = names.fates(uses, upstream(BASE), upstream(release))
    assert [(e["fate"], e["certain"]) for e in entries][:5] == [
        ("gone", True),
        ("gone", True),
        ("gone", False),
        ("signature", True),
        ("body", True),
    ]


def test_nothing_is_run_and_no_other_cache_is_used(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    files = {path: trap + text for path, text in BASE.items()}
    ours = {f"{PACKAGE}/__init__.py": trap, OURS: trap + USER}
    tree = lay_out(tmp_path / "review" / "tree", {**files, **ours})
    assert names.relied_on(tree, upstream(files), {BATCH: [range(1, 2)]})
    assert not (tmp_path / "ran").exists()
    assert {path.name for path in (tmp_path / "review").iterdir()} <= {"tree", ".jedi"}
    assert (tmp_path / "review" / ".jedi").is_dir()


def test_a_release_that_cannot_be_parsed_is_refused(uses: list[Use]) -> None:
    with pytest.raises(OverlayError, match=r"vllm/v1/helpers\.py: cannot be parsed") as caught:
        became(uses, {**BASE, HELPERS: "def scale(:\n"})
    assert "newer" in caught.value.next_step or "Python" in caught.value.next_step


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[Use]:
    """What this overlay relies on in the installed vLLM."""
    tree = tmp_path_factory.mktemp("real") / "tree"
    shutil.copytree(UPSTREAM / "vllm", tree / "vllm", ignore=_no_source)
    seams = {}
    for path in OVERLAY.targets:
        before = (UPSTREAM / path).read_bytes()
        after = OVERLAY.overlaid_bytes(path, before)
        (tree / path).write_bytes(after)
        seams[path] = seam_lines(before.decode(), after.decode())
    shutil.copytree(REPO / "vendor_overlay" / PACKAGE, tree / PACKAGE, ignore=_no_source)
    return names.relied_on(tree, installed({}), seams)


def _no_source(folder: str, found: list[str]) -> set[str]:
    return {name for name in found if "." in name and not name.endswith(".py")} | {"__pycache__"}


def installed(changes: Mapping[str, bytes]) -> Upstream:
    """The installed vLLM, but for some files."""
    paths = (path.relative_to(UPSTREAM).as_posix() for path in (UPSTREAM / "vllm").rglob("*.py"))

    def read(path: str) -> bytes:
        return changes[path] if path in changes else (UPSTREAM / path).read_bytes()

    return Upstream(tuple(sorted(paths)), read)


def test_of_its_own_release_the_overlay_finds_everything_as_it_is(real: list[Use]) -> None:
    entries = names.fates(real, installed({}), installed({}))
    assert {entry["fate"] for entry in entries} == {"same"}
    assert all(entry["was"] == entry["now"] for entry in entries)
    assert len({entry["name"] for entry in entries}) == len(entries)
    certain = {entry["name"]: entry for entry in entries if entry["certain"]}
    for name, how in {
        "vllm.v1.worker.gpu_input_batch.InputBatch.token_ids_cpu": "read",
        "vllm.v1.worker.gpu_input_batch.InputBatch.req_output_token_ids": "read",
        "vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder._update_think_state": (
            "called"
        ),
        "vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder.sync_batch": "overridden",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._bookkeeping_sync": "holds a seam",
        "vllm.v1.worker.gpu_model_runner.AsyncGPUModelRunnerOutput.sampled_token_ids_cpu": "set",
        "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample": "imported",
        "vllm.v1.worker.gpu_model_runner": "imported",
    }.items():
        assert how in certain[name]["how"], name
    uncertain = {entry["name"] for entry in entries if not entry["certain"]}
    assert {"execute_model", "vllm.v1.engine.core.EngineCore"} <= uncertain
    assert not any("readiness" in entry["name"] for entry in entries)


def test_every_seam_is_held_by_something_that_is_looked_at(real: list[Use]) -> None:
    """But for those at a file's top level: imports, a notice, and a table's entries."""
    held = {use.user.partition(":")[0] for use in real if use.how == "holds a seam"}
    assert held == set(OVERLAY.targets)


@pytest.mark.parametrize(
    ("path", "old", "new", "name", "fate"),
    [
        (
            "vllm/v1/worker/gpu_input_batch.py",
            b"self.token_ids_cpu = ",
            b"self.token_ids_cpu = +",
            "vllm.v1.worker.gpu_input_batch.InputBatch.token_ids_cpu",
            "body",
        ),
        (
            "vllm/v1/sample/thinking_budget_state.py",
            b"def _update_think_state(self, ",
            b"def _update_think_state(self, now: bool, ",
            "vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder._update_think_state",
            "signature",
        ),
        (
            "vllm/v1/worker/gpu/sample/gumbel.py",
            b"def gumbel_sample(",
            b"def sample_by_gumbel(",
            "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample",
            "gone",
        ),
    ],
)
def test_a_change_to_what_it_relies_on_is_told(
    real: list[Use], path: str, old: bytes, new: bytes, name: str, fate: str
) -> None:
    text = (UPSTREAM / path).read_bytes()
    assert text.count(old) == 1
    entries = names.fates(real, installed({}), installed({path: text.replace(old, new)}))
    found = {e["name"]: e["fate"] for e in entries if e["fate"] != "same"}
    # The function that assigns an attribute has another body, too.
    assert found.pop(f"{name.rpartition('.')[0]}.__init__", "body") == "body"
    assert found == {name: fate}
