"""What makes the classes with our seams, what overrides them, and what replaces them."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from review import reach, review
from review.definitions import Definitions
from review.references import References
from review.wheels import Release
from support import classes, series
from support.classes import BASE, CHANGED, UNCHANGED

RUNNER = "vllm.v1.runner"
SEAMS = [(RUNNER, "Runner.finish"), (RUNNER, "Runner.sample")]


def found_in(release: dict[str, str], base: dict[str, str] = BASE) -> list[dict[str, Any]]:
    pair = (References(series.upstream(texts)) for texts in (base, release))
    return reach.examine(SEAMS, *pair)


@pytest.mark.parametrize("name", CHANGED)
def test_a_seam_that_does_not_run_any_more_warns(name: str) -> None:
    release, expected = CHANGED[name]
    warnings = list(reach.warnings(found_in(release)))
    assert any(expected in warning for warning in warnings), warnings


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_base_release_has_too_is_no_change(name: str) -> None:
    release, _ = CHANGED[name]
    assert list(reach.warnings(found_in(release, release))) == []


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_seam_that_runs_as_before_does_not_warn(name: str) -> None:
    assert list(reach.warnings(found_in(UNCHANGED[name]))) == []


@pytest.mark.parametrize("name", CHANGED)
def test_no_such_release_is_unchanged(name: str, tmp_path: Path) -> None:
    release, expected = CHANGED[name]
    result = reviewed(release, tmp_path)
    assert result["verdict"] == "needs eyes"
    assert any(expected in warning for warning in result["warnings"])
    assert expected in (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text().replace("\\", "")


@pytest.mark.parametrize("name", UNCHANGED)
def test_such_a_release_is_unchanged(name: str, tmp_path: Path) -> None:
    result = reviewed(UNCHANGED[name], tmp_path)
    assert result["verdict"] == "unchanged"
    text = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()
    assert f"**unchanged**: all {review.PROVEN}. " in text


def reviewed(release: dict[str, str], root: Path) -> dict[str, Any]:
    overlay = series.checkout(root / "checkout")
    wheel = "vllm-0.23.0-py3-none-any.whl"
    other = Release("0.23.0", wheel, "a" * 64, "a test's", series.upstream(release))
    return review.of_release(overlay, series.upstream(BASE), other, root / "out", mends={})


def test_an_attribute_that_decides_what_is_made_counts() -> None:
    made = "        self.runner: Runner = Runner()\n"
    guarded = f"        self.old = config.old\n        if not self.old:\n    {made}"
    base = classes.with_edits(classes.WORKER, (made, guarded))
    text = base[classes.WORKER]
    release = {**base, classes.WORKER: text.replace("self.old = config.old", "self.old = True")}
    assert list(reach.warnings(found_in(base, base))) == []
    (warning,) = reach.warnings(found_in(release, base))
    assert "makes vllm.v1.runner.Runner by self.old, which it sets otherwise" in warning


def test_the_order_of_classes_is_pythons() -> None:
    """A class between two others hides the one that both derive from."""
    late = (
        "from vllm.v1.runner import Runner\n\n\n"
        "class Left(Runner):\n    pass\n\n\n"
        "class Right(Runner):\n    def finish(self):\n        return 0\n\n\n"
        "class Both(Left, Right):\n    pass\n"
    )
    release = classes.with_files(late=late)
    code = References(series.upstream(release))
    scope: dict[str, Any] = {}
    exec(late.replace("from vllm.v1.runner import Runner", "class Runner: pass"), scope)
    names = [each.__name__ for each in scope["Both"].__mro__[:-1]]
    assert [name for _, name in code.order(("vllm.v1.late", "Both"))] == names
    overriding = {f["name"] for f in found_in(release) if f["what"] == reach.OVERRIDDEN}
    assert overriding == {"vllm.v1.late.Right"}


def test_a_release_is_parsed_once_and_forgotten_with_its_files() -> None:
    """A matrix of releases shares the pinned one, and would else hold every other in memory."""
    pinned, release = series.upstream(BASE), series.upstream(BASE)
    code = References.of(pinned)
    assert References.of(pinned) is code
    assert Definitions.of(pinned) is code.definitions
    assert References.of(release) is not code
    module = code.definitions.module(RUNNER)
    assert Definitions.of(pinned).module(RUNNER) is module
    held = weakref.ref(References.of(release))
    del release
    gc.collect()
    assert held() is None
    assert References.of(pinned) is code
