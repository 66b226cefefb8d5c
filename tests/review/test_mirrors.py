"""What our modules re-implement: declared in comments, checked, and compared with a release."""

from pathlib import Path
from typing import Any

import pytest
from overlay.errors import OverlayError
from overlay.installation import locate
from review import mirrors
from review.definitions import Definitions
from series.upstream import from_installation
from support.series import upstream
from support.sites import OVERLAY, REPO, UPSTREAM

OURS = REPO / "vendor_overlay" / "vllm" / "v1" / "readiness"
PENALTIES, WORDS = "vllm/v1/sample/penalties.py", "vllm/v1/sample/words.py"
BASE = {
    PENALTIES: '''\
LIMIT = 8


def apply(logits, counts):
    """Apply them."""
    return logits - counts


class Holder:
    def __init__(self):
        self.rows = []

    def count(self):
        return len(self.rows)
''',
    WORDS: "from vllm.v1.sample.penalties import apply\n",
}


def checkout(root: Path, **modules: str) -> Path:
    """A checkout with modules of ours, each with one comment."""
    folder = root / "vendor_overlay" / "vllm" / "v1" / "readiness"
    folder.mkdir(parents=True)
    for name, word in modules.items():
        (folder / f"{name}.py").write_text(f'"""Ours."""\n\n# mirrors: {word}\n')
    return root


def examined(root: Path, release: dict[str, str], known: set[str] | None = None) -> Any:
    before, after = Definitions(upstream(BASE)), Definitions(upstream(release))
    pairs = mirrors.resolve(mirrors.declared(root), before)
    return mirrors.examine(pairs, before, after, known or set())


def release(old: str, new: str) -> dict[str, str]:
    assert BASE[PENALTIES].count(old) == 1
    return {**BASE, PENALTIES: BASE[PENALTIES].replace(old, new)}


NAME = "vllm.v1.sample.penalties"


@pytest.mark.parametrize(
    ("name", "old", "new", "kind"),
    [
        ("apply", "logits - counts", "logits + counts", "body"),
        ("apply", "(logits, counts)", "(logits, counts, bias)", "signature"),
        ("apply", "def apply", "def use", "gone"),
        ("LIMIT", "LIMIT = 8", "LIMIT = 9", "body"),
        ("Holder", "len(self.rows)", "len(self.rows) + 1", "body"),
        ("Holder", "class Holder:", "class Holder(dict):", "signature"),
        ("Holder.count", "len(self.rows)", "len(self.rows) + 1", "body"),
    ],
)
def test_a_change_of_what_is_mirrored_needs_eyes(
    name: str, old: str, new: str, kind: str, tmp_path: Path
) -> None:
    root = checkout(tmp_path, mine=f"{NAME}:{name}")
    (found,) = examined(root, release(old, new))
    assert (found["what"], found["kind"], found["file"]) == (f"{NAME}.{name}", kind, PENALTIES)
    assert found["why"] == "mirrored by mine"
    assert found["ours"] == ["vllm/v1/readiness/mine.py"]
    assert (
        f"-{old}" in found["diff"].replace("-    ", "-").replace("    ", "")
        or old in (found["diff"])
    )
    (warning,) = mirrors.warnings([found])
    assert warning.startswith("mine re-implements what has changed")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Apply them."""', '"""Apply\n    all of them.\n    """'),
        ("LIMIT = 8", "LIMIT = 9"),
        ("return logits - counts", "return (\n        logits - counts  # rounded\n    )"),
    ],
)
def test_nothing_else_does(old: str, new: str, tmp_path: Path) -> None:
    assert examined(checkout(tmp_path, mine=f"{NAME}:apply"), release(old, new)) == []


def test_a_function_that_moved_is_said(tmp_path: Path) -> None:
    moved = {PENALTIES: "LIMIT = 8\n", "vllm/v1/ops.py": BASE[PENALTIES], WORDS: BASE[WORDS]}
    (found,) = examined(checkout(tmp_path, mine=f"{NAME}:apply"), moved)
    assert (found["kind"], found["now"]) == ("moved", "vllm/v1/ops.py:4")
    assert found["detail"] == "It is vllm.v1.ops.apply now."
    gone = {PENALTIES: "LIMIT = 8\n", WORDS: BASE[WORDS]}
    (found,) = examined(checkout(tmp_path / "gone", mine=f"{NAME}:apply"), gone)
    assert (found["kind"], found["now"]) == ("gone", None)


def test_another_function_under_an_imported_name_is_said(tmp_path: Path) -> None:
    other = "def apply(logits, counts):\n    return logits\n"
    swapped = {**BASE, "vllm/v1/ops.py": other, WORDS: "from vllm.v1.ops import apply\n"}
    (found,) = examined(checkout(tmp_path, mine="vllm.v1.sample.words:apply"), swapped)
    assert (found["kind"], found["now"]) == ("body", "vllm/v1/ops.py:1")
    assert found["detail"].startswith("It is vllm.v1.ops.apply now.")


def test_two_modules_share_one_finding_and_warn_each(tmp_path: Path) -> None:
    root = checkout(tmp_path, one=f"{NAME}:apply", two=f"{NAME}:apply")
    (found,) = examined(root, release("logits - counts", "logits"))
    assert found["why"] == "mirrored by one, two"
    assert len(list(mirrors.warnings([found]))) == 2


def test_what_another_section_shows_has_no_second_diff(tmp_path: Path) -> None:
    root = checkout(tmp_path, mine=f"{NAME}:apply")
    (found,) = examined(root, release("logits - counts", "logits"), {f"{NAME}.apply"})
    assert (found["elsewhere"], found["diff"]) == (True, "")
    assert list(mirrors.warnings([found]))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("vllm.v1.sample.penalties:gone", "penalties:gone is not in the pinned release"),
        ("vllm.v1.none:apply", "vllm.v1.none:apply is not in the pinned release"),
        ("vllm.v1.sample.penalties:Holder.lose", "Holder.lose is not in the pinned release"),
        ("apply", "'apply' is no name of upstream's"),
        ("torch.nn:Linear", "'torch.nn:Linear' is no name of upstream's"),
        ("", "'' is no name of upstream's"),
    ],
)
def test_a_name_that_the_pinned_release_lacks_is_refused(
    word: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(OverlayError) as caught:
        examined(checkout(tmp_path, mine=word), BASE)
    assert reason in str(caught.value)
    assert "vendor_overlay/vllm/v1/readiness/mine.py: line 3" in str(caught.value)


def test_a_module_may_mirror_nothing(tmp_path: Path) -> None:
    assert mirrors.declared(checkout(tmp_path, mine="nothing")) == []


def test_all_that_is_declared_is_in_the_pinned_release() -> None:
    base = from_installation(locate(site=str(UPSTREAM)), OVERLAY)
    pairs = mirrors.resolve(mirrors.declared(REPO), Definitions(base))
    names = {f"{mirror.module}:{mirror.name}" for mirror, _ in pairs}
    assert {
        "vllm.model_executor.layers.utils:apply_penalties",
        "vllm.v1.sample.ops.bad_words:apply_bad_words",
        "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
    } <= names


@pytest.mark.parametrize(
    "path",
    [
        p.relative_to(OURS).as_posix()
        for p in sorted(OURS.rglob("*.py"))
        if "provenance" not in p.parts
    ],
)
def test_each_module_says_what_it_mirrors(path: str) -> None:
    """Or that it mirrors nothing, which a reviewer can doubt."""
    if path.endswith("__init__.py") or path == "version.py":
        return
    said = [word for _, word in mirrors.words((OURS / path).read_text())]
    assert said
    assert (mirrors.NOTHING in said) == (said == [mirrors.NOTHING])
    assert len(set(said)) == len(said)
