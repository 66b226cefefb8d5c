"""Which model runner a release takes for which models, read from its sources.

Model Runner V1 holds most seams. :data:`SELECTOR` decides; :mod:`review.selecting` evaluates it for
each kind of model, and for each architecture that it names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from review.changes import change
from review.references import Place, References
from review.selecting import DENSE, KINDS, OF_ONE, OTHER, QUANTIZED, UNCLEAR, UNKNOWN, Evaluation

#: What decides between the two runners; what the maintainer sets against it; the runners.
SELECTOR = ("vllm.config.vllm", "VllmConfig.use_v2_model_runner")
ENVIRONMENT, VARIABLE = "vllm.envs", "VLLM_USE_V2_MODEL_RUNNER"
V1 = ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
V2 = ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner")

#: How the name of a kind of models ends.
_GROUP = " models"
#: The most architectures that a cell of a table lists.
_NAMED = 4
#: An architecture, or OTHER, and a kind of models.
Model = tuple[str, str]


@dataclass
class Choice:
    """For which models a release takes Model Runner V2 where nobody asks for either.

    Attributes:
        v2: the models that V2 serves: kinds, and the architectures that differ from the others
            of their kind; :data:`OTHER` if it serves all that are not named.
        v1: those that V1 serves.
        unclear: those for which the sources do not say.
        tests: the tests that were taken not to matter, in their order.
        depends: the definitions that the choice depends on.
        architectures: those that the release compares with the model's.
        served: ``v1``, ``v2`` or ``unclear`` by model.
    """

    v2: list[str] = field(default_factory=list)
    v1: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    depends: list[Place] = field(default_factory=list)
    architectures: set[str] = field(default_factory=set)
    served: dict[Model, str] = field(default_factory=dict)


def serves(code: References, architecture: str, kind: str) -> str:
    """The runner that a release takes for one model: ``v1``, ``v2`` or ``unclear``.

    Args:
        code: of the release, which has a selector.
        architecture: as in the model's configuration, or :data:`OTHER`.
        kind: one of :data:`review.selecting.KINDS`.
    """
    return _served_by(Evaluation(code.definitions, architecture, kind).call(SELECTOR))


def choice(code: References, more: Iterable[str] = ()) -> Choice | None:
    """Read what a release chooses; None if it has no selector.

    Args:
        code: of the release.
        more: architectures to evaluate it for besides those that it names.
    """
    if code.find(SELECTOR) is None:
        return None
    found = Choice()

    def evaluate(models: Iterable[Model]) -> None:
        for model in models:
            evaluation = Evaluation(code.definitions, *model)
            found.served[model] = _served_by(evaluation.call(SELECTOR))
            found.architectures |= evaluation.strings - {OTHER}
            found.tests += [test for test in evaluation.tests if test not in found.tests]
            found.depends += [place for place in evaluation.read if place not in found.depends]

    evaluate((OTHER, kind) for kind in KINDS)
    named = sorted({*found.architectures, *more})
    evaluate((name, kind) for name in named for kind in OF_ONE)
    for runner in ("v1", "v2", "unclear"):
        served = {model for model, by in found.served.items() if by == runner}
        getattr(found, runner).extend(_labels(served))
    return found


def _served_by(value: object) -> str:
    if value is UNKNOWN or value is UNCLEAR:
        return "unclear"
    return "v2" if value else "v1"


def _labels(models: AbstractSet[Model]) -> list[str]:
    """Names for models: kinds, and architectures that differ from others of their kind."""
    others = {kind for architecture, kind in models if architecture == OTHER}
    labels = []
    for architecture in sorted({name for name, _ in models} - {OTHER}):
        own = {kind for name, kind in models if name == architecture}
        if own == set(OF_ONE) and own - others:
            labels.append(architecture)
        elif own - others:
            labels.append(f"{architecture} ({' or '.join(_kinds(own - others))})")
    if others == set(KINDS):
        return [*labels, OTHER]
    return [*(f"{kind}{_GROUP}" for kind in _kinds(others)), *labels]


def _kinds(kinds: AbstractSet[str]) -> Iterator[str]:
    """Names for kinds. Quantized models are named where dense ones are served otherwise."""
    for kind in KINDS:
        if kind == DENSE and kind in kinds:
            yield kind if QUANTIZED in kinds else f"{kind}, unquantized"
        elif kind in kinds and not (kind == QUANTIZED and DENSE in kinds):
            yield kind


def examine(base: References, release: References) -> dict[str, Any] | None:
    """Compare what two releases choose.

    Returns:
        The entry "runners" in review.json; None if the base has but one runner.
    """
    before, after = choice(base), choice(release)
    if before is None:
        return None
    if after is not None:  # Each for the architectures that the other one names, too.
        names = before.architectures | after.architectures
        before, after = choice(base, names) or before, choice(release, names)
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
    served = after.served if after else {}
    taken = {m for m, by in served.items() if (before.served[m], by) == ("v1", "v2")}
    return {
        "variable": VARIABLE,
        "before": _listed(before),
        "after": _listed(after) if after else None,
        "taken": _labels(taken),
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
    return list(runners["taken"]) if runners else []


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
    if after["unclear"]:
        names = joined(after["unclear"])
        yield f"which model runner {release} takes for {names} cannot be told from its sources"
        if OTHER in after["unclear"]:
            return
    now, was = _served(after), _served(runners["before"])
    if now == was:
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
        yield f"which model runner serves {joined(names)} cannot be told from the sources"
    if names := dead(runners):
        yield (
            f"Model Runner V2 serves {_served({**runners['after'], 'v2': names})} by default, "
            f"where it was V1; {VARIABLE}=0 brings V1 back"
        )
    if changed := runners["changed"]:
        listed = ", ".join(f"{each['name']} ({each['fate']})" for each in changed)
        yield f"what the choice of the model runner depends on has changed: {listed}"


def is_group(name: str) -> bool:
    """Whether a name is that of a kind of models, and not of an architecture."""
    return name.endswith(_GROUP)


def brief(names: Sequence[str]) -> str:
    """Names in a cell of a table: every kind, and how many architectures if there are many."""
    if OTHER in names:
        return "every model"
    groups = [name for name in names if is_group(name)]
    named = [name for name in names if name not in groups]
    if len(named) > _NAMED:
        named = [f"{len(named)} {'more' if groups else 'models'}"]
    return ", ".join([*groups, *named])


def joined(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _listed(found: Choice) -> dict[str, list[str]]:
    return {"v1": found.v1, "v2": found.v2, "unclear": found.unclear, "tests": found.tests}


def _served(kinds: Mapping[str, Sequence[str]]) -> str:
    """The models that V2 serves, in words."""
    every = OTHER in kinds["v2"]
    text = "every model" if every else joined(kinds["v2"]) or "no model"
    left = [name for name in kinds["v1"] if every or not is_group(name)]
    if left and (every or any(map(is_group, kinds["v2"]))):
        text += f" but {joined([name for name in left if name != OTHER])}"
    return text
