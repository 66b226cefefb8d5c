"""Uses of upstream's names are found without running any code."""

from pathlib import Path
from typing import Any

import pytest
from review.fates import fates
from review.uses import upstream_uses
from support.names import BASE, BATCH, OURS, PACKAGE, USER, lay_out, line_of, uses_of_release
from support.series import upstream


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By name, what is known of each name that our module uses."""
    uses = uses_of_release(tmp_path_factory.mktemp("made"))
    return {entry["name"]: entry for entry in fates(uses, upstream(BASE), upstream(BASE))}


def test_each_use_is_found_where_it_is(entries: dict[str, dict[str, Any]]) -> None:
    push = entries["vllm.v1.batch.Batch.push"]
    assert (push["kind"], push["how"]) == ("function", ["holds a seam", "called"])
    assert push["users"] == [
        f"{BATCH}:{line_of(BASE[BATCH], '        self.rows.append') + 1} (seam)",
        f"{OURS}:{line_of(USER, 'batch.push')}",
    ]
    assert push["was"] == push["now"] == f"{BATCH}:{line_of(BASE[BATCH], 'def push')}"
    how = {name: entry["how"] for name, entry in entries.items() if entry["certain"]}
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


def test_names_without_inference_are_not_certain(
    entries: dict[str, dict[str, Any]],
) -> None:
    assert {name: entry["users"] for name, entry in entries.items() if not entry["certain"]} == {
        # A string that a loop hands to setattr, and a method of anything.
        "vllm.v1.batch.Runner.launch": [f"{OURS}:{line_of(USER, 'WATCHED')}"],
        "vllm.v1.batch.Runner.rest": [f"{OURS}:{line_of(USER, 'thing.rest')}"],
        "vllm.v1.batch['budget']": [f"{OURS}:{line_of(USER, 'state[')}"],
    }


def test_nothing_is_run_and_no_other_cache_is_used(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    files = {path: trap + text for path, text in BASE.items()}
    ours = {f"{PACKAGE}/__init__.py": trap, OURS: trap + USER}
    tree = lay_out(tmp_path / "review" / "tree", {**files, **ours})
    assert upstream_uses(tree, upstream(files), {BATCH: [range(1, 2)]})
    assert not (tmp_path / "ran").exists()
    assert {path.name for path in (tmp_path / "review").iterdir()} <= {"tree", ".jedi"}
    assert (tmp_path / "review" / ".jedi").is_dir()
