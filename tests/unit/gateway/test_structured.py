"""What the fields ask for, and what the grammars made of them let through, byte by byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from paceline.errors import RequestError
from paceline.gateway.chat import ToolOffer
from paceline.gateway.output_grammar import after_reasoning, form_grammar
from paceline.gateway.output_parser import CallArguments, CallBegin, OutputFormat, OutputParser
from paceline.gateway.structured import (
    StructuredFields,
    auto_tool_grammar,
    calls_or,
    grammar_of,
    reasoning_prefix,
    tool_grammar,
)
from paceline.gateway.tools import FunctionSpec, ToolFormat, ToolMode
from paceline.grammars import load_grammars

TOY = load_grammars("toy")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CITY = FunctionSpec(
    "city",
    {
        "type": "object",
        "properties": {"name": {"$ref": "#/$defs/name"}},
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"name": {"type": "string"}},
    },
    strict=True,
)
NOW = FunctionSpec("now")
FUNCTIONS = (CITY, NOW)


def accepts(grammar: str, text: str) -> bool:
    """Whether the text may come, and be all."""
    TOY.check(grammar)
    state = TOY.start(grammar)
    return all(state.advance(byte) for byte in text.encode()) and state.advance(256)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


GOOD = '{"a": 1, "b": "x"}'


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"x": [1]}', "{}"], ["[]", "{", "1", ""]),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            [GOOD],
            # Whitespace is fixed: a model cannot go on with it for ever.
            [
                '{"a": 1}',
                '{"a": 1, "b": "z"}',
                '{"a":1,"b":"x"}',
                '{"a": 1,  "b": "x"}',
                GOOD + " ",
            ],
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, ["{}"], ["1"]),
        ({"guided_json": SCHEMA}, [GOOD], ["{}"]),
        ({"guided_json": json.dumps(SCHEMA)}, [GOOD], ["{}"]),
        ({"guided_regex": "[0-9]{3}(-x)?"}, ["123", "123-x"], ["12", "1234", "123-"]),
        ({"guided_choice": ["yes", 'n"o\n', "é"]}, ["yes", 'n"o\n', "é"], ["ye", "no", ""]),
        ({"guided_grammar": 'start: "a" b+\nb: "b"'}, ["ab", "abbb"], ["a", "b"]),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")'}, ["ab", "ac"], ["a", "abc"]),
        ({"structured_outputs": {"json": SCHEMA}}, [GOOD], ["{}"]),
        ({"structured_outputs": {"choice": ["a"], "regex": None}}, ["a"], ["b"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ["a"], ["b"]),
    ],
)
def test_fields(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(StructuredFields(**fields))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_no_form() -> None:
    assert grammar_of(StructuredFields()) == ""
    assert grammar_of(StructuredFields(response_format={"type": "text"})) == ""
    plain = StructuredFields(response_format={"type": "text"}, guided_choice=["a"])
    assert accepts(grammar_of(plain), "a")


@pytest.mark.parametrize(
    ("fmt", "call", "join"),
    [(ToolFormat.HERMES, hermes, "\n"), (ToolFormat.LLAMA3_JSON, llama, "; ")],
)
def test_calls_that_must_come(fmt: ToolFormat, call: Any, join: str) -> None:
    one, other = call("city", '{"name": "X"}'), call("now", '{"any": [1]}')
    for parallel in (False, True):
        grammar = tool_grammar(FUNCTIONS, fmt, parallel=parallel)
        assert accepts(grammar, one)
        assert accepts(grammar, other)
        assert accepts(grammar, one + join + other) is parallel
        for text in ("", "hello", call("city", "{}"), call("rm", "{}"), one + " and"):
            assert not accepts(grammar, text)


def test_calls_that_may_come() -> None:
    grammar = auto_tool_grammar(FUNCTIONS, ToolFormat.HERMES)
    one, loose = hermes("city", '{"name": "X"}'), hermes("now", "{}")
    for text in ("", "hello <b> {x}", one, f"I look.\n{one}\n{loose} so", "a < b"):
        assert accepts(grammar, text), text
    for text in ("<tool_call>", "x <tool_call>\n{}", hermes("city", "{}"), hermes("rm", "{}")):
        assert not accepts(grammar, text), text
    single = auto_tool_grammar(FUNCTIONS, ToolFormat.HERMES, parallel=False)
    assert accepts(single, one)
    assert not accepts(single, one + one)


def test_calls_that_may_come_as_llama_writes_them() -> None:
    grammar = auto_tool_grammar(FUNCTIONS, ToolFormat.LLAMA3_JSON)
    for text in ("", "hello {x}", llama("city", '{"name": "X"}'), llama("now", "{}")):
        assert accepts(grammar, text), text
    for text in ('{"x": 1}', llama("city", "{}"), llama("rm", "{}")):
        assert not accepts(grammar, text), text


def test_an_answer_in_form_or_calls() -> None:
    form = grammar_of(StructuredFields(guided_json=SCHEMA))
    grammar = calls_or(form, FUNCTIONS, ToolFormat.HERMES, parallel=True)
    assert accepts(grammar, GOOD)
    assert accepts(grammar, hermes("now", "{}"))
    assert not accepts(grammar, "hello")


@pytest.mark.parametrize("form", [{"guided_json": SCHEMA}, {"guided_choice": [GOOD]}])
def test_reasoning_first(form: dict[str, Any]) -> None:
    inner = grammar_of(StructuredFields(**form))
    inside = reasoning_prefix(inner, "</think>")
    assert accepts(inside, f"well {{\n</think>\n\n{GOOD}")
    assert not accepts(inside, GOOD)
    maybe = reasoning_prefix(inner, "</think>", "<think>")
    assert accepts(maybe, GOOD)
    assert accepts(maybe, f"<think>\nwell</think>\n{GOOD}")
    assert not accepts(maybe, f"well</think>{GOOD}")


def test_only_what_reasons_reasons() -> None:
    inner = grammar_of(StructuredFields(guided_choice=["a"]))
    assert after_reasoning(inner, OutputFormat()) == inner
    assert after_reasoning("", OutputFormat(has_reasoning=True)) == ""
    thinks = OutputFormat(has_reasoning=True, begins_in_reasoning=True)
    assert accepts(after_reasoning(inner, thinks), "x</think>a")


@pytest.mark.parametrize("fmt", ToolFormat)
@pytest.mark.parametrize("parallel", [False, True])
def test_whatever_the_grammar_lets_through_is_read_as_calls(
    fmt: ToolFormat, parallel: bool
) -> None:
    """Walk through the grammar, now by its first choice, now by its last: calls come out."""
    offer = ToolOffer(FUNCTIONS, ToolMode.REQUIRED, parallel)
    grammar = form_grammar(StructuredFields(), offer, fmt)
    names = frozenset(function.name for function in FUNCTIONS)
    for turn in range(6):
        text = walk(grammar, turn)
        parser = OutputParser(OutputFormat(fmt, names))
        parts = [*parser.push(text), *parser.finish()]
        assert parser.num_calls >= 1, text
        assert all(isinstance(part, CallBegin | CallArguments) for part in parts), text
        for index in range(parser.num_calls):
            arguments = "".join(
                part.text
                for part in parts
                if isinstance(part, CallArguments) and part.index == index
            )
            assert isinstance(json.loads(arguments), dict)


def walk(grammar: str, turn: int, max_bytes: int = 400) -> str:
    state = TOY.start(grammar)
    out = bytearray()
    for step in range(max_bytes):
        allowed = [i for i in range(257) if state.bitmask()[i // 8] >> i % 8 & 1]
        if 256 in allowed:
            return out.decode()
        # Printable where there is a choice, and towards the end of strings and objects soon.
        plain = [i for i in allowed if 32 <= i < 127] or allowed
        closing = [i for i in plain if chr(i) in '"}'] if step % 7 >= turn else []
        token_id = (closing or plain)[turn % len(closing or plain)]
        out.append(token_id)
        assert state.advance(token_id)
    raise AssertionError(f"no end: {out!r}")


def test_two_ways_at_once_are_named() -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(StructuredFields(guided_choice=["a"], guided_regex="a"))
    assert "'guided_regex' and 'guided_choice'" in caught.value.message


def test_the_library_makes_no_grammar_of_a_broken_schema() -> None:
    grammar = grammar_of(StructuredFields(guided_json={"type": "nonsense"}))
    assert LLMatcher.validate_grammar(grammar)
    with pytest.raises(ValueError, match="nonsense"):
        TOY.check(grammar)
