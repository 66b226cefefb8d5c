"""The fields that docs/review-json.md documents, compared with those of a JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from support.sites import REPO

PAGE = REPO / "docs" / "review-json.md"

_ROW = re.compile(r"\| `([^`]+)` \| (.+?) \| (.+) \|")
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Field:
    """What is documented of one field.

    Attributes:
        kind: the type in words.
        values: of an enumeration.
        nullable: whether it may be null.
    """

    kind: str
    values: frozenset[str]
    nullable: bool


@dataclass
class Form:
    """The documented fields of a file, and those that were seen.

    Attributes:
        fields: by path.
        seen: the paths that occurred, with something else than null.
        faults: how a JSON differs from what is documented.
    """

    fields: Mapping[str, Field]
    seen: set[str] = field(default_factory=set)
    faults: set[str] = field(default_factory=set)

    def check(self, content: Mapping[str, Any]) -> None:
        """Compare the contents of a file."""
        self._object(content, "")

    @property
    def unseen(self) -> set[str]:
        """The documented fields that no JSON had."""
        return set(self.fields) - self.seen

    def _object(self, content: Mapping[str, Any], path: str) -> None:
        prefix = f"{path}." if path else ""
        inner = (name for name in self.fields if name.startswith(prefix))
        wanted = {name for name in inner if not re.search(r"[.]", name.removeprefix(prefix))}
        there = {prefix + key for key in content}
        self.faults |= {f"{name} is not documented" for name in there - wanted}
        self.faults |= {f"{name} is not there" for name in wanted - there}
        for key, value in content.items():
            if prefix + key in wanted:
                self._value(value, prefix + key)

    def _value(self, value: Any, path: str) -> None:
        known = self.fields[path]
        if value is None:
            if not known.nullable:
                self.faults.add(f"{path} is null")
            return
        self.seen.add(path)
        kind = known.kind
        values = value if isinstance(value, list) else [value]
        texts = all(isinstance(each, str) for each in values)
        right: dict[str, bool] = {
            "text": isinstance(value, str),
            "number": type(value) is int,
            "true or false": isinstance(value, bool),
            "object": isinstance(value, dict),
            "list of objects": all(isinstance(each, dict) for each in values),
            "list of texts": texts,
            "texts by name": isinstance(value, dict)
            and all(isinstance(each, str) for each in value.values()),
            "one of": isinstance(value, str) and value in known.values,
            "some of": texts and known.values.issuperset(values),
        }
        if not right[kind] or isinstance(value, list) != kind.startswith(("list", "some")):
            self.faults.add(f"{path} is {value!r}, and documented as {kind}")
        elif kind == "object":
            self._object(value, path)
        elif kind == "list of objects":
            for each in values:
                self._object(each, f"{path}[]")


def form(name: str) -> Form:
    """The fields that the page documents of ``review.json`` or ``matrix.json``."""
    head = f"| field of {name} | type | meaning |\n| --- | --- | --- |\n"
    _, _, rest = PAGE.read_text().partition(head)
    fields = {}
    for line in rest.partition("\n\n")[0].splitlines():
        match = _ROW.fullmatch(line)
        assert match, line
        path, kind, _ = match.groups()
        assert path not in fields, path
        nullable = kind.endswith(" or null")
        values = frozenset(_CODE.findall(kind))
        kind = kind.removesuffix(" or null").rstrip(",")
        fields[path] = Field(kind[:7].rstrip() if values else kind, values, nullable)
    assert fields, f"{PAGE.name} has no table that begins with {head}"
    return Form(fields)
