"""The watch list: what is on it, and which definitions have changed."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from overlay.errors import OverlayError
from review import merging, watch
from review.model import Model
from review.watch import IMPORTED, MIRRORED, SEAM, Change
from support import series
from support.releases import pinned
from support.series import replaced, upstream
from support.sites import OVERLAY

BATCH, HELPERS, EXTRA = "vllm/v1/batch.py", "vllm/v1/helpers.py", "vllm/v1/extra.py"
BASE = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    EXTRA: "from vllm.v1.helpers import shift\nfrom vllm.v1.helpers import *\n",
    BATCH: '''\
from enum import Enum


class Colour(Enum):
    RED = 1


class Root:
    def drop(self, index: int) -> None:
        self.gone = index


class Batch(Root):
    """Items in rows."""

    def __init__(self, width: int) -> None:
        self.rows: list[int] = []

    @property
    def full(self) -> bool:
        return len(self.rows) >= 8

    def push(self, item: int) -> None:
        """Take one more."""
        # In order.
        self.rows.append(item)

    def copy(self) -> int:
        return 2
''',
    HELPERS: '''\
LIMIT = 8


def scale(value: int, factor: int = 2) -> int:
    """Make it larger."""
    return value * factor


def shift(value: int) -> int:
    return value + 1


class Holder:
    def update(self, steps: int) -> int:
        """Count."""
        return steps

    def reset(self) -> None:
        self.tokens = []
''',
}
#: One of our modules.
USER = """\
from typing import TYPE_CHECKING

from vllm.v1 import helpers
from vllm.v1.extra import shift, Holder
from vllm.v1.helpers import LIMIT

if TYPE_CHECKING:
    from vllm.v1.batch import Batch, Colour

WATCHED = ("full",)


class Mine(Holder):
    def update(self, steps: int) -> int:
        return super().update(steps)


def use(batch: "Batch", colour: "Colour") -> int:
    batch.drop(1)
    return len(batch.rows) + helpers.scale(shift(LIMIT))
"""
SEAM_EDIT = ("        self.rows.append(item)\n", "        self.rows += ours.use(item)\n")


def examined(root: Path, release: Mapping[str, str], ours: str = USER) -> dict[str, Change]:
    """Return the changes of a release by name, without ``vllm.v1.``."""
    overlay = series.checkout(root, (SEAM_EDIT,), BASE, BATCH)
    (root / "vendor_overlay" / "vllm" / "v1" / "readiness" / "notes.py").write_text(ours)
    base = upstream(BASE)
    patches = merging.merge(overlay.series, base, base).patches
    listed = watch.watch_list(overlay, patches, Model(base))
    found = watch.changes(listed, Model(base), Model(upstream(release)))
    return {each.name.removeprefix("vllm.v1."): each for each in found}


def changed(path: str, old: str, new: str) -> dict[str, str]:
    return {**BASE, path: replaced(BASE[path], (old, new))}


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (BATCH, '    """Items in rows."""\n\n', ""),
        (BATCH, "# In order.", "# Some other words."),
        (BATCH, '"""Take one more."""', '"""Take\n\n        another.\n        """'),
        (BATCH, "item: int)", "item: int,\n    )"),
        (BATCH, "return 2", "return 3"),  # nothing of ours names it
        (BATCH, "self, width: int", "self, width: float"),
        (HELPERS, "def reset", "def more(self) -> None:\n        pass\n\n    def reset"),
        (EXTRA, "\n", "\nimport os\n"),
    ],
)
def test_what_nothing_depends_on_is_not_a_change(
    path: str, old: str, new: str, tmp_path: Path
) -> None:
    release = {**BASE, path: BASE[path].replace(old, new, 1)}
    assert examined(tmp_path, release) == {}


@pytest.mark.parametrize(
    ("name", "path", "old", "new", "kind"),
    [
        ("batch.Batch.push", BATCH, "# In order.", "pass", SEAM),
        ("batch.Batch.push", BATCH, "def push", "def put", SEAM),
        ("extra.shift", HELPERS, "value + 1", "value - 1", IMPORTED),
        ("extra.shift", EXTRA, BASE[EXTRA], "def shift(value): ...\n", IMPORTED),
        ("helpers.LIMIT", HELPERS, "LIMIT = 8", "LIMIT = 9", IMPORTED),
        ("batch.Colour", BATCH, "RED = 1", "RED = 2", IMPORTED),
        ("batch.Batch", BATCH, "class Batch(Root)", "class Batch(Root, dict)", IMPORTED),
        ("batch.Batch.rows", BATCH, "list[int] = []", "dict[int, int] = {}", IMPORTED),
        ("batch.Batch.full", BATCH, "    @property\n", "", IMPORTED),
        ("batch.Root.drop", BATCH, "def drop", "def lose", IMPORTED),
        ("helpers.Holder.update", HELPERS, "return steps", "return 0", IMPORTED),
        ("helpers.Holder.reset", HELPERS, "self.tokens = []", "pass", IMPORTED),
    ],
)
def test_one_change(name: str, path: str, old: str, new: str, kind: str, tmp_path: Path) -> None:
    change = examined(tmp_path, changed(path, old, new))[name]
    assert change.kind == kind
    assert change.users == (("0001-edit-1.patch" if kind == SEAM else "notes"),)
    assert change.places[0] is not None
    # A property's lines are those of its function.
    assert any(line.startswith(("-", "+")) for line in change.diff) is ("@property" not in old)
    assert (change.places[1] is None) == (new in ("def put", "def lose"))


def test_a_module_that_is_gone_is_a_change(tmp_path: Path) -> None:
    release = {path: text for path, text in BASE.items() if path != HELPERS}
    found = examined(tmp_path, release)
    assert found["helpers"].places == (f"{HELPERS}:1", None)
    assert "extra.shift" in found


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("scale", "value * factor", "value + factor"),
        ("scale", "(value: int, factor", "(value: int, bias, factor"),
        ("scale", "def scale", "def use"),
        ("LIMIT", "LIMIT = 8", "LIMIT = 9"),
        ("Holder", "return steps", "return 0"),
        ("Holder.update", "return steps", "return 0"),
    ],
)
def test_a_change_of_what_is_mirrored_comes_first(
    name: str, old: str, new: str, tmp_path: Path
) -> None:
    ours = f'"""Ours."""\n\n# mirrors: vllm.v1.helpers:{name}\n'
    (change,) = examined(tmp_path, changed(HELPERS, old, new), ours).values()
    assert (change.kind, change.name) == (MIRRORED, f"vllm.v1.helpers.{name}")


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("vllm.v1.helpers:gone", "helpers:gone', which is not in the pinned release"),
        ("vllm.v1.helpers:Holder.lose", "Holder.lose', which is not in the pinned release"),
        ("apply", "'apply', which is no name of upstream's"),
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


def test_a_release_that_cannot_be_parsed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match=r"vllm/v1/helpers\.py: cannot be parsed") as caught:
        examined(tmp_path, {**BASE, HELPERS: "def scale(:\n"})
    assert "newer" in caught.value.next_step


def test_all_that_is_declared_is_in_the_pinned_release() -> None:
    listed = watch.watch_list(OVERLAY, [], Model(pinned()))
    mirrored = {name for name, (kind, _) in listed.items() if kind == MIRRORED}
    assert "vllm.model_executor.layers.utils.apply_penalties" in mirrored
    assert "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample" in mirrored
