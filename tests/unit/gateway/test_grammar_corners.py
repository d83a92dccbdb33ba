"""Corners of structured output: what was wrong once. Every byte is read by the real matcher."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.gateway.structured import (
    StructuredFields,
    auto_tool_grammar,
    calls_or,
    grammar_of,
    reasoning_prefix,
    tool_grammar,
)
from paceline.gateway.tools import FunctionSpec, ToolFormat
from paceline.grammars import is_allowed, load_grammars
from paceline.models import TOY_EOS_TOKEN_ID

GRAMMARS = load_grammars("toy")
HERMES, LLAMA = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, NOW = FunctionSpec("weather", CITY, strict=True), FunctionSpec("now")
FUNCTIONS = (WEATHER, NOW)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, parameters: str) -> str:
    return f'{{"name": "{name}", "parameters": {parameters}}}'


PARIS, BAD = '{"city": "Paris"}', '{"city": 1}'
CALL, LLAMA_CALL = hermes("weather", PARIS), llama("weather", PARIS)


def is_whole(grammar: str, text: str) -> bool:
    """Whether the text fits and may end here."""
    state = GRAMMARS.start(grammar)
    return state.sync(list(text.encode())) and is_allowed(state.bitmask(), TOY_EOS_TOKEN_ID)


def check(grammar: str, fitting: list[str], others: list[str]) -> None:
    assert [text for text in fitting if not is_whole(grammar, text)] == []
    assert [text for text in others if is_whole(grammar, text)] == []


@pytest.mark.parametrize(
    ("fields", "fitting", "others"),
    [
        ({"guided_choice": ["😀", 'é"\\\n', "\u2028", "ab"]}, ["😀", 'é"\\\n', "\u2028", "ab"],
         ["a", "abb", ""]),
        ({"guided_regex": "[0-9]+"}, ["1", "22"], ["", "a", "1a"]),
        ({"guided_grammar": 'start: "a" X\nX: /[0-9]+/'}, ["a1"], ["a", "b1"]),
        ({"guided_grammar": 'root ::= "a" x # GBNF\nx ::= [0-9]+\n'}, ["a1"], ["a", "b1"]),
        ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, null]}'], ["[]", "1"]),
        ({"guided_json": json.dumps(CITY)}, [PARIS], [BAD, "{}"]),
        ({"structured_outputs": {"json": CITY}}, [PARIS], [BAD]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"structured_outputs": {"choice": ["a"]}}, ["a"], ["b"]),
    ],
)  # fmt: skip
def test_a_form(fields: dict[str, Any], fitting: list[str], others: list[str]) -> None:
    check(grammar_of(StructuredFields(**fields)), fitting, others)


@pytest.mark.parametrize("style", [{}, {"x-guidance": {"whitespace_flexible": True}}])
def test_whitespace_is_not_for_the_model_to_choose(style: dict[str, Any]) -> None:
    written = ['{"a": [1, 2]}']
    loose = ['{"a":[1,2]}', '{ "a": [1, 2]}', '{"a": [1, 2]}\n', '\n{"a": [1, 2]}']
    schema: dict[str, Any] = {"type": "object", **style}
    check(grammar_of(StructuredFields(guided_json=schema)), written, loose)
    grammar = tool_grammar([FunctionSpec("now", schema)], HERMES, parallel=False)
    check(grammar, [hermes("now", a) for a in written], [hermes("now", a) for a in loose])


@pytest.mark.parametrize("space", ["", " ", "\n\n", "<|python_tag|>", " <|python_tag|>"])
def test_what_reads_as_a_call_of_llama_is_held_to_its_schema(space: str) -> None:
    grammar = auto_tool_grammar(FUNCTIONS, LLAMA, parallel=False)
    bad = [llama("weather", BAD), llama("rm", "{}"), LLAMA_CALL + "; " + LLAMA_CALL, '{"a": 1}']
    check(grammar, ["", "text {x}", LLAMA_CALL], [space + text for text in bad])


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        ({"properties": {"n": {"$ref": "#"}}, "additionalProperties": False},
         ["{}", '{"n": {"n": {}}}'], ['{"n": {"name": "f", "arguments": {}}}', '{"n": 1}']),
        ({"properties": {"n": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}},
         ['{"n": 1}'], ['{"n": "1"}']),
        ({"properties": {"n": {"$ref": "#/properties/m"}, "m": {"type": "integer"}}},
         ['{"n": 1}'], ['{"n": "1"}']),
        ({}, ["{}", '{"a": 1}'], ["1", "[]", '"a"']),
    ],
)  # fmt: skip
def test_references_are_within_the_parameters(
    schema: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    grammar = tool_grammar([FunctionSpec("f", schema)], HERMES, parallel=False)
    check(grammar, [hermes("f", a) for a in fitting], [hermes("f", a) for a in others])


@pytest.mark.parametrize("begin", ["", "<think>"])
@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (grammar_of(StructuredFields(response_format={"type": "json_object"})), '{"a": 1}'),
        (grammar_of(StructuredFields(guided_regex="[0-9]+")), "12"),
        (grammar_of(StructuredFields(guided_grammar='root ::= "a"')), "a"),
        (tool_grammar(FUNCTIONS, HERMES, parallel=True), CALL),
        (auto_tool_grammar(FUNCTIONS, HERMES), "a " + CALL),
        (calls_or(grammar_of(StructuredFields(guided_regex="1")), FUNCTIONS, HERMES,
                  parallel=False), CALL),
    ],
)  # fmt: skip
def test_reasoning_comes_first(grammar: str, answer: str, begin: str) -> None:
    wrapped = reasoning_prefix(grammar, "</think>", begin)
    thoughts = [f"{begin}a{{ </thin</think>\n\n", f"{begin}</think>"]
    check(wrapped, [thought + answer for thought in thoughts], [])
    assert is_whole(wrapped, answer) is bool(begin)
    bad = hermes("weather", BAD)
    check(wrapped, [], [thought + bad for thought in thoughts])


def shaped(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


TEXT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guided_json": {"enum": [2**70]}}, "guided_json", "invalid_value"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "invalid_value"),
        ({"response_format": shaped({"const": 2**64})}, "response_format.json_schema.schema",
         "invalid_value"),
        # Well-formed, but no text fits.
        ({"response_format": shaped({"$ref": "#"})}, "response_format", "invalid_value"),
        ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "invalid_value"),
        ({"guided_grammar": 'root ::= root "a"'}, "guided_grammar", "invalid_value"),
        # A search that runs over line breaks again from each line would take an hour.
        ({"guided_grammar": "\n" * 120_000}, "guided_grammar", "too_long"),
        ({"guided_grammar": "\n" * 500_000}, "guided_grammar", "too_long"),
        ({"tools": [TEXT_TOOL], "tool_choice": "required"}, "tools", "invalid_value"),
        (called('{"a": NaN}'), "messages[0].tool_calls[0].function", "invalid_value"),
        (called('{"a": "\\ud800"}'), "messages[0].tool_calls[0].function", "invalid_value"),
        ({"structured_outputs": {"\x1b[31m\n": 1}}, "structured_outputs.?[31m?",
         "unknown_parameter"),
        ({"response_format": {"type": "text", "\x1b": 1}}, "response_format.?",
         "unknown_parameter"),
    ],
    ids=range(13),
)  # fmt: skip
async def test_refused(fields: dict[str, Any], param: str, code: str, harness: Any) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}
    answer = await harness.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].isprintable()
    assert "NoExtension" not in error["message"]
    assert harness.targets.requests == []
