"""The decision which model runner serves, as source.

The decision is the property ``use_v2_model_runner`` and each function and constant of its module
whose name it or one of these mentions. It is quoted, and not interpreted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from review.model import Model

PROPERTY, VARIABLE = "use_v2_model_runner", "VLLM_USE_V2_MODEL_RUNNER"
#: The file of Model Runner V1, without which most words have nothing to serve.
RUNNER = "vllm/v1/worker/gpu_model_runner.py"


def decision(model: Model) -> tuple[str, list[str]]:
    """Return file and line of the property, its source, and that of each thing that it uses.

    All are empty if no file of ``vllm/config`` has the property.
    """
    for path in sorted(p for p in model.paths.values() if p.startswith("vllm/config")):
        text = model.text(path)
        if f"def {PROPERTY}(" not in text:
            continue
        defined = dict(_defined(text, ast.parse(text).body))
        used = [PROPERTY]
        for name in used:  # which grows
            words = dict.fromkeys(re.findall(r"\w+", defined[name][1]))
            used += [word for word in words if word in defined and word not in used]
        parts = sorted(defined[name] for name in used)
        return f"{path}:{defined[PROPERTY][0]}", [source for _, source in parts]
    return "", []


def _defined(text: str, body: Iterable[ast.stmt]) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield the functions, methods and constants of a module: name, line and source."""
    for node in body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        source = "\n".join(text.split("\n")[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef):
            yield node.name, (node.lineno, source)
        elif isinstance(node, ast.ClassDef):
            yield from _defined(text, (n for n in node.body if isinstance(n, ast.FunctionDef)))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {ast.unparse(target) for target in targets} - {"logger"}
            yield from ((name, (node.lineno, source)) for name in names)
