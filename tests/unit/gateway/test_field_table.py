"""The table of request fields says what the code does, and knows every field of OpenAI's."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chat

from paceline.gateway.chat import ChatBody
from paceline.gateway.field_table import (
    NESTED_FIELDS,
    OPENAI_FIELDS,
    OTHER_FIELDS,
    OTHER_NESTED_FIELDS,
    FieldRow,
    Treatment,
    markdown_table,
)
from paceline.gateway.openai import CompletionBody, GenerationBody, parse_body
from paceline.gateway.parameters import CHAT_NEUTRAL, COMPLETION_NEUTRAL

BODIES: dict[str, tuple[type[GenerationBody], Any]] = {
    "chat": (ChatBody, CHAT_NEUTRAL),
    "completions": (CompletionBody, COMPLETION_NEUTRAL),
}
ROWS = [*OPENAI_FIELDS, *OTHER_FIELDS]
REQUIRED: dict[str, dict[str, Any]] = {
    "chat": {"model": "toy", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "toy", "prompt": "hi"},
}
# A value that would change the answer.
REFUSED: dict[str, Any] = {
    "suffix": "x",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "service_tier": "flex",
    "store": True,
    "modalities": ["audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "verbosity": "low",
    "reasoning_effort": "low",
    "web_search_options": {},
    "moderation": {"model": "x"},
    "skip_special_tokens": False,
}
NEUTRAL: dict[str, Any] = {
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "me",
    "prompt_cache_options": {"mode": "x"},
    "prompt_cache_retention": "24h",
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"},
}


def openai_names(module: Any) -> set[str]:
    """The fields of the package's own request types, streamed or not."""
    names: set[str] = set()
    for kind in ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"):
        names |= set(typing.get_type_hints(getattr(module, kind)))
    return names


def test_every_field_of_openai_is_in_the_table() -> None:
    chat, completions = openai_names(openai_chat), openai_names(openai_completions)
    assert {row.name for row in OPENAI_FIELDS if row.chat} >= chat
    assert {row.name for row in OPENAI_FIELDS if row.completions} >= completions
    known = chat | completions
    assert {row.name for row in OPENAI_FIELDS} == known


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_table_has_what_the_code_has(endpoint: str) -> None:
    body_type, neutral = BODIES[endpoint]
    in_table = {row.name: getattr(row, endpoint) for row in ROWS if getattr(row, endpoint)}
    honored = {name for name, what in in_table.items() if what is Treatment.HONORED}
    assert honored == set(body_type.model_fields)
    assert set(in_table) - honored == set(neutral)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("endpoint", BODIES)
def test_a_field_is_treated_as_the_table_says(endpoint: str, row: FieldRow) -> None:
    body_type, _ = BODIES[endpoint]
    plain = body_type.model_validate(REQUIRED[endpoint])
    treatment = getattr(row, endpoint)
    if treatment is Treatment.NEUTRAL:
        body = REQUIRED[endpoint] | {row.name: NEUTRAL[row.name]}
        assert body_type.model_validate(body) == plain
    elif treatment is None or treatment is Treatment.REFUSED:
        value = REFUSED.get(row.name, NEUTRAL.get(row.name, 1))
        raw = json.dumps(REQUIRED[endpoint] | {row.name: value}).encode()
        with pytest.raises(Exception, match=row.name) as caught:
            parse_body(raw, body_type)
        assert getattr(caught.value, "param", None) == row.name
        assert getattr(caught.value, "status", None) == 400


def test_markdown() -> None:
    num_rows = len(ROWS) + len(NESTED_FIELDS) + len(OTHER_NESTED_FIELDS)
    top, inside = markdown_table().split("\n\n")
    assert f"{top}\n{inside}".count("\n") == num_rows + 2 * 2
