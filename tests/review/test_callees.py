"""Calls from the seams, and from what we call, inherit or mirror, are followed two levels deep."""

from pathlib import Path
from typing import Any

import pytest
from review import callees, mirrors
from review.callees import Root
from review.calls import Calls, Reference
from review.definitions import Definitions
from review.uses import Use
from support import series
from support.names import OURS
from support.series import replaced, upstream

RUNNER, OPS, BUFFERS, MODES, SUB = (
    f"vllm/v1/{name}.py" for name in ("runner", "ops", "buffers", "modes", "sub")
)
BASE = {
    RUNNER: '''\
from typing import TYPE_CHECKING, Optional

import vllm.v1.ops as operations
from vllm.v1 import buffers
from vllm.v1.modes import Mode, MOST, NAMES
from vllm.v1.ops import kernel, sample

if TYPE_CHECKING:
    from vllm.v1.buffers import Buffer


class Base:
    inherited_limit = 3

    def prepare(self, rows):
        return self.check(rows)

    def check(self, rows):
        return len(rows)


class Sampler:
    def forward(self, logits):
        return logits

    def other(self, logits):
        return logits


class Runner(Base):
    def __init__(self, sampler: "Sampler", spare: Optional["Buffer"] = None) -> None:
        self.sampler = sampler
        self.buffer = buffers.make(3)
        self.spare = spare
        self.anything = unknown()

    @property
    def limit(self) -> int:
        return MOST

    def step(self, mode: Mode, names=NAMES):
        """Hold a seam."""
        rows = super().prepare(names)
        kernel[(1,)](rows)
        picked = self.buffer
        picked.send()
        if self.spare is not None:
            self.spare.receive()
        self.anything.send()
        self.sampler(rows)
        return sample(rows, self.limit, self.inherited_limit)
''',
    OPS: """\
from vllm.v1.modes import TINY


def kernel(rows):
    return rows


def sample(rows, limit, other):
    return draw(rows) + TINY


def draw(rows):
    return seed(rows)


def seed(rows):
    return hash(rows)


def send(rows):
    return rows
""",
    BUFFERS: """\
class Buffer:
    dtype = "int32"

    def __init__(self, size: int) -> None:
        self.np = zeros(size, self.dtype)

    def send(self):
        return self.np

    def receive(self):
        return self.np


def make(size: int) -> Buffer:
    return Buffer(size)
""",
    MODES: """\
from typing import Literal

Mode = Literal["raw", "processed"]
MOST = 8
NAMES = ("a", "b")
TINY = 1
""",
    SUB: "UNRELATED = 1\n",
}
HELD = "holds a seam"


def roots(*names: str, followed: bool = True) -> list[Root]:
    base = Definitions(upstream(BASE))
    found = []
    for name in names:
        definition = base.find("vllm.v1.runner", name)
        assert definition is not None
        reference = Reference(definition.module, definition.name, definition)
        found.append(Root(reference, HELD, (RUNNER,), followed=followed))
    return found


def examined(release: dict[str, str], *, known: set[str] | None = None) -> dict[str, Any]:
    before, after = Definitions(upstream(BASE)), Definitions(upstream(release))
    findings = callees.examine(roots("Runner.step"), before, after, known or set())
    return {found["what"].removeprefix("vllm.v1."): found for found in findings}


def changed(path: str, *edits: tuple[str, str]) -> dict[str, str]:
    return {**BASE, path: replaced(BASE[path], *edits)}


@pytest.mark.parametrize(
    ("path", "old", "new", "what", "kind", "why"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "imported function": (
                *(OPS, "def sample(rows, limit, other)", "def sample(rows, limit, other, more)"),
                *("ops.sample", "signature", "v1.runner.Runner.step calls it"),
            ),
            "second level": (
                *(OPS, "return seed(rows)", "return -seed(rows)", "ops.draw", "body"),
                "v1.runner.Runner.step calls v1.ops.sample calls it",
            ),
            "kernel": (
                *(OPS, "def kernel(rows):\n    return rows", "def kernel(rows):\n    return 0"),
                *("ops.kernel", "body", "Runner.step calls it"),
            ),
            "method of a base class": (
                *(RUNNER, "return self.check(rows)", "return 0", "runner.Base.prepare", "body"),
                "Runner.step calls it",
            ),
            "method that a base class calls": (
                *(RUNNER, "return len(rows)", "return 0", "runner.Base.check", "body"),
                "calls v1.runner.Base.prepare calls it",
            ),
            "method of what a call has made": (
                *(
                    BUFFERS,
                    "def send(self):\n        return self.np",
                    "def send(self):\n        pass",
                ),
                *("buffers.Buffer.send", "body", "Runner.step calls it"),
            ),
            "method of a parameter's class": (
                *(BUFFERS, "def receive(self)", "def receive(self, rows)"),
                *("buffers.Buffer.receive", "signature", "Runner.step calls it"),
            ),
            "called instance": (
                *(RUNNER, "def forward(self, logits)", "def forward(self, logits, drafts)"),
                *("runner.Sampler.forward", "signature", "Runner.step calls it"),
            ),
            "property": (
                *(RUNNER, "return MOST", "return MOST + 1", "runner.Runner.limit", "body"),
                "Runner.step calls it",
            ),
            "literal": (
                *(MODES, '["raw", "processed"]', '["raw"]', "modes.Mode", "body"),
                "Runner.step reads it",
            ),
            "default that is a constant": (
                *(MODES, '("a", "b")', '("a",)', "modes.NAMES", "body", "Runner.step reads it"),
            ),
            "constant that grows": (
                *(MODES, 'NAMES = ("a", "b")\n', 'NAMES = ("a", "b")\nNAMES += ("c",)\n'),
                *("modes.NAMES", "body", "Runner.step reads it"),
            ),
            "constant of a property": (
                *(MODES, "MOST = 8", "MOST = 9", "modes.MOST", "body"),
                "Runner.step calls v1.runner.Runner.limit reads it",
            ),
            "constant of a class": (
                *(RUNNER, "inherited_limit = 3", "inherited_limit = 4"),
                *("runner.Base.inherited_limit", "body", "Runner.step reads it"),
            ),
            "constant of a callee": (
                *(MODES, "TINY = 1", "TINY = 2", "modes.TINY", "body"),
                "Runner.step calls v1.ops.sample reads it",
            ),
        }.items()
    ],
)
def test_a_change_within_reach_is_said_with_its_chain(
    path: str, old: str, new: str, what: str, kind: str, why: str
) -> None:
    findings = examined(changed(path, (old, new)))
    assert findings.keys() == {what}
    found = findings[what]
    assert (found["kind"], found["file"]) == (kind, path)
    assert why in found["why"]
    assert found["why"].endswith(f"v1.runner.Runner.step: {HELD}")
    assert found["ours"] == [RUNNER]
    assert "\n-" in found["diff"] or "\n+" in found["diff"]
    (warning,) = callees.warnings([found])
    assert f"v1.{what}" in warning


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "three levels": (OPS, "return hash(rows)", "return 0"),
            "namesake of an unknown value's method": (
                *(OPS, "def send(rows):\n    return rows", "def send(rows):\n    return 0"),
            ),
            "method that nobody calls": (RUNNER, "def other(self", "def another(self"),
            "docstring": (RUNNER, '"""Hold a seam."""', '"""Hold\n\n        two.\n        """'),
            "comment": (OPS, "return seed(rows)", "return seed(rows)  # here"),
            "elsewhere": (SUB, "UNRELATED = 1", "UNRELATED = 2"),
            "the function itself": (RUNNER, "picked.send()", "picked.send(1)"),
        }.items()
    ],
)
def test_nothing_else_is(path: str, old: str, new: str) -> None:
    assert examined(changed(path, (old, new))) == {}


def test_a_method_that_comes_to_hide_the_inherited_one_is_said() -> None:
    """The caller, its class's bases and the method that was called are all unchanged."""
    hiding = "    def check(self, rows):\n        return 0\n\n    @property\n"
    release = changed(RUNNER, ("    @property\n", hiding))
    # From Base alone nobody can know; Runner.step would have to call check itself.
    assert examined(release) == {}
    base = {**BASE, RUNNER: BASE[RUNNER].replace("super().prepare(names)", "self.check(names)")}
    after = {
        **release,
        RUNNER: release[RUNNER].replace("super().prepare(names)", "self.check(names)"),
    }
    before = Definitions(upstream(base))
    definition = before.find("vllm.v1.runner", "Runner.step")
    assert definition is not None
    root = Root(Reference(definition.module, definition.name, definition), HELD, (RUNNER,))
    (found,) = callees.examine([root], before, Definitions(upstream(after)), set())
    assert found["what"] == "vllm.v1.runner.Base.check"
    assert found["detail"].startswith("It is vllm.v1.runner.Runner.check now.")


def test_an_import_swapped_in_a_file_that_we_do_not_patch_is_said() -> None:
    other = {"vllm/v1/other.py": "TINY = 2\n"}
    release = {**changed(OPS, ("vllm.v1.modes import", "vllm.v1.other import")), **other}
    found = examined(release)["modes.TINY"]
    assert found["detail"].startswith("It is vllm.v1.other.TINY now.")


def test_a_constant_that_moved_with_its_value_is_not() -> None:
    other = {"vllm/v1/other.py": "TINY = 1\n"}
    release = {**changed(MODES, ("TINY = 1\n", "from vllm.v1.other import TINY\n")), **other}
    assert examined(release) == {}


def test_a_callee_that_is_gone_is_left_to_the_diff_of_its_caller() -> None:
    release = changed(OPS, ("return draw(rows) + TINY", "return TINY"), ("def draw(", "def drawn("))
    assert examined(release).keys() == {"ops.sample"}


def test_what_is_shown_elsewhere_is_left_out() -> None:
    release = changed(OPS, ("return draw(rows)", "return -draw(rows)"))
    assert examined(release, known={"vllm.v1.ops.sample"}) == {}


def test_a_buffer_of_another_type_is_said_of_those_who_read_it() -> None:
    """Nothing of ours calls its constructor: only the attribute is used."""
    base = Definitions(upstream(BASE))
    place = ("vllm.v1.buffers", "Buffer.np")
    use = Use("vllm.v1.buffers.Buffer.np", "attribute", "read", f"{OURS}:3", True, (place,))
    setters = callees.roots_of([use], [], [], base)
    for old, new, what in (
        ("zeros(size, self.dtype)", "zeros(size, int64)", "Buffer.__init__"),
        ('dtype = "int32"', 'dtype = "int64"', "Buffer.dtype"),
    ):
        release = Definitions(upstream(changed(BUFFERS, (old, new))))
        (found,) = callees.examine(setters, base, release, set())
        assert found["what"] == f"vllm.v1.buffers.{what}"
        assert "sets vllm.v1.buffers.Buffer.np, used by ours" in found["why"]
        assert found["ours"] == [OURS]


def test_methods_that_our_classes_inherit_are_looked_at(tmp_path: Path) -> None:
    overlay = series.checkout(tmp_path)
    (tmp_path / "vendor_overlay" / OURS).write_text(
        "from vllm.v1.runner import Sampler\n\n\n"
        "class Mine(Sampler):\n    def forward(self, logits):\n        return logits\n"
    )
    base = upstream(BASE)
    inherited = list(callees.inherited_methods(overlay, base))
    assert [(d.full_name, path) for d, path in inherited] == [
        ("vllm.v1.runner.Sampler.other", OURS)
    ]
    before = Definitions(base)
    found_roots = callees.roots_of([], [], inherited, before)
    release = changed(RUNNER, ("def other(self, logits)", "def other(self, logits, more)"))
    (found,) = callees.examine(found_roots, before, Definitions(upstream(release)), set())
    assert (found["kind"], found["why"]) == ("signature", "inherited by ours")


def test_what_a_mirrored_function_calls_is_followed() -> None:
    base = Definitions(upstream(BASE))
    mirror = mirrors.Mirror(OURS, 3, "vllm.v1.ops", "sample")
    found_roots = callees.roots_of([], mirrors.resolve([mirror], base), [], base)
    release = Definitions(upstream(changed(OPS, ("return seed(rows)", "return 0"))))
    (found,) = callees.examine(found_roots, base, release, set())
    assert found["why"] == "v1.ops.sample calls it; v1.ops.sample: mirrored by ours"


def test_types_that_refer_to_each_other_end() -> None:
    lines = ("self.x = self.y", "self.y = self.x", "self.x.g()")
    text = "class A:\n    def f(self):\n" + "".join(f"        {line}\n" for line in lines)
    base = Definitions(upstream({"vllm/a.py": text}))
    definition = base.find("vllm.a", "A.f")
    assert definition is not None
    assert Calls(base).references(definition) == []


@pytest.mark.parametrize(
    ("value", "counts"),
    [("Field(default=1, ge=1)", False), ("Field(default=2, ge=1)", True), ("2", True)],
)
def test_limits_on_the_values_of_a_setting_change_no_value(value: str, counts: bool) -> None:
    text = "class Config:\n    size: int = 1\n\n\ndef f(config: Config):\n    return config.size\n"
    sides = (text, text.replace("= 1", f"= {value}"))
    base, release = (Definitions(upstream({"vllm/a.py": side})) for side in sides)
    definition = base.find("vllm.a", "f")
    assert definition is not None
    root = Root(Reference("vllm.a", "f", definition), HELD, ())
    findings = callees.examine([root], base, release, set())
    assert [found["what"] for found in findings] == ["vllm.a.Config.size"] * counts


def test_of_a_class_that_is_called_only_what_makes_an_instance_is_shown() -> None:
    changes = (("class Buffer:", "class Buffer(dict):"), ("def send(self)", "def send(self, more)"))
    release = changed(BUFFERS, *changes)
    base = Definitions(upstream(BASE))
    make = base.find("vllm.v1.buffers", "make")
    assert make is not None
    root = Root(Reference("vllm.v1.buffers", "make", make), HELD, ())
    (found,) = callees.examine([root], base, Definitions(upstream(release)), set())
    assert (found["what"], found["detail"]) == ("vllm.v1.buffers.Buffer", "Base dict is new.")
    assert "+class Buffer(dict):" in found["diff"]
    assert "send" not in found["diff"]


def test_a_warning_names_a_few() -> None:
    findings = [{"what": f"vllm.v1.ops.f{number}"} for number in range(20)]
    (warning,) = callees.warnings(findings)
    assert warning.startswith("20 definitions have changed")
    assert warning.endswith("v1.ops.f7 and 12 more")
