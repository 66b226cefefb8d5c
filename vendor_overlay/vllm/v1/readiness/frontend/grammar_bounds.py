"""Fix ``bad-requests``, grammars: refuse structured outputs whose text is beyond bounds.

Stock 0.22.0 validates a grammar in the front end's event loop, compiles it in a thread of the
engine core, and fills a bitmask per token, all without limits. A schema of 19 KB stalls the front
end for many seconds, a grammar of 130 KB occupies a thread for minutes, and a regex of 43
characters stalls the engine for seconds per token. A compilation cannot be interrupted.

Here the text is read before anything validates it, in linear time. The variables in
:data:`vllm.v1.readiness.engine.switch.BOUNDS` bound its bytes, its nesting, its rules, its choices,
the products of nested repetition counts, and the items of arrays. Text that cannot be read falls
back to upstream.
"""

# mirrors: vllm.sampling_params:StructuredOutputsParams
# mirrors: vllm.sampling_params:SamplingParams._validate_structured_outputs
# mirrors: vllm.v1.structured_output.utils:convert_lark_to_ebnf

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from vllm.exceptions import VLLMValidationError
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

#: Fields of StructuredOutputsParams with a text. Upstream refuses a request with several.
_FIELDS = ("json", "regex", "choice", "grammar", "structural_tag")
#: Digests of texts within their bounds, and the number to keep.
_within: dict[bytes, None] = {}
_DIGESTS = 1024
#: Counts and products above this one count as this one.
_HUGE = 10**18
#: Depth of values that are not read; a value of the Python API may contain itself.
_ENDLESS = 100_000
#: Bound to its subject in an error.
_SUBJECTS: Mapping[str, str] = {
    switch.GRAMMAR_BYTES: "its size in bytes is",
    switch.GRAMMAR_DEPTH: "the depth of its nesting is",
    switch.GRAMMAR_RULES: "the number of its rules is",
    switch.GRAMMAR_CHOICES: "the number of its choices is",
    switch.GRAMMAR_REPEATS: "the product of its nested repetition counts is",
    switch.SCHEMA_ITEMS: "the largest of its maxItems and minItems is",
}

# Kinds of JSON values: a schema, schemas by name, schemas by regex, and a part of a structural tag.
_SCHEMA, _NAMED, _PATTERNS, _TAG = "schema", "named", "patterns", "tag"
#: Keywords of a schema to the kind of their value; None for data. Others have schemas.
_KEYWORDS = dict.fromkeys(("properties", "$defs", "definitions", "dependentSchemas"), _NAMED) | {
    "patternProperties": _PATTERNS,
    **dict.fromkeys(("enum", "const", "default", "examples"), None),
}
#: Keywords with a number of items, and keywords that repeat a part of a structural tag.
_ITEMS, _TIMES = ("minItems", "maxItems"), ("min", "max")

# Tokens of each kind of text. A search takes linear time: an alternative without its end takes the
# rest of the line or text, and none can match the same characters in two ways.
_REPEAT = r"\{\s*[0-9]+\s*(?:,\s*(?:[0-9]+\s*)?)?\}|\{\s*,\s*[0-9]+\s*\}"
_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
_RULE_OF_LARK = r"^[^\S\n]*[?!]{0,2}(?P<head>\w+)(?:\.[0-9]+)?(?:\[[^\]\n]*\])?[^\S\n]*:(?!:=)"
_EBNF = re.compile(
    rf"(?P<skip>\#[^\n]*|[\s?*+]+)|(?P<repeat>{_REPEAT})|(?P<open>\()|(?P<close>\))|(?P<next>\|)"
    rf"|(?P<leaf>{_STRING}|\[[^\]\\\n]*(?:\\.[^\]\\\n]*)*\]?)"
    r"|(?P<rule>(?P<head>[\w.-]+)\s*::=)|(?P<name>[\w.-]+)"
)
_LARK = re.compile(
    rf"(?P<rule>{_RULE_OF_LARK})|(?P<skip>(?:\#|//)[^\n]*|\n|[^\S\n]+|[?*+]+)"
    rf"|(?P<repeat>{_REPEAT}|~[^\S\n]*[0-9]+(?:\.\.[0-9]+)?)"
    r"|(?P<open>[(\[])|(?P<close>[)\]])|(?P<next>\|)"
    rf"|(?P<leaf>{_STRING}|'[^'\\\n]*(?:\\.[^'\\\n]*)*'?)"
    r"|(?P<regex>/[^/\\\n]*(?:\\.[^/\\\n]*)*/?)|(?P<json>%json\s*(?=\{))|(?P<name>\w+)",
    re.MULTILINE,
)
_SPACE = re.compile(r"[ \t\r\n]*")
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|(?P<open>[\[{])|(?P<close>[\]}])', re.DOTALL)


@cache
def _regex(posix: bool, verbose: bool) -> re.Pattern[str]:
    """Return the tokens of a regex, where ``[]a]`` is one class, or white space has no meaning."""
    space, signs = (r"|\s+|\#[^\n]*", r"\s\#") if verbose else ("", "")
    first = r"\]?" if posix else ""
    return re.compile(
        rf"(?P<skip>\(\?\#[^)]*\)?|[?*+]+{space})|(?P<repeat>{_REPEAT})"
        r"|(?P<leaf>\\(?:[xuUpP]\{[^{}\\]{0,64}\}|.)"
        rf"|\[\^?{first}[^\]\\]*(?:\\.[^\]\\]*)*\]?)"
        r"|(?P<open>\()|(?P<close>\))|(?P<next>\|)"
        rf"|(?P<text>[^\\\[(){{|?*+{signs}]+|.)",
        re.DOTALL,
    )


def check(structured: "StructuredOutputsParams | None") -> None:
    """Refuse structured outputs whose text is beyond a bound.

    Raises:
        VLLMValidationError: a bound is exceeded. The message names its variable.
    """
    if structured is None or registry.BAD_REQUESTS not in switch.enabled():
        return
    for name in _FIELDS:
        if (value := getattr(structured, name)) is not None:
            reader = _Reader(f"structured_outputs.{name}")
            if name == "choice":
                reader.choices(value)
            # Upstream has made a grammar with a backend of choices or Lark, which were checked.
            elif name != "grammar" or structured._backend is None:
                reader.read(name, value)
            return


class _UnreadableError(ValueError):
    """A text cannot be read. Upstream refuses it."""


@dataclass(slots=True, eq=False)
class _Part:
    """A rule, a group, or a part of a structural tag."""

    own: int = 1  #: Largest count of a token in it.
    count: int = 1  #: Number of times that it repeats its contents.
    product: int = 0  #: Largest product of nested counts in it; 0 if it is not known yet.
    known: bool = False  #: Whether ``product`` is final.
    #: The parts in it with their counts; a rule by its name.
    parts: "list[tuple[int, _Part | str]]" = field(default_factory=list)

    def add(self, count: int, part: "_Part | str | None") -> None:
        """Add a part, or a token (None)."""
        if part is None:
            self.own = max(self.own, count)
        else:
            self.parts.append((count, part))


class _Reader:
    """Reads one constraint and compares it with the bounds."""

    def __init__(self, parameter: str) -> None:
        self._parameter, self._rules = parameter, 0
        self._bounds = {name: switch.bound(name) for name in switch.BOUNDS}

    def choices(self, choices: Iterable[object]) -> None:
        """Check the number of choices, and their total size."""
        texts = [choice for choice in choices if isinstance(choice, str)]
        self._require(switch.GRAMMAR_CHOICES, len(texts))
        self._require(switch.GRAMMAR_BYTES, sum(len(_encoded(text)) for text in texts))

    def read(self, field: str, value: object) -> None:
        """Check a text or a dict, unless it is known to be within the bounds."""
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):  # no JSON, or a dict that contains itself
            return
        except RecursionError:
            text = ""
        encoded = _encoded(text)
        self._require(switch.GRAMMAR_BYTES, len(encoded))
        salt = hashlib.blake2b(repr((field, self._bounds)).encode()).digest()
        digest = hashlib.blake2b(encoded, key=salt).digest()
        if text and digest in _within:
            return
        try:
            if field == "regex":
                self._regex(text)
            elif field == "grammar":
                self._grammar(text)
            else:
                loaded = self._loaded(text)[0] if isinstance(value, str) else value
                self._json(loaded, _SCHEMA if field == "json" else _TAG)
        except _UnreadableError:
            return
        _within[digest] = None
        while len(_within) > _DIGESTS:
            _within.pop(next(iter(_within)), None)

    def _regex(self, text: str) -> int:
        """Check a regex in each way that a backend may read it, and return its product."""
        products = (
            self._text(text, _regex(posix, verbose))[0]
            for posix in {False, "[]" in text or "[^]" in text}
            for verbose in {False, re.search(r"\(\?[a-zA-Z]*x", text) is not None}
        )
        return max(products)

    def _grammar(self, text: str) -> int:
        """Check a grammar in EBNF or Lark, or as both if it may be either; return its product."""
        readings = [(1, 0)]
        if "::=" in text:
            readings.append(self._text(text, _EBNF))
        if re.search(_RULE_OF_LARK, text, re.MULTILINE):
            readings.append(self._text(text, _LARK))
        self._rules += max(rules for _, rules in readings)
        self._require(switch.GRAMMAR_RULES, self._rules)
        return max(product for product, _ in readings)

    def _text(self, text: str, tokens: re.Pattern[str]) -> tuple[int, int]:
        """Check a regex or grammar; return its product, and its number of rules."""
        part = _Part()
        parts, outer, names = [part], list[_Part](), dict[str, _Part]()
        count, rules, position = 0, 0, 0
        last: _Part | str | None = None
        while match := tokens.search(text, position):
            kind, position = match.lastgroup, match.end()
            if kind == "skip":
                continue
            if kind == "repeat":
                numbers = re.findall(r"[0-9]+", match.group())
                count = min(_HUGE, count * max(1, *map(_number, numbers), 1))
                continue
            part.add(count, last)
            count, last = 1, None
            if kind == "open":
                outer.append(part)
                self._require(switch.GRAMMAR_DEPTH, len(outer))
                part = _Part()
                parts.append(part)
            elif kind == "close":
                if outer:
                    last, part = part, outer.pop()
            elif kind == "rule":
                rules += 1
                outer.clear()
                part = names.setdefault(match["head"], _Part())
                parts.append(part)
                count = 0
            elif kind == "name":
                last = match.group()
            elif kind == "regex":
                last = _Part(self._regex(match.group()[1:]))
            elif kind == "json":
                schema, position = self._loaded(text, position)
                self._json(schema, _SCHEMA)
            elif kind == "next":
                count = 0
        part.add(count, last)
        return self._product(parts, names), rules

    def _json(self, root: object, kind: str) -> None:
        """Check a schema or a structural tag.

        Items are not multiplied: neither xgrammar nor guidance copies what an array repeats. A
        structural tag repeats regexes and grammars without separators, as groups do.
        """
        whole = _Part()
        parts, seen, targets = [whole], set[int](), list[Any]()
        todo = [(root, root, kind, 1, whole)]
        while todo:
            value, base, kind, depth, parent = todo.pop()
            if isinstance(value, (dict, list, tuple)):
                self._require(switch.GRAMMAR_DEPTH, depth)
                if depth > _ENDLESS:
                    raise _UnreadableError
                seen.add(id(value))
                part = parent
                if kind == _TAG:
                    part = _Part()
                    part.count = _largest(value, _TIMES)
                    parts.append(part)
                    parent.add(1, part)
                elif kind == _SCHEMA:
                    self._require(switch.SCHEMA_ITEMS, _largest(value, _ITEMS))
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if kind == _PATTERNS:
                        self._regex(str(key))
                    if isinstance(item, str):
                        parent.add(self._string(kind, key, item), None)
                        if key == "$ref" and (target := _target(base, item)) is not None:
                            targets.append((target, base, _SCHEMA, depth, whole))
                    elif (inner := _kind(kind, key)) is not None:
                        begins = kind == _TAG and inner == _SCHEMA
                        todo.append((item, item if begins else base, inner, depth + 1, part))
            while targets and not todo:
                if id((target := targets.pop())[0]) not in seen:
                    todo.append(target)
        self._product(parts, {})

    def _string(self, kind: str, key: object, text: str) -> int:
        """Check a string in a JSON object if it is a regex or a grammar.

        Return its product in a structural tag.
        """
        if key == "pattern" and kind in (_SCHEMA, _TAG):
            product = self._regex(text)
            return product if kind == _TAG else 1
        return self._grammar(text) if key == "grammar" and kind == _TAG else 1

    def _loaded(self, text: str, position: int = 0) -> tuple[Any, int]:
        """Return the JSON value at a position of a text, and its end; check its depth."""
        try:
            return _DECODER.raw_decode(text, _SPACE.match(text, position).end())  # type: ignore[union-attr]
        except RecursionError:
            depth = deepest = 0
            for match in _BRACKETS.finditer(text, position):
                depth += {"open": 1, "close": -1}.get(match.lastgroup or "", 0)
                deepest = max(deepest, depth)
            self._require(switch.GRAMMAR_DEPTH, deepest)
            raise _UnreadableError from None
        except ValueError:
            raise _UnreadableError from None

    def _product(self, parts: list[_Part], names: Mapping[str, _Part]) -> int:
        """Check the largest product of nested counts, and return it."""
        for start in parts:
            path = [start]
            while path:
                part = path[-1]
                inner = [
                    (count, each if isinstance(each, _Part) else names.get(each))
                    for count, each in (() if part.known else part.parts)
                ]
                if not part.product:
                    part.product = 1  # for parts that contain this one
                    path += (each for _, each in inner if each and not each.product)
                    continue
                path.pop()
                if not part.known:
                    largest = max(
                        (count * each.product for count, each in inner if each), default=1
                    )
                    part.product = min(_HUGE, part.count * max(part.own, largest))
                    part.known = True
        product = max((part.product for part in parts), default=1)
        self._require(switch.GRAMMAR_REPEATS, product)
        return product

    def _require(self, name: str, value: int) -> None:
        """Refuse a value beyond its bound."""
        bound = self._bounds[name]
        if bound is not None and value > bound:
            raise VLLMValidationError(
                f"{self._parameter}: {_SUBJECTS[name]} {value}, more than {bound}. Simplify it, or "
                f"restart the server with a larger {name}.",
                parameter=self._parameter,
                value=value,
            )


def _target(base: Any, reference: str) -> Any:  # noqa: ANN401 - a JSON value
    """Return the value at a JSON pointer, such as ``#/$defs/a``; None if there is none."""
    path, *keys = unquote(reference).split("/")
    if path != "#":
        return None
    try:
        for key in keys:
            name = key.replace("~1", "/").replace("~0", "~")
            base = base[name if isinstance(base, dict) else int(name)]
    except (LookupError, TypeError, ValueError):
        return None
    return base


def _kind(kind: str, key: object) -> str | None:
    """Return the kind of the value of a key or index; None for data."""
    if kind == _TAG:
        return _SCHEMA if key in ("schema", "json_schema") else _TAG
    return _KEYWORDS.get(key, _SCHEMA) if kind == _SCHEMA else _SCHEMA  # type: ignore[call-overload]


def _largest(value: Any, keys: Iterable[str]) -> int:  # noqa: ANN401 - a JSON value
    """Return the largest count in a JSON object, at least 1."""
    counts = [value.get(key) for key in keys] if isinstance(value, dict) else []
    numbers = [n for n in counts if isinstance(n, (int, float)) and not isinstance(n, bool)]
    return int(max((min(_HUGE, n) for n in numbers if n >= 1), default=1))


def _number(digits: str) -> int:
    """Return the number in some digits, which may be very many."""
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) < len(str(_HUGE)) else _HUGE


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


_DECODER = json.JSONDecoder(parse_int=_number)
