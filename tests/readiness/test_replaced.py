"""Functions that hold a seam, or are ours, and that somebody else has replaced."""

import functools
import re
import sys
from types import ModuleType
from typing import Any

import pytest
from support.modules import INPUT_BATCH, RUNNER, SAMPLER, overlaid
from support.sites import OVERLAY
from vllm.v1.readiness.engine import originals
from vllm.v1.readiness.watch import replaced, startup


def names(module: ModuleType) -> list[str]:
    """The replaced functions of a module, in its own terms."""
    found = [name for name, _ in replaced.replacements([module])]
    return [name.removeprefix(f"{module.__name__}.") for name in found]


def theirs(*args: Any, **kwargs: Any) -> Any:
    """What somebody else puts in place of a function."""


@pytest.mark.parametrize("path", [*OVERLAY.targets])
def test_each_seam_is_looked_at_and_in_place(path: str) -> None:
    module = overlaid(path)
    seams = [
        name
        for name, code in originals.functions(
            originals.code_of(module.__name__, module.__spec__.loader)
        )
        if replaced._has_seam(code)
    ]
    # On a CPU, vLLM puts objects of its own in place of kernels, and so do other tests here.
    for name in (name for name in seams if not name.endswith("_kernel")):
        assert [*replaced._layers(module, name)], name
    assert names(module) == []
    # Of a function that imports our module itself, nothing is known.
    imported = [line for line in _added(path) if re.match(r"from .* as readiness(_\w+)?$", line)]
    called = [line for line in _added(path) if re.search(r"^\s+.*\breadiness(_\w+)?\.\w", line)]
    attached = [line for line in called if "self.readiness." in line]
    assert bool(seams) == bool(called and (imported or attached))


def _added(path: str) -> list[str]:
    files = [file for patch in OVERLAY.series.patches for file in patch.files]
    return [
        line.decode()
        for file in files
        if file.path == path
        for hunk in file.hunks
        for line in hunk.new
    ]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (SAMPLER, "Sampler.forward"),
        (RUNNER, "GPUModelRunner.sample_tokens"),
        (INPUT_BATCH, "InputBatch.condense"),
    ],
)
def test_a_replaced_method_is_named_with_its_place(
    monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    module = overlaid(path)
    owner, method = name.split(".")
    monkeypatch.setattr(getattr(module, owner), method, theirs)
    ((found, by),) = replaced.replacements([module])
    assert found == f"{module.__name__}.{name}"
    assert by == f"{__name__}, {__file__}:{theirs.__code__.co_firstlineno}"


def test_functions_of_ours_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("vllm.v1.readiness.")]:
        assert names(sys.modules[name]) == [], name
    monkeypatch.setattr(startup, "start", theirs)
    assert names(startup) == ["start"]


def test_a_function_without_a_seam_is_theirs_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    module = overlaid(SAMPLER)
    monkeypatch.setattr(module.Sampler, "compute_logprobs", staticmethod(theirs))
    assert names(module) == []


def test_a_wrapped_function_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = overlaid(SAMPLER)
    original = module.Sampler.forward

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(module.Sampler, "forward", wrapper)
    assert names(module) == []


def test_a_class_is_replaced_as_far_as_it_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    module = overlaid(SAMPLER)
    kept = type("Kept", (module.Sampler,), {})
    other = type("Other", (module.Sampler,), {"forward": theirs})
    monkeypatch.setattr(module, "Sampler", kept)
    assert names(module) == []
    monkeypatch.setattr(module, "Sampler", other)
    assert names(module) == ["Sampler.forward"]


def test_objects_that_cannot_be_looked_at_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(modules: object) -> Any:
        raise RuntimeError("looked at")

    monkeypatch.setattr(replaced, "replacements", fail)
    replaced.report()
