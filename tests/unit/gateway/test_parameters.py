"""Fields that OpenAI clients send at values which change nothing are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.gateway.chat import ChatBody
from paceline.gateway.openai import CompletionBody, parse_body
from paceline.gateway.parameters import CHAT_NEUTRAL, COMPLETION_NEUTRAL, MESSAGE_NEUTRAL

SHARED = {
    "user": ["", "somebody"],
    "safety_identifier": ["abc"],
    "prompt_cache_key": ["abc"],
    "metadata": [{}, {"a": "b"}],
    "skip_special_tokens": [True],
    "service_tier": ["auto", "default"],
}
COMPLETION: dict[str, list[Any]] = SHARED | {
    "suffix": [""],
}
CHAT: dict[str, list[Any]] = SHARED | {
    "store": [False],
    "prediction": [{"type": "content", "content": "x"}],
    "prompt_cache_options": [{}],
    "prompt_cache_retention": ["24h"],
    "verbosity": ["medium"],
    "audio": [],
    "web_search_options": [],
    "moderation": [],
    "reasoning_effort": [],
    "modalities": [["text"]],
    "functions": [[]],
    "function_call": ["none"],
}


CHAT_REQUIRED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def test_every_row_of_the_tables_is_tested() -> None:
    assert set(COMPLETION) == set(COMPLETION_NEUTRAL)
    assert set(CHAT) == set(CHAT_NEUTRAL)


@pytest.mark.parametrize("name", COMPLETION)
def test_completion(name: str) -> None:
    plain = CompletionBody.model_validate({"model": "toy", "prompt": "hi"})
    for value in [None, *COMPLETION[name]]:
        assert CompletionBody.model_validate({"model": "toy", "prompt": "hi", name: value}) == plain


@pytest.mark.parametrize("name", CHAT)
def test_chat(name: str) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
    plain = ChatBody.model_validate(body)
    for value in [None, *CHAT[name]]:
        assert ChatBody.model_validate(body | {name: value}) == plain


def test_null_is_the_default_everywhere() -> None:
    raw = (
        b'{"model":"toy","prompt":"hi","stream":null,"stream_options":null,"temperature":null,'
        b'"top_p":null,"top_k":null,"seed":null,"max_tokens":null,"stop":null,'
        b'"min_p":null,"presence_penalty":null,"frequency_penalty":null,'
        b'"repetition_penalty":null,"logit_bias":null,"n":null,"best_of":null,"min_tokens":null,'
        b'"stop_token_ids":null,"include_stop_str_in_output":null,"prompt_logprobs":null,'
        b'"echo":null,"logprobs":null,"ignore_eos":null,"speculation":null}'
    )
    assert parse_body(raw, CompletionBody) == CompletionBody(model="toy", prompt="hi")


def test_every_field_may_be_null() -> None:
    """Clients send what they do not set as null."""
    for body_type, required in ((CompletionBody, {"prompt": "hi"}), (ChatBody, CHAT_REQUIRED)):
        names = set(body_type.model_fields) - {"model", *required}
        nulls = dict.fromkeys(names) | {"model": "toy"} | required
        assert parse_body(json.dumps(nulls).encode(), body_type) == body_type.model_validate(
            {"model": "toy"} | required
        )


def test_our_own_answer_comes_back_as_history() -> None:
    history = {"role": "assistant", "content": "x"} | dict.fromkeys(MESSAGE_NEUTRAL)
    history |= {"annotations": [], "tool_calls": [], "refusal": ""}
    body = ChatBody.model_validate({"model": "toy", "messages": [history]})
    assert [(turn.role, turn.content) for turn in body.turns] == [("assistant", "x")]


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatBody.model_validate(
        {"model": "toy", "messages": [{"role": "user", "content": parts}]}
    )
    assert body.turns[0].content == "a\nb"


def test_either_limit_of_a_chat() -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
    for limits in (
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ):
        assert ChatBody.model_validate(body | limits).requested_max_tokens == 3
    assert ChatBody.model_validate(body).requested_max_tokens is None
