"""The table of fields inside of fields: knows all of OpenAI's, and each is treated as it says."""

from __future__ import annotations

import copy
import json
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
import typing_extensions
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chat

from paceline.gateway import chat, openai, structured
from paceline.gateway.field_table import (
    NESTED_FIELDS,
    OPENAI_FIELDS,
    OTHER_NESTED_FIELDS,
    Treatment,
)
from paceline.gateway.parameters import MESSAGE_NEUTRAL
from paceline.methods import METHODS

ROWS = (*NESTED_FIELDS, *OTHER_NESTED_FIELDS)
WRAPPERS = (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated)
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def expanded(name: str) -> list[str]:
    """a[b,c].d -> a[b].d, a[c].d"""
    found = re.search(r"\[([^\]]*,[^\]]*)\]", name)
    if not found:
        return [name]
    head, tail = name[: found.start()], name[found.end() :]
    return [path for each in found[1].split(",") for path in expanded(f"{head}[{each}]{tail}")]


# -- every field of the package's own types --------------------------------------------------------


def openai_paths(module: Any, endpoint: str) -> set[str]:
    """Paths inside of the top-level fields; nothing below one that is refused or has no effect."""
    ends = {
        path
        for row in NESTED_FIELDS
        if getattr(row, endpoint) in (Treatment.REFUSED, Treatment.NEUTRAL)
        for path in expanded(row.name)
    }
    honored = {row.name for row in OPENAI_FIELDS if getattr(row, endpoint) is Treatment.HONORED}
    paths: set[str] = set()
    for kind in ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"):
        hints = typing_extensions.get_type_hints(getattr(module, kind))
        for name in honored & set(hints):
            paths.update(inside(hints[name], name, ends))
    return paths


def inside(hint: Any, path: str, ends: set[str]) -> Iterator[str]:
    for kind in objects(hint):
        hints = typing_extensions.get_type_hints(kind)
        tag = next(
            (f"[{values[0]}]" for key in ("role", "type") if (values := words(hints, key))), ""
        )
        if path + tag in ends:
            yield path + tag
            continue
        for name, inner in hints.items():
            below = f"{path}{tag}.{name}"
            if below in ends or not is_object_only(inner):
                yield below
            if below not in ends:
                yield from inside(inner, below, ends)


def words(hints: dict[str, Any], key: str) -> tuple[Any, ...]:
    kind = bare(hints.get(key))
    return get_args(kind) if get_origin(kind) is Literal else ()


def bare(hint: Any) -> Any:
    while get_origin(hint) in WRAPPERS:
        hint = get_args(hint)[0]
    return hint


def objects(hint: Any) -> Iterator[Any]:
    """The typed dictionaries that a value may be, or may be a list of."""
    hint = bare(hint)
    if typing_extensions.is_typeddict(hint):
        yield hint
        return
    for inner in get_args(hint):
        yield from objects(inner)


def is_object_only(hint: Any) -> bool:
    """A field of which only what is inside counts; None aside."""
    hint = bare(hint)
    if typing_extensions.is_typeddict(hint):
        return True
    inner = [each for each in get_args(hint) if each is not type(None)]
    return bool(inner) and get_origin(hint) is not Literal and all(map(is_object_only, inner))


def test_every_field_of_openai_is_in_the_table() -> None:
    in_table = {path for row in NESTED_FIELDS if row.chat for path in expanded(row.name)}
    known = openai_paths(openai_chat, "chat")
    assert known - in_table == set(), "fields without a row"
    assert in_table - known == set(), "rows without a field"
    completions = {path for row in NESTED_FIELDS if row.completions for path in expanded(row.name)}
    assert openai_paths(openai_completions, "completions") <= completions


class Part(typing_extensions.TypedDict):
    type: Literal["text"]
    text: str
    novelty: int


class Message(typing_extensions.TypedDict, total=False):
    role: typing_extensions.Required[Literal["user"]]
    content: str | list[Part]
    deep: list[Part] | None


def test_a_new_field_of_openai_would_be_noticed() -> None:
    assert set(inside(list[Message], "messages", {"messages[user].deep[text]"})) == {
        "messages[user].role", "messages[user].content", "messages[user].content[text].type",
        "messages[user].content[text].text", "messages[user].content[text].novelty",
        "messages[user].deep[text]",
    }  # fmt: skip


def test_the_table_has_what_the_code_has() -> None:
    def names(prefix: str) -> set[str]:
        paths = [path for row in ROWS for path in expanded(row.name)]
        pattern = re.compile(re.escape(prefix).replace("ANY", r"\w+") + r"(\.|\[)(\w+)")
        found = [pattern.match(path) for path in paths]
        return {match[2] for match in found if match and match[1] == "."}

    assert names("messages[ANY]") == {*chat.MessageBody.model_fields, *MESSAGE_NEUTRAL}
    calls = "messages[assistant].tool_calls[function]"
    assert names(calls) == set(chat.ToolCallBody.model_fields)
    assert names(f"{calls}.function") == set(chat.FunctionCallBody.model_fields)
    assert names("tools[function]") == set(chat.ToolBody.model_fields)
    assert names("tools[function].function") == set(chat.FunctionBody.model_fields)
    assert names("stream_options") == set(openai.StreamOptions.model_fields)
    assert names("speculation") == set(openai.SpeculationOptions.model_fields)
    assert names("structured_outputs") == set(structured._WAYS)


# -- what becomes of each --------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]
MINIMAL = {
    "chat": {"model": "toy", "messages": MESSAGES},
    "completions": {"model": "toy", "prompt": "hi"},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PARTS = [{"type": "text", "text": "hi"}]
SCHEMA = {"name": "n", "schema": {"type": "object"}}
ALLOWED = {"mode": "auto", "tools": [FUNCTION | {"function": {"name": "f"}}]}

# A body in which the path's object is, by the longest prefix that fits.
BODIES: dict[str, dict[str, Any]] = {
    "messages[tool].content[": {
        "messages": [CALLING, {"role": "tool", "content": PARTS, "tool_call_id": "c1"}]
    },
    "messages[tool]": {
        "messages": [CALLING, {"role": "tool", "content": "x", "tool_call_id": "c1"}]
    },
    "messages[assistant].tool_calls": {"messages": [CALLING]},
    **{
        f"messages[{role}]{part}": {"messages": [{"role": role, "content": content}]}
        for role in ("developer", "system", "user", "assistant")
        for part, content in ((".content[", PARTS), ("", "x"))
    },
    "messages": {},
    "tools": {"tools": [FUNCTION], "tool_choice": "required"},
    "tool_choice[function]": {
        "tools": [FUNCTION, {"type": "function", "function": {"name": "g"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "tool_choice[allowed_tools]": {
        "tools": [FUNCTION, {"type": "function", "function": {"name": "g"}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
    },
    "tool_choice": {"tools": [FUNCTION]},
    "response_format[json_schema]": {
        "response_format": {"type": "json_schema", "json_schema": SCHEMA}
    },
    "response_format[json_object]": {"response_format": {"type": "json_object"}},
    "response_format": {"response_format": {"type": "text"}},
    "stream_options": {"stream": True, "stream_options": {}},
    "structured_outputs": {"structured_outputs": {}},
    "speculation": {"speculation": {}},
}
# Honored: values that mean different things, or the only one that a `type` has. Else: one that
# would change the answer, or that may be given without changing it.
VALUES: dict[str, tuple[Any, ...]] = {
    "content": ("a", "b"),
    "name": ("f", "g"),
    "text": ("a", "b"),
    "prompt_cache_breakpoint": ({"mode": "explicit"},),
    "content[image_url]": ([{"type": "image_url", "image_url": {"url": "data:,"}}],),
    "content[input_audio]": ([{"type": "input_audio", "input_audio": {}}],),
    "content[file]": ([{"type": "file", "file": {"file_id": "x"}}],),
    "content[refusal]": ([{"type": "refusal", "refusal": "no"}],),
    "id": ("c1", "c2"),
    "arguments": ('{"a": 1}', "{}"),
    "tool_calls[custom]": ([{"id": "c1", "type": "custom", "custom": {"name": "x", "input": ""}}],),
    "refusal": ("no",),
    "audio": ({"id": "x"},),
    "function_call": ({"name": "f", "arguments": "{}"},),
    "tool_call_id": ("c1",),
    "messages[function]": ([{"role": "function", "name": "f", "content": "x"}],),
    "description": ("a", "b"),
    "parameters": ({"type": "object"}, {"type": "object", "properties": {"x": {}}}),
    "tools.function.strict": (True, False),
    "tools[custom]": ([{"type": "custom", "custom": {"name": "x"}}],),
    "tool_choice[custom]": ({"type": "custom", "custom": {"name": "x"}},),
    "mode": ("auto", "required"),
    "tools": ([FUNCTION | {"function": {"name": n}} for n in "fg"], ALLOWED["tools"]),
    "schema": ({"type": "object"}, {"type": "integer"}),
    "strict": (True,),
    "include_usage": (True, False),
    "include_obfuscation": (True,),
    "continuous_usage_stats": (True, False),
    "reasoning_content": ("a", "b"),
    "annotations": ([{"type": "url_citation"}],),
    "index": (0,),
    "json": ({"type": "object"}, {"type": "integer"}),
    "regex": ("a", "b"),
    "choice": (["a"], ["b"]),
    "grammar": ('start: "a"', 'start: "b"'),
    "json_object": (True,),
    "method": METHODS,
    "max_tokens": (1, 2),
    "speculation.mode": ("coupled", "rejection"),
    "lookahead": ("adaptive", "fixed"),
    "include_rounds": (True, False),
}
CASES = [
    pytest.param(endpoint, path, getattr(row, endpoint), id=f"{endpoint}-{path}")
    for row in ROWS
    for endpoint in PATHS
    if getattr(row, endpoint)
    for path in expanded(row.name)
]


def values_of(path: str) -> tuple[Any, ...]:
    top, leaf = path.split("[")[0].split(".")[0], path.rpartition(".")[2]
    plain = re.sub(r"\[\w+\]", "", path)
    if leaf in ("role", "type"):
        return (re.findall(r"\[(\w+)\]", path)[-1],)
    return VALUES.get(plain) or VALUES.get(f"{top}.{leaf}") or VALUES[leaf]


def body_with(endpoint: str, path: str, *value: Any) -> dict[str, Any]:
    """A body with this value at the path, or, without one, with what is there anyhow."""
    prefix = max((each for each in BODIES if path.startswith(each)), key=len)
    body: dict[str, Any] = copy.deepcopy(MINIMAL[endpoint] | BODIES[prefix])
    place: Any = body
    *outer, leaf = [step.split("[")[0] for step in path.split(".")]
    for step in outer:
        place = place[step][-1] if isinstance(place[step], list) else place[step]
    for each in value:
        place[leaf] = each
    return body


def meaning(endpoint: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """What a body asks for, as everything behind the parser sees it."""
    kind = chat.ChatBody if endpoint == "chat" else openai.CompletionBody
    parsed = openai.parse_body(json.dumps(body).encode(), kind)
    rest = parsed.model_dump(exclude={"response_format", "structured_outputs", "messages", "tools"})
    turns = (parsed.turns, parsed.offer) if isinstance(parsed, chat.ChatBody) else ()
    return structured.grammar_of(parsed.structured), rest, turns


@pytest.mark.parametrize(("endpoint", "path", "treatment"), CASES)
async def test_a_field_is_treated_as_the_table_says(
    endpoint: str, path: str, treatment: Treatment, harness: Any
) -> None:
    values = values_of(path)
    bodies = [body_with(endpoint, path, value) for value in values]
    if treatment is Treatment.REFUSED:
        await check_refused(harness, endpoint, path, bodies[0])
        return
    meanings = [meaning(endpoint, body) for body in bodies]
    if treatment is Treatment.NEUTRAL:
        without = body_with(endpoint, path)
        assert meanings == [meaning(endpoint, without)] * len(values)
        return
    for index, each in enumerate(meanings):
        assert each not in meanings[:index], "another value, and the same meaning"
    # read, and not passed over
    await check_refused(harness, endpoint, path, body_with(endpoint, path, [[7]]))


async def check_refused(harness: Any, endpoint: str, path: str, body: dict[str, Any]) -> None:
    answer = await harness.post(PATHS[endpoint], body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(path.split("[")[0].split(".")[0])
    assert error["message"].endswith(".")
    assert harness.targets.requests == []
