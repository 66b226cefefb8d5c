"""The value of a release's choice of a model runner for one kind of model, from its sources.

Three kinds of values are told apart. What a server is asked for otherwise (drafts, parallelism,
a platform) is taken to be at its default, or else not to be asked for. What the model itself is,
is known for each :data:`KINDS`, and for nothing else: a test of anything else about the model is
followed both ways, and if they differ the result is :data:`UNCLEAR`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from review.definitions import FUNCTION, Definition, Definitions
from review.references import Place

#: The class that holds the selector, the attribute that is the model, and where models are listed.
MODEL = "model_config"
REGISTRY = "vllm.model_executor.models.registry"
_MODELS = "vllm.model_executor.models"

#: Stands for a model whose architecture no collection names.
OTHER = "any other model"


class _Marker:
    """A value that the sources do not determine, or one that stands for the model."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


#: An option, a platform: taken not to be asked for.
UNKNOWN = _Marker("unknown")
#: Something about the model.
UNCLEAR = _Marker("unclear")
_THE_MODEL, _ARCHITECTURES = _Marker("the model"), _Marker("its architectures")

#: What the selector may ask of a model, for an ordinary one.
_ORDINARY: Mapping[str, object] = {
    "runner_type": "generate",
    "is_moe": False,
    "is_quantized": False,
    "is_diffusion": False,
    "is_hybrid": False,
    "is_attention_free": False,
    "has_inner_state": False,
}
_HYBRID = {"is_hybrid": True, "has_inner_state": True}
_FREE = {"is_attention_free": True, "has_inner_state": True}
DENSE, QUANTIZED, EXPERTS = "dense", "quantized", "mixture-of-experts"
HYBRID, FREE, POOLING = "hybrid", "attention-free", "pooling"
#: Each kind of model, and what it answers. A hybrid one may have experts or not.
KINDS: Mapping[str, Mapping[str, object]] = {
    DENSE: _ORDINARY,
    QUANTIZED: {**_ORDINARY, "is_quantized": True},
    EXPERTS: {**_ORDINARY, "is_moe": True},
    HYBRID: {**_ORDINARY, **_HYBRID, "is_moe": UNCLEAR},
    FREE: {**_ORDINARY, **_FREE},
    POOLING: {**dict.fromkeys(_ORDINARY, UNCLEAR), "runner_type": "pooling", "is_diffusion": False},
}
#: The kinds that a model of a known architecture may be of; its class says the rest.
OF_ONE = (DENSE, QUANTIZED, EXPERTS)

_ORDERS: Mapping[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_SIZES: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CONSTANT = (bool, int, float, str, type(None))
Names = dict[str, object]


@dataclass(frozen=True)
class _Object:
    """An object of a class of the release: the configuration, or a part of it."""

    place: Place


@dataclass
class Evaluation:
    """The value of a property for a model of one architecture and kind.

    Attributes:
        code: the release.
        architecture: the model's, or :data:`OTHER`.
        kind: one of :data:`KINDS`.
        strings: the architectures that the model's is compared with.
        tests: the tests of options whose outcome is not known, which were taken not to matter.
        read: the definitions that were read.
    """

    code: Definitions
    architecture: str
    kind: str
    strings: set[str] = field(default_factory=set)
    tests: list[str] = field(default_factory=list)
    read: list[Place] = field(default_factory=list)
    _calls: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Learn what the model answers: what its kind does, and what its class says."""
        self._facts = dict(KINDS[self.kind])
        if self.architecture != OTHER:
            self._facts |= self._of_class()

    def _of_class(self) -> Mapping[str, object]:
        """What the class of the architecture says; unclear if the release lists none."""
        registry = self.code.module(REGISTRY)
        for node in ast.walk(registry.tree) if registry else ():
            for key, value in (
                zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            ):
                if getattr(key, "value", "") != self.architecture or not isinstance(
                    value, ast.Tuple
                ):
                    continue
                module, name = (str(getattr(each, "value", "")) for each in value.elts[:2])
                if not module.startswith("vllm."):
                    module = f"{_MODELS}.{module}"
                if self.code.find(module, name) is None:
                    break
                bases = {base.name for base in self.code.bases_of(module, name)}
                return {
                    **(_HYBRID if "IsHybrid" in bases else {}),
                    **(_FREE if "IsAttentionFree" in bases else {}),
                    **({"has_inner_state": True} if "HasInnerState" in bases else {}),
                }
        return dict.fromkeys((*_HYBRID, *_FREE), UNCLEAR)

    def call(self, place: Place, arguments: Mapping[str, object] | None = None) -> object:
        """The value that a function returns: a constant, or one that is not known.

        Args:
            place: of the function.
            arguments: by the names of its parameters.
        """
        definition = self.code.find(*place)
        function = _function(definition)
        if definition is None or function is None:
            return UNKNOWN
        found = definition.module, definition.name
        if found in self._calls:
            return UNKNOWN  # It calls itself.
        self.read += [found] if found not in self.read else []
        self._calls.append(found)
        names: Names = dict(arguments or {})
        owner = found[1].rpartition(".")[0]
        if owner:
            names["self"] = names["cls"] = _Object((found[0], owner))
        outcome = self._block(function.body, names, found[0])
        self._calls.pop()
        return outcome[0] if outcome else None

    # Statements

    def _block(self, body: Sequence[ast.stmt], names: Names, module: str) -> tuple[object] | None:
        """The value that is returned; None if the end is reached."""
        for number, statement in enumerate(body):
            if isinstance(statement, ast.Return):
                return (self._value(statement.value, names, module) if statement.value else None,)
            if isinstance(statement, ast.If):
                test = self._truth(self._value(statement.test, names, module))
                if test is UNCLEAR:
                    return self._both(statement, body[number + 1 :], names, module)
                if test is UNKNOWN:
                    self._pass_over(statement, names)
                    continue
                outcome = self._block(statement.body if test else statement.orelse, names, module)
            else:
                outcome = self._simple(statement, names, module)
            if outcome is not None:
                return outcome
        return None

    def _simple(self, statement: ast.stmt, names: Names, module: str) -> tuple[object] | None:
        """Follow a statement that is not an ``if``, or say that it cannot be followed."""
        if isinstance(statement, ast.Try):
            body = [*statement.body, *statement.orelse, *statement.finalbody]
            return self._block(body, names, module)
        if isinstance(statement, ast.With):
            for item in statement.items:
                if item.optional_vars:
                    value = self._value(item.context_expr, names, module)
                    _assign(item.optional_vars, value, names)
            return self._block(statement.body, names, module)
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            if statement.value is not None:
                value = self._assigned(statement, names, module)
                for target in _targets(statement):
                    _assign(target, value, names)
        elif isinstance(statement, ast.Expr):
            self._collect(statement.value, names, module)
        elif isinstance(statement, ast.For):
            return self._loop(statement, names, module)
        elif isinstance(statement, FUNCTION):
            names[statement.name] = UNCLEAR
        elif not isinstance(statement, (ast.Pass, ast.Import, ast.ImportFrom, ast.Assert)):
            return self._lost(statement, names)
        return None

    def _both(
        self, statement: ast.If, rest: Sequence[ast.stmt], names: Names, module: str
    ) -> tuple[object] | None:
        """Follow an ``if`` about the model both ways, to the end of its block."""
        ways = []
        for taken in (statement.body, statement.orelse):
            own = dict(names)
            ways.append((self._block([*taken, *rest], own, module), own))
        (one, after), (other, otherwise) = ways
        if one is None and other is None:
            for name in {*after, *otherwise}:
                same = name in after and after[name] == otherwise.get(name, UNCLEAR)
                names[name] = after[name] if same else UNCLEAR
            return None
        return one if one == other else (UNCLEAR,)

    def _pass_over(self, statement: ast.If, names: Names) -> None:
        """Pass over an ``if`` about an option: what it assigns is unknown after it."""
        text = ast.unparse(statement.test)
        if text not in self.tests:
            self.tests.append(text)
        _forget(statement, names, UNKNOWN)

    def _lost(self, statement: ast.stmt, names: Names) -> tuple[object] | None:
        """Give up on a statement: what it returns or assigns is unclear."""
        if any(isinstance(node, (ast.Return, ast.Raise)) for node in ast.walk(statement)):
            return (UNCLEAR,)
        _forget(statement, names, UNCLEAR)
        return None

    def _loop(self, loop: ast.For, names: Names, module: str) -> tuple[object] | None:
        """Follow a loop over the model's architectures, of which it has one."""
        jumps = any(isinstance(node, (ast.Break, ast.Continue)) for node in ast.walk(loop))
        if jumps or self._value(loop.iter, names, module) is not _ARCHITECTURES:
            return self._lost(loop, names)
        names[ast.unparse(loop.target)] = self.architecture
        return self._block([*loop.body, *loop.orelse], names, module)

    def _assigned(
        self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign, names: Names, module: str
    ) -> object:
        """The value that a statement assigns."""
        if isinstance(statement, ast.AugAssign):
            sum_ = ast.BinOp(statement.target, statement.op, statement.value)
            return self._value(sum_, names, module)
        assert statement.value is not None
        return self._value(statement.value, names, module)

    def _collect(self, node: ast.expr, names: Names, module: str) -> None:
        """Follow what is added to a list; what else a call does has no part in the choice."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return
        name, arguments = ast.unparse(node.func.value), node.args
        if not isinstance(names.get(name), frozenset) or len(arguments) != 1:
            return
        if node.func.attr in ("append", "add"):
            names[name] = frozenset({ast.unparse(arguments[0])}) | _members(names[name])
        elif node.func.attr in ("extend", "update"):
            more = self._value(arguments[0], names, module)
            known = isinstance(more, frozenset)
            names[name] = _members(more) | _members(names[name]) if known else more

    # Expressions

    def _truth(self, value: object) -> object:
        if value is UNKNOWN or value is UNCLEAR:
            return value
        return True if isinstance(value, (_Marker, _Object)) else bool(value)

    def _value(self, node: ast.expr, names: Names, module: str) -> object:
        text = ast.unparse(node)
        if text in names:
            return names[text]
        evaluate = _WHOLE.get(type(node))
        if evaluate is not None:
            return evaluate(self, node, names, module)
        evaluate = _PARTLY.get(type(node))
        value = evaluate(self, node, names, module) if evaluate else UNKNOWN
        return UNCLEAR if value is UNKNOWN and self._touches(node, names, module) else value

    def _touches(self, node: ast.expr, names: Names, module: str) -> bool:
        """Whether an expression that cannot be evaluated depends on the model."""
        parts = (part for part in ast.walk(node) if part is not node)
        for part in parts:
            if isinstance(part, (ast.Name, ast.Attribute)):
                value = self._value(part, names, module)
                marked = isinstance(value, _Marker) and value is not UNKNOWN
                if marked or value == self.architecture:
                    return True
        return False

    def _constant(self, node: ast.Constant, *_: object) -> object:
        return node.value

    def _negated(self, node: ast.UnaryOp, names: Names, module: str) -> object:
        truth = self._truth(self._value(node.operand, names, module))
        if not isinstance(node.op, ast.Not):
            return truth if isinstance(truth, _Marker) else UNKNOWN
        return truth if isinstance(truth, _Marker) else not truth

    def _bound(self, node: ast.NamedExpr, names: Names, module: str) -> object:
        names[node.target.id] = self._value(node.value, names, module)
        return names[node.target.id]

    def _collection(
        self, node: ast.Set | ast.List | ast.Tuple, names: Names, module: str
    ) -> object:
        members = [self._value(each, names, module) for each in node.elts]
        constant = all(isinstance(each, _CONSTANT) for each in members)
        return frozenset(members) if constant else UNKNOWN

    def _item(self, node: ast.Subscript, names: Names, module: str) -> object:
        of_model = self._value(node.value, names, module) is _ARCHITECTURES
        return self.architecture if of_model else UNKNOWN

    def _combined(self, node: ast.BoolOp, names: Names, module: str) -> object:
        """The first value that decides, as far as those before it are known."""
        decisive, truth = isinstance(node.op, ast.Or), None
        value: object = None
        unknown: list[object] = []
        for each in node.values:
            value = self._value(each, names, module)
            truth = self._truth(value)
            if truth is decisive:
                return decisive if unknown else value
            unknown += [truth] if isinstance(truth, _Marker) else []
        if unknown:
            return UNCLEAR if UNCLEAR in unknown else UNKNOWN
        return value

    def _either(self, node: ast.IfExp, names: Names, module: str) -> object:
        test = self._truth(self._value(node.test, names, module))
        ways = [self._value(each, names, module) for each in (node.body, node.orelse)]
        if test is UNKNOWN or test is UNCLEAR:
            return ways[0] if ways[0] == ways[1] else test
        return ways[not test]

    def _compared(self, node: ast.Compare, names: Names, module: str) -> object:
        left, right = (
            self._value(each, names, module) for each in (node.left, node.comparators[0])
        )
        kind = type(node.ops[0])
        if kind in (ast.In, ast.NotIn):
            member = self._member(left, right)
            return member if isinstance(member, _Marker) else member is (kind is ast.In)
        if UNKNOWN in (left, right) or UNCLEAR in (left, right):
            return UNKNOWN
        whole = not isinstance(left, _Marker) and not isinstance(right, _Marker)
        if kind in (ast.Is, ast.IsNot) or (kind in _ORDERS and whole):
            if self.architecture in (left, right):
                self.strings |= {each for each in (left, right) if isinstance(each, str)}
            return _ORDERS[kind](left, right)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)) and kind in _SIZES:
            return _SIZES[kind](left, right)
        return UNKNOWN

    def _member(self, item: object, collection: object) -> object:
        """Whether a collection has a value; the model's architectures have its own."""
        if collection is _ARCHITECTURES and isinstance(item, str):
            self.strings.add(item)
            return item == self.architecture
        if not isinstance(collection, frozenset) or not isinstance(item, _CONSTANT):
            return UNKNOWN
        if item == self.architecture:
            self.strings |= {each for each in collection if isinstance(each, str)}
        return item in collection

    def _calculated(self, node: ast.BinOp, names: Names, module: str) -> object:
        if isinstance(node.op, ast.BitAnd):
            return self._meet(node.left, node.right, names, module)
        left, right = (self._value(each, names, module) for each in (node.left, node.right))
        if isinstance(left, frozenset) and isinstance(right, frozenset):
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, (ast.BitOr, ast.Add)):
                return left | right
        return UNKNOWN

    def _meet(self, one: ast.expr, other: ast.expr, names: Names, module: str) -> object:
        """Whether the model's architectures and a collection have a member in common."""
        left, right = (self._value(each, names, module) for each in (one, other))
        if right is _ARCHITECTURES:
            left, right = right, left
        return self._member(self.architecture, right) if left is _ARCHITECTURES else UNKNOWN

    def _called(self, node: ast.Call, names: Names, module: str) -> object:
        function, arguments = node.func, node.args
        if isinstance(function, ast.Attribute):
            return self._method(node, function, names, module)
        name = function.id if isinstance(function, ast.Name) else ""
        if name == "getattr" and len(arguments) > 1 and isinstance(arguments[1], ast.Constant):
            read = ast.Attribute(arguments[0], str(arguments[1].value), ast.Load())
            return self._attribute(read, names, module)
        if name in ("any", "all") and arguments and isinstance(arguments[0], ast.GeneratorExp):
            return self._generated(arguments[0], name == "any", names, module)
        if name in ("frozenset", "set", "bool", "tuple", "list") and len(arguments) == 1:
            value = self._value(arguments[0], names, module)
            return self._truth(value) if name == "bool" else value
        return UNKNOWN if name in names else self._run((module, name), node, names, module)

    def _method(self, node: ast.Call, function: ast.Attribute, names: Names, module: str) -> object:
        if function.attr in ("intersection", "isdisjoint") and len(node.args) == 1:
            met = self._meet(function.value, node.args[0], names, module)
            negated = function.attr == "isdisjoint" and not isinstance(met, _Marker)
            return not met if negated else met
        owner = self._value(function.value, names, module)
        if not isinstance(owner, _Object):
            return UNKNOWN
        place = owner.place[0], f"{owner.place[1]}.{function.attr}"
        return self._run(place, node, names, module)

    def _run(self, place: Place, node: ast.Call, names: Names, module: str) -> object:
        """Follow a call with the values of its arguments."""
        function = _function(self.code.find(*place))
        if function is None:
            return UNKNOWN
        parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        if parameters[:1] in (["self"], ["cls"]):
            del parameters[0]
        given = dict(zip(parameters, node.args, strict=False))
        given |= {each.arg: each.value for each in node.keywords if each.arg}
        return self.call(
            place, {name: self._value(each, names, module) for name, each in given.items()}
        )

    def _generated(
        self, generator: ast.GeneratorExp, of_any: bool, names: Names, module: str
    ) -> object:
        """The value of ``any`` or ``all`` over the model's architectures."""
        loop = generator.generators[0]
        if len(generator.generators) > 1 or (
            self._value(loop.iter, names, module) is not _ARCHITECTURES
        ):
            return UNKNOWN
        inner = {**names, ast.unparse(loop.target): self.architecture}
        if not loop.ifs:
            return self._truth(self._value(generator.elt, inner, module))
        taken = self._truth(self._combined(ast.BoolOp(ast.And(), loop.ifs), inner, module))
        if isinstance(taken, _Marker):
            return taken
        return self._truth(self._value(generator.elt, inner, module)) if taken else not of_any

    def _attribute(self, node: ast.Attribute, names: Names, module: str) -> object:
        owner, name = self._value(node.value, names, module), node.attr
        if owner is _THE_MODEL:
            return self._of_model(name)
        if isinstance(owner, _Object):
            return self._of_object(owner.place, name)
        if name == "architectures" and owner is UNKNOWN:
            return UNCLEAR  # Perhaps it is the model's, by another name.
        return self._looked_up(node, names, module)

    def _of_model(self, name: str) -> object:
        """What the model answers: a fact of its kind, or an option's default."""
        if name == "architectures":
            return _ARCHITECTURES
        if name == "architecture":
            return self.architecture
        if name in self._facts:
            return self._facts[name]
        definition = self.code.find("vllm.config.model", f"ModelConfig.{name}")
        value = self._default(definition)
        return UNCLEAR if value is UNKNOWN else value

    def _of_object(self, place: Place, name: str) -> object:
        """A property of the configuration, or the default of one of its fields."""
        if name == MODEL:
            return _THE_MODEL
        definition = self.code.find(place[0], f"{place[1]}.{name}")
        if _function(definition) is not None:
            return self.call((place[0], f"{place[1]}.{name}"))
        return self._default(definition)

    def _default(self, definition: Definition | None) -> object:
        """The declared default of a field: a constant, or an object of one of the classes."""
        declared = (
            [n for n in definition.nodes if isinstance(n, ast.AnnAssign)] if definition else []
        )
        if definition is None or not declared or declared[0].value is None:
            return UNKNOWN
        value = declared[0].value
        if isinstance(value, ast.Call):
            made = {each.arg: each.value for each in value.keywords}
            value = made.get("default", made.get("default_factory", value))
        if isinstance(value, ast.Constant):
            return value.value
        built = self.code.find(definition.module, ast.unparse(value))
        is_class = built is not None and built.kind == "class"
        return _Object((built.module, built.name)) if built and is_class else UNKNOWN

    def _looked_up(self, node: ast.Name | ast.Attribute, _: Names, module: str) -> object:
        """A collection in the module, or in one that it imports from."""
        definition = self.code.find(module, ast.unparse(node))
        nodes = definition.nodes if definition else []
        values = [n.value for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign))]
        if definition is None or len(values) != 1 or values[0] is None:
            return UNKNOWN
        value = self._value(values[0], {}, definition.module)
        if not isinstance(value, frozenset):
            return UNKNOWN  # What the environment or the platform says.
        place = definition.module, definition.name
        self.read += [place] if place not in self.read else []
        return value


#: What evaluates an expression of each type: one whose parts say all, and one that may be lost.
_WHOLE: Mapping[type[ast.expr], Callable[..., object]] = {
    ast.Constant: Evaluation._constant,
    ast.UnaryOp: Evaluation._negated,
    ast.BoolOp: Evaluation._combined,
    ast.IfExp: Evaluation._either,
    ast.NamedExpr: Evaluation._bound,
}
_PARTLY: Mapping[type[ast.expr], Callable[..., object]] = {
    ast.Compare: Evaluation._compared,
    ast.BinOp: Evaluation._calculated,
    ast.Call: Evaluation._called,
    ast.Set: Evaluation._collection,
    ast.List: Evaluation._collection,
    ast.Tuple: Evaluation._collection,
    ast.Subscript: Evaluation._item,
    ast.Attribute: Evaluation._attribute,
    ast.Name: Evaluation._looked_up,
}


def _function(definition: Definition | None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The last function that a definition consists of."""
    functions = [n for n in definition.nodes if isinstance(n, FUNCTION)] if definition else []
    return functions[-1] if functions else None


def _members(value: object) -> frozenset[object]:
    return value if isinstance(value, frozenset) else frozenset()


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Sequence[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _assign(target: ast.expr, value: object, names: Names) -> None:
    """Bind a name; the parts of a value that is taken apart are not followed."""
    if isinstance(target, (ast.Tuple, ast.List)):
        unknown = UNKNOWN if value is UNKNOWN else UNCLEAR
        names.update({ast.unparse(each): unknown for each in target.elts})
    else:
        names[ast.unparse(target)] = value


def _forget(statement: ast.stmt, names: Names, value: _Marker) -> None:
    """Make everything unknown that a statement assigns."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in _targets(node):
                _assign(target, value, names)
        elif isinstance(node, ast.Call) and value is UNCLEAR:
            method = node.func
            if isinstance(method, ast.Attribute) and ast.unparse(method.value) in names:
                names[ast.unparse(method.value)] = value  # A list that it may have added to.
