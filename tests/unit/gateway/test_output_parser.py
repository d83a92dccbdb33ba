"""A choice's text taken apart: the same parts however it is cut, and nothing lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.gateway.output_parser import (
    CallArguments,
    CallBegin,
    Content,
    OutputFormat,
    OutputParser,
    Part,
    Reasoning,
)
from paceline.gateway.tools import ToolFormat

NAMES = frozenset({"now", "get_weather"})
HERMES = OutputFormat(ToolFormat.HERMES, NAMES)
LLAMA = OutputFormat(ToolFormat.LLAMA3_JSON, NAMES)
THINKING = OutputFormat(has_reasoning=True)
INSIDE = OutputFormat(ToolFormat.HERMES, NAMES, has_reasoning=True, begins_in_reasoning=True)
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "}</tool_call>{", "b": [{}]}}\n</tool_call>'


def joined(parts: list[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls)."""
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.index == len(calls)
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            assert part.index == len(calls) - 1, "arguments of another call"
            calls[part.index][1] += part.text
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return reasoning, content, [(name, arguments) for name, arguments in calls]


def parse(form: OutputFormat, *pieces: str) -> tuple[str, str, list[tuple[str, str]]]:
    parser = OutputParser(form)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined(parts + parser.finish())


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "content", "calls"),
    [
        (HERMES, "hello ", "", "hello ", []),
        (HERMES, "", "", "", []),
        (HERMES, "a < b <tool", "", "a < b <tool", []),
        (HERMES, CALL, "", "", [("now", '{"a": "}</tool_call>{", "b": [{}]}')]),
        (HERMES, f"I look.\n{CALL}\n", "", "I look.", [("now", ...)]),
        (HERMES, f"{CALL}\n{CALL}", "", "", [("now", ...), ("now", ...)]),
        (HERMES, f"{CALL} and so on", "", " and so on", [("now", ...)]),
        # The arguments come first, or there are none: read when the call is whole.
        (
            HERMES,
            '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>',
            "",
            "",
            [("now", '{"a": 1}')],
        ),
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", "", [("now", "{}")]),
        (HERMES, '<tool_call>{"name": "now", "parameters": {}}', "", "", [("now", "{}")]),
        # No calls: another name, no JSON, no end.
        (HERMES, "<tool_call>oops</tool_call> x", "", "<tool_call>oops</tool_call> x", []),
        (
            HERMES,
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
            "",
            '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
            [],
        ),
        (HERMES, '<tool_call>{"name": "no', "", '<tool_call>{"name": "no', []),
        # Cut off by max_tokens inside the arguments: what there is goes out, as OpenAI's does.
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a', "", "", [("now", '{"a')]),
        (LLAMA, "hello {x}", "", "hello {x}", []),
        (LLAMA, '{"name": "now", "parameters": {"a": 1}}', "", "", [("now", '{"a": 1}')]),
        (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}', "", "", [("now", "{}")]),
        (
            LLAMA,
            '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"c": 2}}',
            "",
            "",
            [("now", "{}"), ("get_weather", '{"c": 2}')],
        ),
        (LLAMA, '{"x": 1}', "", '{"x": 1}', []),
        (LLAMA, '<|python_tag|> {"x": 1}', "", '<|python_tag|> {"x": 1}', []),
        (LLAMA, '\n{"x": ' + "1" * 600, "", '\n{"x": ' + "1" * 600, []),
        (LLAMA, '{"name": "now", "parameters": {}}; {"x": 1}', "", '; {"x": 1}', [("now", "{}")]),
        (LLAMA, '{"name": "now", "parameters": {}} indeed', "", "indeed", [("now", "{}")]),
        (THINKING, "<think>\nwell\n</think>\n\nyes", "well", "yes", []),
        (THINKING, "yes <think> no", "", "yes <think> no", []),
        (THINKING, "<think>never ends </thin", "never ends </thin", "", []),
        (THINKING, "<th", "", "<th", []),
        (INSIDE, "well\n</think>" + CALL, "well", "", [("now", ...)]),
        (INSIDE, "<think>\nwell</think>x", "well", "x", []),
        (INSIDE, "no end ", "no end", "", []),
        (INSIDE, " \n<thi", "<thi", "", []),
        (INSIDE, " \n", "", "", []),
    ],
)
def test_parts(
    form: OutputFormat,
    text: str,
    reasoning: str,
    content: str,
    calls: list[tuple[str, object]],
) -> None:
    shown = parse(form, text)
    assert shown[:2] == (reasoning, content)
    assert [name for name, _ in shown[2]] == [name for name, _ in calls]
    for (_, found), (_, wanted) in zip(shown[2], calls, strict=True):
        assert wanted is ... or found == wanted
    for size in (1, 2, 3, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert parse(form, *pieces) == shown, f"pieces of {size}"


WORDS = st.sampled_from(
    [
        *(CALL, "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<t", "</"),
        *('{"name": "now", ', '"arguments": {', '"parameters": {', "}", "}}", ";", '"'),
        *("\n", " ", "x", "\\"),
    ]
)


@given(
    st.sampled_from([HERMES, LLAMA, THINKING, INSIDE]),
    st.lists(WORDS, max_size=14),
    st.data(),
)
def test_cuts_do_not_matter(form: OutputFormat, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(form, text)
    assert parse(form, *pieces) == whole
    reasoning, content, calls = whole
    # Nothing is made up.
    for char in "x;\\":
        found = sum(part.count(char) for part in (reasoning, content, *[c[1] for c in calls]))
        assert found <= text.count(char) + 2 * sum(json.dumps(c[1]).count("\\") for c in calls)


@given(st.text(max_size=60))
def test_plain_text_is_content(text: str) -> None:
    parser = OutputParser(OutputFormat())
    assert joined([*parser.push(text), *parser.finish()]) == ("", text, [])
