"""Functions that the features of the scheduler do not call, replaced at any time.

Both sides of a lockstep see the replacement. It must be called as often on ours, on which the
features are on, as on the other, on which upstream's code runs.
"""

import functools
import os
import types
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from support import scheduling
from support.modules import INPUT_BATCH, overlaid, pristine
from support.scheduling import Lockstep, Setup
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.readiness.core import bounds, schedule, update_outputs
from vllm.v1.readiness.engine import gauges, originals, subclasses, switch
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.utils import ConstantList

Patch = pytest.MonkeyPatch
SKIPPED = {"schedule": schedule._SKIPPED, "update-outputs": update_outputs._SKIPPED}
#: Name of an owner and of its function, for each function that a feature does not call.
FUNCTIONS = sorted(
    {
        (owner, name)
        for skipped in SKIPPED.values()
        for owner, names in skipped._asdict().items()
        for name in names
    }
)
#: Owner to how it is found from a scheduler.
OBJECTS: dict[str, Callable[[Any], Any]] = {
    "scheduler": lambda side: side,
    "manager": lambda side: side.kv_cache_manager,
    "coordinator": lambda side: side.kv_cache_manager.coordinator,
    "group": lambda side: side.kv_cache_manager.coordinator.single_type_managers[0],
    "pool": lambda side: side.kv_cache_manager.block_pool,
    "grammars": lambda side: side.structured_output_manager,
    "blocks": lambda side: side.kv_cache_manager.empty_kv_cache_blocks,
    "request": lambda side: next(iter(side.requests.values())),
}
CLASSES = {
    "grammars": StructuredOutputManager,
    "request": Request,
    "status": RequestStatus,
    "tokens": ConstantList,
}


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: Patch) -> None:
    """Let the events of both sides have the same times."""
    monkeypatch.setattr("time.monotonic", lambda: 1.0)
    monkeypatch.setattr("time.time", lambda: 1.0)


class Calls:
    """Counts the calls of replacements, by the value of VLLM_READINESS: by side."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def around(self, value: Any, wraps: bool = False) -> Any:
        """Return a replacement of a function, property or class, which counts its calls."""
        if isinstance(value, property):
            return property(self.around(value.fget, wraps))
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self.around(value.__func__, wraps))

        def replacement(*args: Any, **named: Any) -> Any:
            self.counts[os.environ[switch.NAME]] += 1
            return value(*args, **named)

        return functools.wraps(value)(replacement) if wraps else replacement

    @property
    def alike(self) -> bool:
        """Whether both sides have made calls, and as many."""
        counts = [*self.counts.values()]
        return len(counts) == 2 and counts[0] == counts[1]


def setup_of(name: str, **options: Any) -> Setup:
    """Return options under which upstream calls a function for each request."""
    if name == "_mamba_block_aligned_split":
        options["groups"] = "hybrid, aligned"
    if name == "_get_num_evictable_blocks":
        options["caching"] = False
    asynchronous = options.pop("asynchronous", True)
    return Setup(asynchronous=asynchronous, in_flight=1 + asynchronous, blocks=90, **options)


def started(setup: Setup, steps: int = 6) -> Lockstep:
    """Make schedulers, and let three requests decode for some steps."""
    lockstep = Lockstep(setup)
    for _ in range(3 if steps else 0):
        lockstep.add(5, 30)
    for _ in range(steps):
        lockstep.step()
    return lockstep


def replace_in_class(lockstep: Lockstep, owner: str, name: str, patch: Patch, new: Any) -> None:
    """Replace a function in the class or module that defines it; ``new`` makes it from the old."""
    if owner in OBJECTS or owner in CLASSES:
        kind = CLASSES.get(owner) or type(OBJECTS[owner](lockstep.sides[0]))
        base = next(base for base in kind.__mro__ if name in vars(base))
        patch.setattr(base, name, new(vars(base)[name]))
        return
    kind = {
        "functions": type(lockstep.sides[0]).__mro__[-4],
        "manager_functions": type(lockstep.sides[0].kv_cache_manager),
        "group_functions": SingleTypeKVCacheManager,
    }[owner]
    namespace = originals.namespace(kind)
    patch.setitem(namespace, name, new(namespace[name]))


@pytest.fixture
def messages(monkeypatch: Patch) -> list[str]:
    """Lines that the features log; otherwise each comes once per process."""
    lines: list[str] = []
    monkeypatch.setattr(
        subclasses.logger, "warning_once", lambda line, *values: lines.append(line % values)
    )
    return lines


#: Owner, function, and whether it is replaced in the owner's class or in each instance.
PLACES = [(*function, False) for function in FUNCTIONS] + [
    (owner, name, True)
    for owner, name in FUNCTIONS
    if owner in OBJECTS and owner not in ("blocks", "request")
]


@pytest.mark.parametrize(
    ("when", "asynchronous"),
    [("before", True), ("before", False), ("between steps", True), ("in a step", True)],
)
@pytest.mark.parametrize(("owner", "name", "of_instance"), PLACES)
def test_a_replaced_function_is_called_until_it_is_restored(
    owner: str,
    name: str,
    of_instance: bool,
    when: str,
    asynchronous: bool,
    fallbacks: dict[tuple[str, str], int],
    messages: list[str],
    monkeypatch: Patch,
) -> None:
    if name == "cache_blocks" and not asynchronous and owner == "manager":
        pytest.skip("only asynchronous scheduling calls it")
    early, calls = when == "before", Calls()
    lockstep = started(setup_of(name, asynchronous=asynchronous), 0 if early else 6)
    assert fallbacks == {}
    with monkeypatch.context() as patch:

        def replace() -> None:
            for side in lockstep.sides if of_instance else ():
                target = OBJECTS[owner](side)
                replacement = calls.around(getattr(target, name), early)
                patch.setitem(vars(target), name, replacement)
            if not of_instance:
                replace_in_class(lockstep, owner, name, patch, lambda old: calls.around(old, early))

        act(lockstep, replace, when == "in a step")
        for _ in range(3 if early else 0):
            lockstep.add(5, 30)
        for _ in range(9):
            lockstep.step()
        assert calls.alike
    words = {word for word, skipped in SKIPPED.items() if name in getattr(skipped, owner)}
    assert fallbacks == {(word, gauges.REPLACED): 1 for word in words}
    assert len(messages) == len(words)
    assert all(f"{name} (by " in line and __file__ in line for line in messages)
    before, served = calls.counts.copy(), Calls()
    monkeypatch.setattr(bounds.Cache, "bounds", served.around(bounds.Cache.bounds))
    lockstep.finish()
    assert calls.counts == before
    assert served.counts
    assert sum(fallbacks.values()) == len(words)


def act(lockstep: Lockstep, change: Callable[[], None], between: bool) -> None:
    """Make a change before a step, or between its schedule and its output."""
    if not between:
        change()
        lockstep.step()
        return
    run = lockstep._run

    def changed(step: Any) -> Any:
        output = run(step)
        change()
        return output

    lockstep._run = changed  # type: ignore[method-assign]
    lockstep.step()
    lockstep._run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("name", bounds.REQUEST)
def test_a_method_of_a_request_that_is_replaced_is_called(
    name: str, between: bool, monkeypatch: Patch
) -> None:
    """While its prompt is computed; later, from its next block on."""
    calls = Calls()
    lockstep = started(setup_of(name), 1)

    def replace() -> None:
        for side in lockstep.sides:
            request = OBJECTS["request"](side)
            setattr(request, name, calls.around(getattr(request, name)))

    monkeypatch.setattr(scheduling, "_OWN", {*scheduling._OWN, name})  # no state of upstream's
    act(lockstep, replace, between)
    lockstep.finish()
    assert calls.alike


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("between", [True, False])
def test_a_reply_ends_at_a_limit_that_is_lowered(asynchronous: bool, between: bool) -> None:
    lockstep = started(setup_of("limit", asynchronous=asynchronous))

    def lower() -> None:
        for side in lockstep.sides:
            OBJECTS["request"](side).max_tokens = 11

    act(lockstep, lower, between)
    lockstep.finish()


def test_a_request_of_a_derived_class_is_upstreams(
    fallbacks: dict[tuple[str, str], int], monkeypatch: Patch
) -> None:
    calls = Calls()

    class Derived(Request):  # type: ignore[misc]
        append_output_token_ids = calls.around(Request.append_output_token_ids)

    monkeypatch.setattr(scheduling, "Request", Derived)
    started(setup_of("derived")).finish()
    assert calls.alike
    assert fallbacks == {("schedule", gauges.OTHER_INPUT): 3}


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("kv_cache_manager", "allocate_slots"),
        ("kv_cache_manager.block_pool", "get_num_free_blocks"),
        ("structured_output_manager", "should_advance"),
    ],
)
def test_an_object_that_is_replaced_later_is_looked_at(
    name: str, function: str, fallbacks: dict[tuple[str, str], int], messages: list[str]
) -> None:
    calls = Calls()
    lockstep = started(setup_of(function))
    for side in lockstep.sides:
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, side)
        old = getattr(owner, last)
        kind = type("Own", (type(old),), {function: calls.around(getattr(type(old), function))})
        new: Any = object.__new__(kind)
        vars(new).update(vars(old))
        setattr(owner, last, new)
    lockstep.finish()
    assert calls.alike
    assert sum(fallbacks.values()) == len(messages) == 1


class Odd:
    """A replacement of a method that cannot be compared, and has no attributes."""

    def __init__(self, function: Any) -> None:
        vars(self)["function"] = function

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return types.MethodType(vars(self)["function"], owner)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"), [("scheduler", "_update_after_schedule"), ("coordinator", "cache_blocks")]
)
def test_a_replacement_of_any_type_is_called(
    owner: str, name: str, later: bool, monkeypatch: Patch
) -> None:
    calls = Calls()
    lockstep = started(setup_of(name), 6 if later else 0)
    replace_in_class(lockstep, owner, name, monkeypatch, lambda old: Odd(calls.around(old)))
    if not later:
        lockstep.add(5, 30)
    lockstep.finish()
    assert calls.alike


class Unhashable:
    """A loader that cannot be a key, and raises an error."""

    __hash__ = None  # type: ignore[assignment]

    def get_code(self, name: str) -> Any:
        raise SyntaxError(name)


class Raising(Unhashable):
    """A loader of a file that has changed."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@pytest.mark.parametrize("loader", [Unhashable(), Raising(), None])
def test_a_function_without_readable_code_is_not_vllms_own(loader: Any, monkeypatch: Patch) -> None:
    module = pristine(INPUT_BATCH)
    function = types.FunctionType(module.InputBatch.condense.__code__, vars(module))
    monkeypatch.setattr(module, "__spec__", ModuleSpec(module.__spec__.name, loader))
    functools.update_wrapper(function, module.InputBatch.condense)
    del function.__wrapped__  # type: ignore[attr-defined]
    assert not originals.is_vllms(function)


def test_a_function_is_vllms_own_if_its_file_has_its_code(monkeypatch: Patch) -> None:
    module = pristine(INPUT_BATCH)
    method = module.InputBatch.condense
    assert originals.is_vllms(method)
    assert originals.is_vllms(overlaid(INPUT_BATCH).InputBatch.condense)
    assert originals.all_vllms(object.__new__(module.InputBatch), ["condense", "add_request"])
    assert not originals.all_vllms(object.__new__(module.InputBatch), ["condense", "no_such"])

    def named_alike(self: Any) -> None:
        """Have the name of another function."""

    functools.update_wrapper(named_alike, method)
    assert not originals.is_vllms(named_alike)
    del named_alike.__wrapped__  # type: ignore[attr-defined]
    assert not originals.is_vllms(named_alike)
    inside = types.FunctionType(named_alike.__code__, vars(module))
    functools.update_wrapper(inside, method)
    del inside.__wrapped__  # type: ignore[attr-defined]
    assert not originals.is_vllms(inside)  # compiled and run in vLLM's module
    monkeypatch.setattr(module.InputBatch, "condense", module.InputBatch.swap_states)
    assert not originals.all_vllms(object.__new__(module.InputBatch), ["condense"])
    assert originals.is_vllms(module.InputBatch.swap_states)
    code = module.InputBatch.swap_states.__code__
    monkeypatch.setattr(module.InputBatch.swap_states, "__code__", named_alike.__code__)
    assert not originals.is_vllms(module.InputBatch.swap_states)
    monkeypatch.setattr(module.InputBatch.swap_states, "__code__", code)
    assert not originals.is_vllms(len)
    assert not originals.is_vllms(None)
    assert originals.is_made_by(get_request_block_hasher(4, hash), get_request_block_hasher)
    assert not originals.is_made_by(lambda _: [], get_request_block_hasher)
