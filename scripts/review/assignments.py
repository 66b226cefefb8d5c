"""What a function or a class of a release assigns to a target, or returns."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard

from review.definitions import FUNCTION
from review.references import Place, References, is_dotted


def values(
    code: References, scope: Place, role: str, seen: tuple[Place, ...] = ()
) -> dict[str, str]:
    """What a function or class assigns to a target, or returns, each with its path and line.

    Of a call it is what is called; definitions of vLLM's are named in full. A method of the same
    class stands for what it returns.
    """
    module, definition = code.definitions.module(scope[0]), code.find(scope)
    if module is None or definition is None or scope in seen:
        return {}
    texts: dict[str, str] = {}
    functions = [node for node in definition.nodes if isinstance(node, FUNCTION)]
    for node in definition.nodes:
        if isinstance(node, ast.ClassDef):
            functions += [each for each in node.body if isinstance(each, FUNCTION)]
    for function in functions:
        for statement in ast.walk(function):
            value = _value_for(statement, role)
            for each, alone in _alternatives(value) if value is not None else ():
                text = ast.unparse(each.func if isinstance(each, ast.Call) else each)
                owner = scope[1].partition(".")[0]
                method = scope[0], f"{owner}.{text.removeprefix('self.')}"
                if text.startswith("self.") and isinstance(each, ast.Call) and code.find(method):
                    texts |= values(code, method, "return", (*seen, scope))
                    continue
                found = list(code.resolve(code.scope(module, function), text))
                # In a collection are also ``len`` and the like.
                for name in [".".join(place) for place in found] or [text] * alone:
                    texts.setdefault(name, f"{module.path}:{each.lineno}")
    return texts


def assigned(code: References, scope: Place, role: str) -> set[str]:
    """The texts of what a class assigns to an attribute."""
    definition = code.find(scope)
    nodes = [each for node in definition.nodes for each in ast.walk(node)] if definition else []
    found = (_value_for(node, role) for node in nodes)
    return {ast.unparse(value) for value in found if value is not None}


def _alternatives(value: ast.expr) -> Iterator[tuple[ast.expr, bool]]:
    """The values that an expression may have; of a collection, the calls that make it.

    Yields:
        Each with whether it is a value by itself.
    """
    if isinstance(value, (ast.IfExp, ast.BoolOp)):
        alternatives = value.values if isinstance(value, ast.BoolOp) else [value.body, value.orelse]
        for each in alternatives:
            yield from _alternatives(each)
    elif _callable(value):
        yield value, True
    else:
        yield from ((each, False) for each in ast.walk(value) if _is_call(each))


def _callable(value: ast.expr) -> bool:
    """Whether a value is a dotted name, or a call of one."""
    named = value.func if isinstance(value, ast.Call) else value
    return isinstance(named, ast.Name) or (isinstance(named, ast.Attribute) and is_dotted(named))


def _is_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and _callable(node)


def _value_for(node: ast.AST, role: str) -> ast.expr | None:
    """What a statement assigns to a target, or returns."""
    if isinstance(node, ast.Return) and role == "return":
        return node.value
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == role:
        return node.value
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == role:
        return node.value
    return None
