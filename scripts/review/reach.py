"""The classes that a release runs: what makes those with our seams, overrides or replaces them.

A patch can apply to a class that nobody makes any more. Compared with the base release are

- the places that make, or name as a value, a class or function that holds a seam;
- the classes derived from it that have another method in place of one with a seam;
- the statements that put something else in its place while vLLM runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from review.assignments import assigned, values
from review.references import Place, Reference, References
from review.replacements import replacements
from review.uses import Use

#: What a finding is about.
MADE, OVERRIDDEN, REPLACED = "made", "overridden", "replaced"

#: The seams of one class that a table lists.
_SHOWN = 3
#: Where classes are made that a runner, an engine or a scheduler consists of.
_ENGINE = ("vllm.v1.", "vllm.config.", "vllm.platforms.")


@dataclass(frozen=True)
class Finding:
    """One fact about the classes that run.

    Attributes:
        what: :data:`MADE`, :data:`OVERRIDDEN` or :data:`REPLACED`.
        new: False if it is so in the base release too.
        place: the definition that it is about.
        where: path and line in the release; in the base if the release has it nowhere.
        detail: a sentence without its full stop.
        seams: the definitions with seams that it concerns.
    """

    what: str
    new: bool
    place: Place
    where: str
    detail: str
    seams: tuple[Place, ...]


def holders(uses: Iterable[Use]) -> list[Place]:
    """The functions and classes that hold a seam, sorted."""
    held = (use.places for use in uses if use.how == "holds a seam" and use.certain)
    return sorted({place for places in held for place in places})


def examine(seams: Sequence[Place], base: References, release: References) -> list[dict[str, Any]]:
    """Find what runs in a release in place of what holds our seams.

    Args:
        seams: the result of :func:`holders`.
        base: the references of the release that the overlay is for.
        release: those of the other one.

    Returns:
        The entries under "classes" in review.json, changes first.
    """
    reach = _Reach(seams, base, release)
    findings = sorted(
        {*reach.made(), *reach.overridden(), *reach.replaced()},
        key=lambda f: (not f.new, f.what, f.place, f.where),
    )
    return [
        {
            "what": finding.what,
            "new": finding.new,
            "name": ".".join(filter(None, finding.place)),
            "where": finding.where,
            "detail": finding.detail,
            "seams": [".".join(place) for place in finding.seams],
        }
        for finding in findings
    ]


def warnings(findings: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A warning for each finding that the base release does not have."""
    for finding in findings:
        if finding["new"]:
            yield f"{finding['detail']} ({finding['where']})"


def section(findings: Sequence[dict[str, Any]]) -> tuple[str, str, Sequence[str], list[list[str]]]:
    """Heading, anchor, columns and the cells of a table of what is new."""
    changed = [finding for finding in findings if finding["new"]]
    changes = "1 change" if len(changed) == 1 else f"{len(changed):,} changes"
    heading = f"Classes that run: {changes} of {len(findings):,} facts"
    rows = [
        [
            finding["name"],
            finding["what"],
            finding["detail"],
            finding["where"],
            _shortened(finding["seams"]),
        ]
        for finding in changed
    ]
    return heading, "classes", ("name", "what", "change", "where", "seams"), rows


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class _Reach:
    def __init__(self, seams: Sequence[Place], base: References, release: References) -> None:
        self.seams = list(seams)
        self.base, self.release = base, release
        #: Top-level definition to the definitions in it that hold a seam.
        self.tops: dict[Place, list[Place]] = {}
        for module, name in seams:
            self.tops.setdefault((module, name.partition(".")[0]), []).append((module, name))

    # What makes them

    def made(self) -> Iterator[Finding]:
        """Compare the places that make the classes, and one step up those that make these."""
        targets = dict(self.tops)
        for module, name, _ in self.base.derived(self.tops):
            derived = module.name, name
            for top in self.base.order(derived):
                if top in self.tops:
                    targets.setdefault(derived, self.tops[top])
                    break
        before = [r for r in self.base.to(targets) if r.holder]
        makers: dict[Place, list[Place]] = {}
        for reference in before:
            owner = reference.owner
            made = _is_class(self.base, reference.place) and _is_class(self.base, owner)
            if owner not in targets and made and _in_engine(reference):
                makers.setdefault(owner, []).extend(targets[reference.place])
        before += [r for r in self.base.to(makers) if r.holder]
        targets |= {place: sorted(set(held)) for place, held in makers.items()}
        after = list(self.release.to(targets))
        for place, held in targets.items():
            if self.release.find(place) is not None:
                yield from self._made(place, tuple(held), before, after)

    def _made(
        self,
        place: Place,
        held: tuple[Place, ...],
        before: Sequence[Reference],
        after: Sequence[Reference],
    ) -> Iterator[Finding]:
        found = self.release.find(place)
        assert found is not None
        old = [r for r in before if r.place == place]
        new = [r for r in after if r.place == (found.module, found.name)]
        name, is_class = ".".join(place), _is_class(self.base, place)
        for owner in dict.fromkeys(r.owner for r in old):
            was = [r for r in old if r.owner == owner]
            now = [r for r in new if r.owner == owner]
            by = ".".join(filter(None, (owner[0], was[0].holder)))
            others = self._others(was)
            if others:
                how = "beside" if now else "in place of"
                for other, where in others.items():
                    detail = f"{by} has {other} {how} {name}"
                    # With a derived class for one platform beside it, its seams run elsewhere.
                    concerned = held if not now or place in self.tops else ()
                    yield Finding(MADE, True, place, where, detail, concerned)
            elif now:
                differs = place in self.tops and is_class and not _as_free(was, now)
                detail = f"{by} makes {name} only {_under(now)}" if differs else f"{by} has {name}"
                if asked := self._asked_otherwise(now):
                    differs = True
                    detail = f"{by} makes {name} by {asked}, which it sets otherwise"
                yield Finding(MADE, differs, place, now[0].where, detail, held)
            elif not new:
                detail = f"nothing makes or calls {name} any more; {by} did"
                yield Finding(MADE, True, place, was[0].where, detail, held)
            elif is_class and _in_engine(was[0]):
                if not self._is_made_elsewhere(owner, old, new):
                    detail = f"{by} does not make {name} any more"
                    yield Finding(MADE, True, place, was[0].where, detail, held)

    def _asked_otherwise(self, now: Sequence[Reference]) -> str:
        """An attribute by which an object is made, and which its class sets to something else."""
        for reference in now:
            text = " ".join(test for test, _ in reference.conditions)
            for attribute in (match[0] for match in re.finditer(r"self\.\w+", text)):
                before, after = (
                    assigned(code, reference.owner, attribute) for code in (self.base, self.release)
                )
                if before and before != after:
                    return attribute
        return ""

    def _others(self, was: Sequence[Reference]) -> dict[str, str]:
        """What the release has for the same purposes and the base has not, each with its place.

        Of an attribute every value counts that the class gives it, also after the first.
        """
        others: dict[str, str] = {}
        is_class = _is_class(self.base, was[0].place)
        for module, holder, role in dict.fromkeys((r.module, r.holder, r.role) for r in was):
            if not role or not holder:
                continue
            scope = holder.rpartition(".")[0] if role.startswith("self.") else holder
            before = values(self.base, (module, scope or holder), role)
            after = values(self.release, (module, scope or holder), role)
            if is_class or ".".join(was[0].place) not in after:
                others |= {text: at for text, at in after.items() if text not in before}
        return others

    def _is_made_elsewhere(
        self, owner: Place, old: Sequence[Reference], new: Sequence[Reference]
    ) -> bool:
        """Whether a relative of the owner makes it now; of an owner that is gone, any other."""
        if self.release.find(owner) is None and {r.owner for r in old} & {r.owner for r in new}:
            return True
        return any(
            owner in self.release.order(r.owner) or r.owner in self.release.order(owner)
            for r in new
        )

    # What overrides them

    def overridden(self) -> Iterator[Finding]:
        """The classes in which another method stands for one with a seam."""
        before = set(self._overrides(self.base))
        for derived, method, provider, where in self._overrides(self.release):
            same = any(b[:3] == (derived, method, provider) for b in before)
            name, by = ".".join(derived), ".".join(provider)
            detail = f"{name} has {by} in place of {'.'.join(method)}, which holds a seam"
            yield Finding(OVERRIDDEN, not same, derived, where, detail, (method,))

    def _overrides(self, code: References) -> Iterator[tuple[Place, Place, Place, str]]:
        """A derived class, the method with a seam, what stands for it, and where."""
        for module, name, node in code.derived(self.tops):
            bodies = {n.name: n for n in node.body if hasattr(n, "name")}
            order = code.order((module.name, name)) or [(module.name, name)]
            inherited = {
                top for base in code.bases_of_node(module, node) for top in code.order(base)
            }
            for top in self.tops.keys() & inherited:
                for method in self.tops[top]:
                    last = method[1].rpartition(".")[2]
                    if "." not in method[1]:
                        continue
                    if last in bodies:
                        if _calls_on(bodies[last], last):
                            continue
                        line = getattr(bodies[last], "lineno", node.lineno)
                        by = module.name, f"{name}.{last}"
                        yield (module.name, name), method, by, f"{module.path}:{line}"
                        continue
                    provider = _provider(code, order[1:], last)
                    # What a class in between overrides is reported with that class.
                    if provider is None:
                        continue
                    owner = provider[0], provider[1].rpartition(".")[0]
                    if top not in code.order(owner):
                        where = f"{module.path}:{node.lineno}"
                        yield (module.name, name), method, provider, where

    # What replaces them

    def replaced(self) -> Iterator[Finding]:
        """The statements that assign to something that holds a seam, and second definitions."""
        before = {found[:3] for found in replacements(self.base, self.seams)}
        for place, holder, how, where in replacements(self.release, self.seams):
            new = (place, holder, how) not in before
            by, name = (".".join(filter(None, each)) for each in (holder, place))
            detail = f"{by} replaces {name} ({how})"
            yield Finding(REPLACED, new, place, where, detail, tuple(self._held(place)))

    def _held(self, place: Place) -> Iterator[Place]:
        for seam in self.seams:
            within = not place[1] or seam[1].startswith(f"{place[1]}.")
            if seam == place or (seam[0] == place[0] and within):
                yield seam


def _calls_on(function: ast.AST, name: str) -> bool:
    """Whether a method always calls the one that it overrides."""
    statements = list(getattr(function, "body", ()))
    while statements:
        statement = statements.pop(0)
        if isinstance(statement, ast.With):
            statements = [*statement.body, *statements]
            continue
        inner = list(ast.walk(statement))
        if isinstance(statement, (ast.If, ast.For, ast.While, ast.Try)):
            if any(isinstance(node, (ast.Return, ast.Raise)) for node in inner):
                return False
            continue
        calls = (node.func for node in inner if isinstance(node, ast.Call))
        if any(isinstance(call, ast.Attribute) and call.attr == name for call in calls):
            owners = [
                ast.unparse(node.func.value)
                for node in inner
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                and node.func.attr == name
            ]  # fmt: skip
            if any(owner.startswith("super(") for owner in owners):
                return True
    return False


def _provider(code: References, order: Sequence[Place], method: str) -> Place | None:
    """Where Python would find a method, looking through classes in their order."""
    for module, name in order:
        source = code.definitions.module(module)
        if source is not None and f"{name}.{method}" in source.definitions:
            return module, f"{name}.{method}"
    return None


def _is_class(code: References, place: Place) -> bool:
    definition = code.find(place)
    return definition is not None and definition.kind == "class"


def _in_engine(reference: Reference) -> bool:
    return f"{reference.module}.".startswith(_ENGINE)


def _as_free(was: Iterable[Reference], now: Iterable[Reference]) -> bool:
    """Whether some reference is under no condition that is new."""
    return any(set(new.conditions) <= set(old.conditions) for new in now for old in was)


def _under(references: Sequence[Reference]) -> str:
    texts = []
    for reference in references:
        tests = [f"{'' if holds else 'not '}({test})" for test, holds in reference.conditions]
        texts.append(" and ".join(tests) or "always")
    return "where " + ", or ".join(dict.fromkeys(texts))
