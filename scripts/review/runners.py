"""Which model runner a release takes for which models, read from its sources.

Model Runner V1 holds most seams. :data:`SELECTOR` decides; it is evaluated with three values,
for a model of one architecture and otherwise nothing special: what is not known is taken not to
be asked for, and is listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from review.changes import change
from review.definitions import FUNCTION, Definitions
from review.references import Place, References

#: What decides between the two runners; what the maintainer sets against it; the runners.
SELECTOR = ("vllm.config.vllm", "VllmConfig.use_v2_model_runner")
ENVIRONMENT, VARIABLE = "vllm.envs", "VLLM_USE_V2_MODEL_RUNNER"
V1 = ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
V2 = ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner")

#: Stands for a model whose architecture no collection names.
OTHER = "any other model"


class _Unknown:
    """A value that the sources do not determine."""


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class _Architectures:
    """The list of architectures of the model in question."""


@dataclass
class Choice:
    """For which models a release takes Model Runner V2 where nobody asks for either.

    Attributes:
        v2: the architectures that V2 serves; :data:`OTHER` is one of them if it serves all
            that are not named.
        v1: those that V1 serves.
        unclear: those for which the sources do not say.
        tests: the tests that were taken not to matter, in their order.
        depends: the definitions that the choice depends on.
    """

    v2: list[str] = field(default_factory=list)
    v1: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    depends: list[Place] = field(default_factory=list)


def choice(code: References) -> Choice | None:
    """Read what a release chooses; None if it has no selector."""
    if code.find(SELECTOR) is None:
        return None
    found = Choice()
    probe = _Evaluation(code.definitions, OTHER)
    probe.call(SELECTOR)
    names = sorted(probe.strings)
    for architecture in [*names, OTHER]:
        evaluation = _Evaluation(code.definitions, architecture)
        value = evaluation.call(SELECTOR)
        kind = found.unclear if value is UNKNOWN else found.v2 if value else found.v1
        kind.append(architecture)
        found.tests += [test for test in evaluation.tests if test not in found.tests]
        found.depends += [place for place in evaluation.read if place not in found.depends]
    return found


def examine(base: References, release: References) -> dict[str, Any] | None:
    """Compare what two releases choose.

    Returns:
        The entry "runners" in review.json; None if the base has but one runner.
    """
    before, after = choice(base), choice(release)
    if before is None:
        return None
    changed = []
    for place in before.depends:
        fate = change(base.definitions, release.definitions, *place)
        if fate.fate != "same":
            changed.append({"name": ".".join(place), "fate": fate.fate, "detail": fate.detail})
    known = {".".join(place) for place in before.depends}
    new = [".".join(place) for place in (after.depends if after else ())]
    changed += [{"name": n, "fate": "new", "detail": ""} for n in new if n not in known]
    if _variable(base) != _variable(release):
        changed.append({"name": f"{ENVIRONMENT}.{VARIABLE}", "fate": "body", "detail": ""})
    both = [before, after] if after else [before]
    named = sorted({name for each in both for name in (*each.v1, *each.v2)} - {OTHER})
    return {
        "variable": VARIABLE,
        "before": _listed(before, named),
        "after": _listed(after, named) if after else None,
        "changed": changed,
    }


def _variable(code: References) -> list[str]:
    """How the environment variable is declared and read."""
    module = code.definitions.module(ENVIRONMENT)
    texts = []
    for node in ast.walk(module.tree) if module else ():
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            texts += [ast.unparse(v) for k, v in pairs if getattr(k, "value", "") == VARIABLE]
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == VARIABLE:
            texts.append(ast.unparse(node))
    return texts


def dead(runners: Mapping[str, Any] | None) -> list[str]:
    """The models that V1 serves in the base release and not in the other, unless told to."""
    if not runners or not runners["after"]:
        return []
    before, after = runners["before"], runners["after"]
    return [name for name in after["v2"] if name in before["v1"]]


def sentences(runners: Mapping[str, Any] | None, base: str, release: str) -> Iterator[str]:
    """What the choice is, for people, the important first.

    Args:
        runners: the result of :func:`examine`.
        base: the release that the overlay is for.
        release: the other one.
    """
    if runners is None:
        return
    after = runners["after"]
    if after is None:
        yield (
            f"what chose the model runner ({'.'.join(SELECTOR)}) is gone: "
            f"read which one {release} takes"
        )
        return
    now, was = _served(after), _served(runners["before"])
    if after["unclear"]:
        names = _joined(after["unclear"])
        yield f"which model runner {release} takes for {names} cannot be told from its sources"
    elif now == was:
        yield f"{release} takes Model Runner V2 for {now} by default, as {base} does"
    else:
        yield f"{release} takes Model Runner V2 for {now} by default; {base} does for {was}"


def warnings(runners: Mapping[str, Any] | None) -> Iterator[str]:
    """A warning for each change of the choice, and of what it depends on."""
    if runners is None:
        return
    if runners["after"] is None:
        yield f"{'.'.join(SELECTOR)}, which chose the model runner, is gone"
        return
    if names := runners["after"]["unclear"]:
        yield f"which model runner serves {_joined(names)} cannot be told from the sources"
    if names := dead(runners):
        yield (
            f"Model Runner V2 serves {_served({**runners['after'], 'v2': names})} by default, "
            f"where it was V1; "
            f"{VARIABLE}=0 brings V1 back"
        )
    if changed := runners["changed"]:
        listed = ", ".join(f"{each['name']} ({each['fate']})" for each in changed)
        yield f"what the choice of the model runner depends on has changed: {listed}"


def _listed(found: Choice, named: Sequence[str]) -> dict[str, list[str]]:
    """A choice with the architectures that only the other release names told apart."""
    lists = {"v1": list(found.v1), "v2": list(found.v2), "unclear": list(found.unclear)}
    for kind in lists.values():
        if OTHER in kind:
            known = {name for each in lists.values() for name in each}
            kind[:0] = [name for name in named if name not in known]
    return {**lists, "tests": list(found.tests)}


def _served(kinds: Mapping[str, Sequence[str]]) -> str:
    """The models that V2 serves, in words."""
    if OTHER not in kinds["v2"]:
        return _joined(kinds["v2"]) or "no model"
    return "every model" + (f" but {_joined(kinds['v1'])}" if kinds["v1"] else "")


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


class _Evaluation:
    """The value of the selector for a model of one architecture.

    Attributes:
        strings: the members of every collection that architectures are compared with.
        tests: the tests whose outcome is not known, as they were taken.
        read: the definitions that were read.
    """

    def __init__(self, code: Definitions, architecture: str) -> None:
        self._code, self._architecture = code, architecture
        self.strings: set[str] = set()
        self.tests: list[str] = []
        self.read: list[Place] = []
        self._calls: list[Place] = []

    def call(self, place: Place) -> object:
        """The value that a function returns: a constant, or :data:`UNKNOWN`."""
        definition = self._code.find(*place)
        nodes = definition.nodes if definition else []
        functions = [node for node in nodes if isinstance(node, FUNCTION)]
        if definition is None or not functions:
            return UNKNOWN
        found = definition.module, definition.name
        if found in self._calls:
            return UNKNOWN  # It calls itself.
        self.read += [found] if found not in self.read else []
        self._calls.append(found)
        outcome = self._block(functions[-1].body, {}, (found[0], found[1].rpartition(".")[0]))
        self._calls.pop()
        return outcome[0] if outcome else None

    def _block(
        self, body: Sequence[ast.stmt], names: dict[str, object], scope: Place
    ) -> tuple[object] | None:
        """The value that is returned; None if the end is reached."""
        for statement in body:
            outcome: tuple[object] | None = None
            if isinstance(statement, ast.Return):
                value = self._value(statement.value, names, scope) if statement.value else None
                return (value,)
            if isinstance(statement, ast.If):
                test = self._truth(self._value(statement.test, names, scope))
                if test is UNKNOWN:
                    self._unsettle(statement, names)
                else:
                    taken = statement.body if test else statement.orelse
                    outcome = self._block(taken, names, scope)
            elif isinstance(statement, (ast.With, ast.Try)):
                outcome = self._block(statement.body, names, scope)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value:
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                for target in targets:
                    names[ast.unparse(target)] = self._value(statement.value, names, scope)
            if outcome is not None:
                return outcome
        return None

    def _unsettle(self, statement: ast.If, names: dict[str, object]) -> None:
        """Pass over a statement whose test is unknown: what it assigns is unknown after it."""
        text = ast.unparse(statement.test)
        if text not in self.tests:
            self.tests.append(text)
        for node in ast.walk(statement):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    names[ast.unparse(target)] = UNKNOWN

    def _truth(self, value: object) -> object:
        if isinstance(value, (_Unknown, _Architectures)):
            return UNKNOWN
        return bool(value)

    def _value(self, node: ast.expr, names: Mapping[str, object], scope: Place) -> object:
        text = ast.unparse(node)
        value: object = UNKNOWN
        if text in names:
            value = names[text]
        elif isinstance(node, ast.Constant):
            value = node.value
        elif _is_list_of_architectures(node):
            value = _Architectures()
        elif isinstance(node, (ast.BoolOp, ast.UnaryOp)):
            value = self._combined(node, names, scope)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            value = self._compared(node, names, scope)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            value = self._meet(node.left, node.right, names, scope)
        elif isinstance(node, ast.Call):
            value = self._called(node, names, scope)
        elif isinstance(node, (ast.Set, ast.List, ast.Tuple)):
            members = [self._value(each, names, scope) for each in node.elts]
            value = UNKNOWN if UNKNOWN in members else frozenset(members)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            value = self._looked_up(text, scope)
        return value

    def _combined(
        self, node: ast.BoolOp | ast.UnaryOp, names: Mapping[str, object], scope: Place
    ) -> object:
        if isinstance(node, ast.UnaryOp):
            value = self._truth(self._value(node.operand, names, scope))
            return not value if isinstance(node.op, ast.Not) and value is not UNKNOWN else UNKNOWN
        values = [self._truth(self._value(each, names, scope)) for each in node.values]
        decisive = isinstance(node.op, ast.Or)
        if decisive in values:
            return decisive
        return UNKNOWN if UNKNOWN in values else not decisive

    def _compared(self, node: ast.Compare, names: Mapping[str, object], scope: Place) -> object:
        left, right = (self._value(each, names, scope) for each in (node.left, node.comparators[0]))
        operator = node.ops[0]
        if isinstance(operator, (ast.In, ast.NotIn)):
            if isinstance(right, _Architectures) and isinstance(left, str):
                left, right = self._architecture, frozenset({left})
            member = self._member(left, right)
            if member is not UNKNOWN and isinstance(operator, ast.NotIn):
                return not member
            return member
        return UNKNOWN

    def _member(self, item: object, collection: object) -> object:
        """Whether the model's architecture is in a collection."""
        if not isinstance(collection, (frozenset, dict)):
            return UNKNOWN
        if item != self._architecture:
            return UNKNOWN
        self.strings |= {each for each in collection if isinstance(each, str)}
        return item in collection

    def _meet(
        self, one: ast.expr, other: ast.expr, names: Mapping[str, object], scope: Place
    ) -> object:
        values = [self._value(each, names, scope) for each in (one, other)]
        if isinstance(values[1], _Architectures):
            values.reverse()
        if not isinstance(values[0], _Architectures):
            return UNKNOWN
        return self._member(self._architecture, values[1])

    def _called(self, node: ast.Call, names: Mapping[str, object], scope: Place) -> object:
        function, arguments = node.func, node.args
        if isinstance(function, ast.Attribute):
            if function.attr in ("intersection", "isdisjoint") and len(arguments) == 1:
                met = self._meet(function.value, arguments[0], names, scope)
                return not met if function.attr == "isdisjoint" and met is not UNKNOWN else met
            own = ast.unparse(function.value) in ("self", "cls")
            return self.call((scope[0], f"{scope[1]}.{function.attr}")) if own else UNKNOWN
        name = function.id if isinstance(function, ast.Name) else ""
        if name in ("any", "all") and arguments and isinstance(arguments[0], ast.GeneratorExp):
            loop = arguments[0].generators[0]
            if not isinstance(self._value(loop.iter, names, scope), _Architectures):
                return UNKNOWN
            inner = {**names, ast.unparse(loop.target): self._architecture}
            return self._truth(self._value(arguments[0].elt, inner, scope))
        if name in ("frozenset", "set", "bool", "tuple", "list") and len(arguments) == 1:
            value = self._value(arguments[0], names, scope)
            return self._truth(value) if name == "bool" else value
        return self.call((scope[0], name)) if name else UNKNOWN

    def _looked_up(self, text: str, scope: Place) -> object:
        """A property of the class, or a collection in the module or one that it imports from."""
        owner, _, last = text.rpartition(".")
        if owner in ("self", "cls"):
            return self.call((scope[0], f"{scope[1]}.{last}"))
        definition = self._code.find(scope[0], text)
        nodes = definition.nodes if definition else []
        values = [n.value for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign))]
        if definition is None or len(values) != 1 or values[0] is None:
            return UNKNOWN
        value = self._value(values[0], {}, (definition.module, ""))
        if not isinstance(value, frozenset):
            return UNKNOWN  # What the environment or the platform says.
        place = definition.module, definition.name
        self.read += [place] if place not in self.read else []
        return value


def _is_list_of_architectures(node: ast.expr) -> bool:
    """Whether an expression is the model's ``architectures``, whatever the model is called."""
    if isinstance(node, ast.Call):
        called = getattr(node.func, "id", "")
        if called == "set" and len(node.args) == 1:
            return _is_list_of_architectures(node.args[0])
        named = len(node.args) > 1 and getattr(node.args[1], "value", "") == "architectures"
        return called == "getattr" and named
    return isinstance(node, ast.Attribute) and node.attr == "architectures"
