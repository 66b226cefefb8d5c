"""The fix bad-requests, grammars: what is beyond the bounds is refused by its text alone.

Drawn texts have a known product of counts, and are their own oracle; upstream's front end is that
of the texts which it must still see.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from demo import model
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.checkpoint import VOCABULARY
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.frontend import grammar_bounds
from vllm.v1.readiness.watch import startup

FIX = "bad-requests"
INPUT_PROCESSOR = "vllm/v1/engine/input_processor.py"


def check(**grammar: Any) -> None:
    grammar_bounds.check(StructuredOutputsParams(**grammar))


def refused(name: str, value: int, bound: int, **grammar: Any) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        check(**grammar)
    field = f"structured_outputs.{next(iter(grammar))}"
    assert (caught.value.parameter, caught.value.value) == (field, value)
    assert re.match(rf"{field}: .* {value}, more than {bound}\..*{name}\. ", str(caught.value))


def nested(depth: int) -> str:
    """A schema of objects in one another; its JSON is twice as deep, and one."""
    return '{"type":"object","properties":{"t":' * depth + "{}" + "}}" * depth


def array(schema: Any, count: int) -> dict[str, Any]:
    return {"type": "array", "items": schema, "maxItems": count}


def arrays(*counts: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": counts[-1]}
    for count in reversed(counts[:-1]):
        schema = array(schema, count)
    return schema


def repeated(most: int, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "repeat", "min": 1, "max": most, "content": content}


def tag(content: dict[str, Any]) -> str:
    """A structural tag around a format."""
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [content]}}
    )


def old_tag(schema: dict[str, Any]) -> str:
    return json.dumps(
        {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    )


#: 6,002 rules, each of which refers to the next.
NULLABLE = ["root ::= r0", *(f'r{n} ::= "t1"? r{n + 1}' for n in range(6000)), 'r6000 ::= "t1"']
MILLIONS = array({"type": "integer"}, 10**7)
HUNDREDS = "((([a-z0-9]{1,100}){1,100}){1,100}){1,100}"

#: By variable, grammars beyond its default and their values.
KILLERS: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    switch.GRAMMAR_DEPTH: {
        "nested objects": ({"json": nested(450)}, 129),
        "nested objects, a dict": ({"json": json.loads(nested(300))}, 129),
        "JSON too deep to parse": ({"json": '{"a":' * 40000 + "1" + "}" * 40000}, 40000),
        "nested groups": ({"regex": "(" * 200 + "a" + ")" * 200}, 129),
    },
    switch.GRAMMAR_RULES: {
        "nullable rules": ({"grammar": "\n".join(NULLABLE)}, 6002),
        "Lark rules": ({"grammar": "".join(f"r{n}: r{n + 1}\n" for n in range(600))}, 600),
    },
    switch.GRAMMAR_CHOICES: {"choices": ({"choice": ["t"] * 10001}, 10001)},
    switch.GRAMMAR_BYTES: {
        "large choices": ({"choice": ["é" * 100_000] * 2}, 400_000),
        "a large schema": ({"json": json.dumps({"title": "t" * 300_000})}, 300_013),
        "a large dict": ({"json": {"title": "é" * 150_000}}, 300_013),
    },
    switch.GRAMMAR_REPEATS: {
        "Lark": ({"grammar": 'start: (a ~ 3..100)~100\na: "x" /[ab]{70}/'}, 700_000),
        "Lark that may be EBNF": ({"grammar": f'start: "::=" /{HUNDREDS}/'}, 10**8),
        "a pattern for names": ({"json": {"patternProperties": {HUNDREDS: {}}}}, 10**8),
        "a repeated grammar": (
            {"structural_tag": tag(repeated(100, {"type": "grammar", "grammar": 'r ::= "a"{99}'}))},
            9900,
        ),
        "very many digits": ({"regex": "a{1," + "9" * 9000 + "}"}, 10**18),
        "a class that a backend ends early": ({"regex": "[^]" + HUNDREDS}, 10**8),
        "a verbose regex": ({"regex": "(?x)" + HUNDREDS.replace("{", " # )\n {")}, 10**8),
    },
    switch.SCHEMA_ITEMS: {
        "a schema in Lark": ({"grammar": 'start: %json {"items": {"maxItems": 10000000}}'}, 10**7),
        "items of a float": ({"json": '{"minItems": 1e9}'}, 10**9),
        "items by escapes": ({"json": '{"\\u006daxItems": 10000000}'}, 10**7),
        "a reference to data": (
            {"json": {"default": {"a/b": MILLIONS}, "items": {"$ref": "#/default/a~1b"}}},
            10**7,
        ),
        "an old tag": ({"structural_tag": old_tag(MILLIONS)}, 10**7),
        "very many digits of a schema": ({"json": '{"maxItems": ' + "9" * 9000 + "}"}, 10**18),
    },
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in KILLERS.items() for case in cases]
)
def test_a_grammar_beyond_a_bound_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, case: str
) -> None:
    grammar, value = KILLERS[name][case]
    refused(name, value, switch.BOUNDS[name], **grammar)
    for none in ("0", "off"):
        monkeypatch.setenv(name, none)
        try:
            check(**grammar)
        except VLLMValidationError as error:  # beyond another bound as well
            assert f" {name}." not in str(error)
    monkeypatch.delenv(name)
    refused(name, value, switch.BOUNDS[name], **grammar)
    for off in ("-bad-requests", "-fixes", "off"):
        monkeypatch.setenv(switch.NAME, off)
        check(**grammar)


def catalogue(size: int) -> dict[str, Any]:
    """A schema of tools, as a required tool choice makes it."""
    fields = {
        **{
            f"text_{n}": {"type": "string", "maxLength": 10000, "description": "t" * 60}
            for n in range(5)
        },
        "kind": {"type": "string", "enum": [f"value {n}" for n in range(9)]},
        "rows": arrays(100, 50, 1000),
    }
    tools: list[dict[str, Any]] = []
    while len(json.dumps(tools)) < size:
        parameters = {"type": "object", "properties": fields, "required": ["kind"]}
        tools.append(
            {"properties": {"name": {"enum": [f"tool {len(tools)}"]}, "parameters": parameters}}
        )
    return {"type": "array", "minItems": 1, "items": {"anyOf": tools}}


ORDINARY: dict[str, dict[str, Any]] = {
    "tools": {"json": catalogue(128 << 10)},
    "arrays in arrays": {"json": arrays(1000, 1000, 1000, 1000)},
    "a repeated schema in a tag": {
        "structural_tag": tag(
            repeated(
                5000,
                {"type": "json_schema", "json_schema": arrays(5000) | {"pattern": "[a-z]{1,9}"}},
            )
        )
    },
    "Lark literals": {"grammar": "start: \"{9999}\" '{9999}' // {9999}\n  | /a\\/{3}/ # {9999}"},
    "a rule of itself": {"grammar": 'root ::= "a" root{1,100} | root{1,100}'},
    "a schema of itself": {"json": {"items": {"$ref": "#"}, "maxItems": 4000}},
    "names like keywords": {
        "json": {"properties": {"maxLength": {"maxLength": 9}, "$ref": {}, "pattern": {}}}
    },
    "data": {"json": {"enum": [{"maxLength": 10**9}], "default": {"pattern": HUNDREDS}}},
    "a description": {"json": {"description": HUNDREDS, "title": "{" * 999}},
    "any object": {"json_object": True},
}


@pytest.mark.parametrize("grammar", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_grammars_pass(grammar: dict[str, Any]) -> None:
    check(**grammar)
    check(**grammar)


ODD: dict[str, dict[str, Any]] = {
    "not a schema": {"json": "[1, 2]"},
    "a number": {"json": {"maxLength": float("nan"), "minItems": "9" * 30, "maxItems": True}},
    "infinite": {"json": '{"minimum": Infinity, "maxLength": -5}'},
    "references": {
        "json": {"allOf": [{"$ref": "#/a/b"}, {"$ref": "other"}, {"$ref": "#/allOf/9"}]}
    },
    "keys": {"json": {1: {None: "t"}, "properties": {2: {}}}},
    "an object": {"json": {"title": object()}},
    "a surrogate": {"regex": "\ud800{2}"},
    "Lark of no JSON": {"grammar": "start: %json {a"},
    "a tag of no JSON": {"structural_tag": "{"},
}


@pytest.mark.parametrize("grammar", ODD.values(), ids=ODD)
def test_what_cannot_be_read_is_left_to_upstream(grammar: dict[str, Any]) -> None:
    check(**grammar)


def test_a_dict_that_contains_itself_is_left_to_upstream() -> None:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema}
    params = StructuredOutputsParams(json={})
    params.json = schema
    grammar_bounds.check(params)


@st.composite
def counted(draw: st.DrawFn, groups: bool = True) -> tuple[str, int]:
    """A regex, and the product of its counts."""
    atoms = st.sampled_from(
        ["a", "é", r"\{", r"\(", "[{9}]", r"[\]({]", "[^)|]", r"\x{99}", ".", "{", "{a}"]
    )
    product, texts = 1, []
    for _ in range(draw(st.integers(1, 3))):
        text, inner = draw(atoms), 1
        if groups and draw(st.booleans()):
            text, inner = draw(counted(draw(st.booleans())))
            text = draw(st.sampled_from(["({})", "(?:{})", "(?P<n>{}|b)"])).replace("{}", text)
        least = draw(st.integers(1, 40))
        most = least + draw(st.integers(0, 40))
        end, count = draw(
            st.sampled_from(
                [("", 1), ("*", 1), ("+?", 1), ("{%d}", least), ("{%d,}", least), ("{%d,%d}", most)]
            )
        )
        texts.append(
            text + (end % (least, most)[: end.count("%")]) + draw(st.sampled_from(["", "?", "|"]))
        )
        product = max(product, inner * count)
    return "".join(texts), product


@given(counted())
def test_the_product_of_a_drawn_regex(drawn: tuple[str, int]) -> None:
    at_bound({"regex": drawn[0]}, switch.GRAMMAR_REPEATS, drawn[1])


def at_bound(grammar: dict[str, Any], name: str, value: int) -> None:
    """A value at its bound is let in, and one above it is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, str(value))
        check(**grammar)
        if value > 1:
            patch.setenv(name, str(value - 1))
            refused(name, value, value - 1, **grammar)


@given(st.lists(counted(False), min_size=1, max_size=4))
def test_the_product_of_drawn_rules(drawn: list[tuple[str, int]]) -> None:
    rules, product = ["root ::= r0"], 1
    for number, (_, count) in enumerate(drawn):
        rules.append(
            f'r{number} ::= "{{9}}\\"(" ("x" r{number + 1}){{{count}}} # ({{9}}\n | [({{9}}]'
        )
        product *= count
    at_bound(
        {"grammar": "\n".join([*rules, f'r{len(drawn)} ::= "a"'])}, switch.GRAMMAR_REPEATS, product
    )


LEAVES = st.one_of(
    st.just(({"type": "integer"}, 1, 1)),
    st.just(({"type": "string", "maxLength": 10**9}, 1, 1)),
    counted().map(lambda drawn: ({"type": "string", "pattern": drawn[0]}, 1, drawn[1])),
)


def _in_array(drawn: tuple[Any, int, int], count: int) -> tuple[Any, int, int]:
    schema, most, product = drawn
    return array(schema, count), max(most, count), product


def _in_object(drawn: list[tuple[Any, int, int]]) -> tuple[Any, int, int]:
    schemas, most, products = zip(*drawn, strict=True)
    names = ("maxItems", "enum", "pattern", "t")
    properties = dict(zip(names, schemas, strict=False))
    return {"type": "object", "properties": properties}, max(most), max(products)


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_in_array, inner, st.integers(1, 50)),
        st.lists(inner, min_size=1, max_size=4).map(_in_object),
        inner.map(lambda drawn: ({"anyOf": [{"type": "null"}, drawn[0]]}, *drawn[1:])),
    ),
    max_leaves=8,
)


@given(SCHEMAS, st.sampled_from(["dict", "text", "tag"]))
def test_the_counts_of_a_drawn_schema(drawn: tuple[Any, int, int], kind: str) -> None:
    schema, most, product = drawn
    grammar = {
        "dict": {"json": schema},
        "text": {"json": json.dumps(schema, indent=2)},
        "tag": {"structural_tag": tag({"type": "json_schema", "json_schema": schema})},
    }[kind]
    for name, value in ((switch.GRAMMAR_REPEATS, product), (switch.SCHEMA_ITEMS, most)):
        with pytest.MonkeyPatch.context() as patch:
            for other in {switch.GRAMMAR_REPEATS, switch.SCHEMA_ITEMS} - {name}:
                patch.setenv(other, "off")
            at_bound(grammar, name, value)


@given(counted(), st.lists(st.integers(1, 40), max_size=3))
def test_the_product_of_a_drawn_tag(drawn: tuple[str, int], counts: list[int]) -> None:
    pattern, product = drawn
    part: dict[str, Any] = {"type": "regex", "pattern": pattern}
    for count in counts:
        part, product = repeated(count, part), product * count
    at_bound({"structural_tag": tag(part)}, switch.GRAMMAR_REPEATS, product)


@given(
    st.text(alphabet="(){}[]|\\\"'/#%:=~,19ax\n .?*+$", max_size=60),
    st.sampled_from(["regex", "grammar", "json"]),
)
def test_no_text_is_an_error_of_ours(text: str, field: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in switch.BOUNDS:
            patch.setenv(name, "off")
        check(**{field: text})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """The configuration of an engine with a tokenizer of words such as "t17"."""
    folder = tmp_path_factory.mktemp("model")
    words = model.write_tokenizer(folder / "words", VOCABULARY)
    served = model.write(folder / "served", vocab_size=VOCABULARY)
    yield EngineArgs(
        model=str(served), tokenizer=str(words), load_format="dummy", enforce_eager=True
    ).create_engine_config()


def admitted(side: str, config: VllmConfig, params: SamplingParams) -> SamplingParams:
    """The parameters that a front end sends to the engine."""
    processor = modules.of_side(side)(INPUT_PROCESSOR).InputProcessor(config)
    prompt = {"type": "token", "prompt_token_ids": [3, 4]}
    sent: SamplingParams = processor.process_inputs(
        "r", prompt, params, ("generate",)
    ).sampling_params
    return sent


@pytest.mark.parametrize(
    "backend", ["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]
)
def test_each_backend_sees_what_is_within_the_bounds_alone(
    side: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(config.structured_outputs_config, "backend", backend)
    regex = StructuredOutputsParams(regex="([a-c]{1,80}d){1,80}")
    if side == "ours":
        with pytest.raises(VLLMValidationError, match="is 6400, more than 5000"):
            admitted(side, config, SamplingParams(structured_outputs=regex))
        assert regex._backend is None  # upstream's validation has not begun
        monkeypatch.setenv(switch.GRAMMAR_REPEATS, "6400")
    assert admitted(side, config, SamplingParams(structured_outputs=regex)).structured_outputs.regex


@pytest.mark.parametrize(
    "grammar", [{"choice": ["t1", 't"2', "t3"]}, {"grammar": "start: a\na: 't1' | 't2'"}], ids=str
)
def test_parameters_are_used_again(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, grammar: dict[str, Any]
) -> None:
    """Upstream writes a longer grammar into them."""
    text = next(iter(grammar.values()))
    monkeypatch.setenv(switch.GRAMMAR_BYTES, str(len("".join(text))))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**grammar))
    assert admitted("ours", config, params) == admitted("ours", config, params)
    assert len(params.structured_outputs.grammar) > len("".join(text))


@pytest.mark.parametrize("name", switch.BOUNDS)
@pytest.mark.parametrize("value", ["-1", "1.5", "many", "Off", "9" * 19])
def test_other_bounds_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(switch.NumberError, match=f"{name}.*0 or off for no bound, or unset"):
        startup.start(object())
