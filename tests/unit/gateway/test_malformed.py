"""Bodies that must be refused: the right 4xx, one sentence, nothing started, nothing echoed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.gateway.sentences import REASONS, UNKNOWN_REASON

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BIG = "x" * 5000


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": "hi"} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": "hi"}]} | fields


def said(*messages: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": list(messages)}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now"} | fields}


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function}


def shaped(**fields: Any) -> dict[str, Any]:
    schema = {"name": "x", "schema": {"type": "object"}} | fields
    return chat(response_format={"type": "json_schema", "json_schema": schema})


TOOL, CALL = tool(), called("{}")
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(33):
    DEEP = {"type": "array", "items": DEEP}

# (path, body, param, code)
BODIES: list[tuple[str, Any, str | None, str]] = [
    # not JSON, or not an object
    (TEXT, b"", None, "invalid_json"),
    (TEXT, b"{", None, "invalid_json"),
    (TEXT, b"{} {}", None, "invalid_json"),
    (TEXT, b"null", None, "invalid_json"),
    (TEXT, b"[]", None, "invalid_json"),
    (TEXT, b'"hi"', None, "invalid_json"),
    (TEXT, b"model=toy&prompt=hi", None, "invalid_json"),
    (TEXT, b'{"model":"toy","prompt":"\xff\xfe"}', None, "invalid_json"),
    (TEXT, b"\xef\xbb\xbf" + json.dumps(text()).encode(), None, "invalid_json"),
    (TEXT, b'{"model":"toy","prompt":"\\ud800"}', None, "invalid_json"),
    (TEXT, b'{"model":"toy","prompt":"hi","temperature":NaN}', None, "invalid_json"),
    (TEXT, b'{"model":"toy","prompt":"hi","temperature":Infinity}', None, "invalid_json"),
    (TEXT, b'{"model":"toy","prompt":"hi","user":-Infinity}', None, "invalid_json"),
    (TEXT, b'{"model":"toy","prompt":"hi","seed":' + b"9" * 5000 + b"}", None, "invalid_json"),
    (TEXT, b"[" * 100_000, None, "invalid_json"),
    (TEXT, b'{"a":' * 100_000, None, "invalid_json"),
    (TEXT, b'{"model":"toy","prompt":"a\x00b"}', None, "invalid_json"),
    # missing, unknown, not this model
    (TEXT, {}, "model", "missing_required_parameter"),
    (TEXT, {"model": "toy"}, "prompt", "missing_required_parameter"),
    (CHAT, {"model": "toy"}, "messages", "missing_required_parameter"),
    (TEXT, text(model=5), "model", "invalid_value"),
    (TEXT, text(model=None), "model", "invalid_value"),
    (TEXT, text(temprature=1), "temprature", "unknown_parameter"),
    (TEXT, text(messages=[]), "messages", "unknown_parameter"),
    (CHAT, chat(prompt="hi"), "prompt", "unknown_parameter"),
    (TEXT, text(stream_options={"x": 1}, stream=True), "stream_options.x", "unknown_parameter"),
    (TEXT, text(speculation={"k": 4}), "speculation.k", "unknown_parameter"),
    # wrong types: nothing is coerced
    (TEXT, text(temperature="1"), "temperature", "invalid_value"),
    (TEXT, text(temperature=True), "temperature", "invalid_value"),
    (TEXT, text(temperature=[1]), "temperature", "invalid_value"),
    (TEXT, text(max_tokens="5"), "max_tokens", "invalid_value"),
    (TEXT, text(max_tokens=5.0), "max_tokens", "invalid_value"),
    (TEXT, text(max_tokens=True), "max_tokens", "invalid_value"),
    (TEXT, text(top_k=1.5), "top_k", "invalid_value"),
    (TEXT, text(seed="1"), "seed", "invalid_value"),
    (TEXT, text(seed=1.0), "seed", "invalid_value"),
    (TEXT, text(stream="true"), "stream", "invalid_value"),
    (TEXT, text(stream=1), "stream", "invalid_value"),
    (TEXT, text(stop=5), "stop", "invalid_value"),
    (TEXT, text(stop=[5]), "stop", "invalid_value"),
    (TEXT, text(stop={"a": 1}), "stop", "invalid_value"),
    (TEXT, text(speculation="off"), "speculation", "invalid_value"),
    (TEXT, text(prompt=None), "prompt", "invalid_value"),
    (TEXT, text(prompt=5), "prompt", "invalid_value"),
    (TEXT, text(prompt={"a": 1}), "prompt", "invalid_value"),
    (TEXT, text(prompt=[1, "a"]), "prompt", "invalid_value"),
    (TEXT, text(prompt=[1.0]), "prompt", "invalid_value"),
    (TEXT, text(prompt=[True]), "prompt", "invalid_value"),
    (CHAT, chat(messages={}), "messages", "invalid_value"),
    (CHAT, said("hi"), "messages[0]", "invalid_value"),
    (CHAT, said({"role": "user", "content": 5}), "messages[0].content", "invalid_value"),
    (CHAT, said({"role": "user", "content": None}), "messages[0]", "invalid_value"),
    (CHAT, said({"role": "user", "content": []}), "messages[0].content", "invalid_value"),
    (CHAT, said({"role": "user", "content": ["hi"]}), "messages[0].content", "invalid_value"),
    # out of range
    (TEXT, text(temperature=-0.1), "temperature", "invalid_value"),
    (TEXT, text(temperature=2.1), "temperature", "invalid_value"),
    (TEXT, text(temperature=1e-310, top_p=0.5), "temperature", "invalid_value"),
    (CHAT, chat(temperature=9e-6), "temperature", "invalid_value"),
    (TEXT, text(temperature=1e308), "temperature", "invalid_value"),
    (TEXT, b'{"model":"toy","prompt":"hi","temperature":1e999}', "temperature", "invalid_value"),
    (TEXT, text(top_p=0), "top_p", "invalid_value"),
    (TEXT, text(top_p=1.01), "top_p", "invalid_value"),
    (TEXT, text(top_k=-2), "top_k", "invalid_value"),
    (TEXT, text(top_k=2**31), "top_k", "invalid_value"),
    (TEXT, text(seed=2**63), "seed", "invalid_value"),
    (TEXT, text(seed=-(2**63) - 1), "seed", "invalid_value"),
    (TEXT, text(max_tokens=0), "max_tokens", "invalid_value"),
    (TEXT, text(max_tokens=-1), "max_tokens", "invalid_value"),
    (TEXT, text(max_tokens=10**40), "max_tokens", "invalid_value"),
    (TEXT, text(prompt=""), "prompt", "invalid_value"),
    (TEXT, text(prompt=[]), "prompt", "invalid_value"),
    (TEXT, text(prompt=[257]), "prompt", "invalid_value"),
    (TEXT, text(prompt=[-1]), "prompt", "invalid_value"),
    (TEXT, text(prompt=["a", "b"]), "prompt", "invalid_value"),
    (TEXT, text(prompt=[[1], [2]]), "prompt", "invalid_value"),
    (TEXT, text(stop=""), "stop", "invalid_value"),
    (TEXT, text(stop=["a", ""]), "stop", "invalid_value"),
    (TEXT, text(stop=["a"] * 5), "stop", "too_many"),
    (TEXT, text(stop="x" * 257), "stop", "too_long"),
    (TEXT, text(prompt="x" * 64), "prompt", "context_length_exceeded"),
    (TEXT, text(prompt=[1] * 64), "prompt", "context_length_exceeded"),
    (TEXT, text(prompt="x" * 60, max_tokens=5), "max_tokens", "context_length_exceeded"),
    (TEXT, text(prompt="x" * 100_000), "prompt", "context_length_exceeded"),
    (CHAT, said({"role": "user", "content": BIG}), "messages", "context_length_exceeded"),
    (CHAT, chat(messages=[]), "messages", "invalid_value"),
    (CHAT, chat(messages=chat()["messages"] * 257), "messages", "too_many"),
    (CHAT, said({"role": "function", "content": "x"}), "messages[0].role", "invalid_value"),
    (CHAT, said({"role": "user"}), "messages[0]", "invalid_value"),
    (CHAT, said({"content": "x"}), "messages[0].role", "missing_required_parameter"),
    (CHAT, said({"role": "user", "content": "x", "name": BIG}), "messages[0].name",
     "invalid_value"),
    (CHAT, said({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
     "messages[0].content", "invalid_value"),
    (CHAT, said({"role": "user", "content": [{"type": "text", "text": 5}]}),
     "messages[0].content", "invalid_value"),
    (CHAT, said({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}),
     "messages[0].content", "invalid_value"),
    (CHAT, said({"role": "assistant", "content": "x", "tool_calls": [{}]}),
     "messages[0].tool_calls[0].id", "missing_required_parameter"),
    (CHAT, said({"role": "user", "content": "x", "tool_calls": [CALL]}), "messages[0]",
     "invalid_value"),
    (CHAT, said(CALLED | {"tool_calls": [{**CALL, "type": "custom"}]}),
     "messages[0].tool_calls[0].type", "invalid_value"),
    (CHAT, said(CALLED | {"tool_calls": [CALL] * 129}), "messages[0].tool_calls",
     "invalid_value"),
    (CHAT, said(CALLED | {"tool_calls": [called("[1]")]}), "messages[0].tool_calls[0].function",
     "invalid_value"),
    (CHAT, said(CALLED | {"tool_calls": [called("{")]}), "messages[0].tool_calls[0].function",
     "invalid_value"),
    (CHAT, said(CALLED | {"tool_calls": [called('{"a":' * 40 + "1" + "}" * 40)]}),
     "messages[0].tool_calls[0].function", "invalid_value"),
    (CHAT, said({"role": "tool", "content": "x"}), "messages[0]", "invalid_value"),
    (CHAT, said({"role": "tool", "content": "x", "tool_call_id": "c1"}), "messages",
     "invalid_value"),
    (CHAT, said(CALLED, {"role": "tool", "content": "x", "tool_call_id": "c2"}), "messages",
     "invalid_value"),
    (CHAT, said({"role": "user", "content": "x", "reasoning_content": "y"}), "messages[0]",
     "invalid_value"),
    (CHAT, chat(max_tokens=1, max_completion_tokens=2), "max_tokens", "invalid_value"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "invalid_value"),
    (TEXT, text(max_completion_tokens=1), "max_completion_tokens", "unknown_parameter"),
    (TEXT, text(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
    # honest refusals
    (TEXT, text(suffix="x"), "suffix", "unsupported_parameter"),
    (CHAT, chat(store=True), "store", "unsupported_parameter"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function", "missing_required_parameter"),
    (CHAT, chat(tools={}), "tools", "invalid_value"),
    (CHAT, chat(tools=[TOOL] * 129), "tools", "invalid_value"),
    (CHAT, chat(tools=[TOOL, TOOL]), "tools", "invalid_value"),
    (CHAT, chat(tools=[tool(name="a b")]), "tools[0].function.name", "invalid_value"),
    (CHAT, chat(tools=[tool(name="a" * 65)]), "tools[0].function.name", "invalid_value"),
    (CHAT, chat(tools=[tool(parameters=[])]), "tools[0].function.parameters", "invalid_value"),
    (CHAT, chat(tools=[tool(parameters=DEEP)]), "tools[0].function", "invalid_value"),
    (CHAT, chat(tools=[tool(strict="yes")]), "tools[0].function.strict", "invalid_value"),
    (CHAT, chat(tools=[tool(x=1)]), "tools[0].function.x", "unknown_parameter"),
    (CHAT, chat(tools=[{"type": "custom", "custom": {"name": "x"}}]), "tools[0].type",
     "invalid_value"),
    (CHAT, chat(tools=[tool(parameters={"type": "nonsense"})], tool_choice="required"), "tools",
     "invalid_value"),
    (CHAT, chat(tools=[tool(parameters={"$ref": "#/$defs/x"}, strict=True)]), "tools",
     "invalid_value"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[TOOL], tool_choice="sometimes"), "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "rm"}}),
     "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": 1}),
     "tool_choice", "invalid_value"),
    (CHAT, chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}),
     "tool_choice", "invalid_value"),
    (CHAT, chat(parallel_tool_calls="no"), "parallel_tool_calls", "invalid_value"),
    (CHAT, chat(chat_template_kwargs=[]), "chat_template_kwargs", "invalid_value"),
    (CHAT, chat(chat_template_kwargs=dict.fromkeys("abcdefghijklmnopq", 1)),
     "chat_template_kwargs", "invalid_value"),
    # the form of an answer
    (CHAT, chat(response_format="json"), "response_format", "invalid_value"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format", "invalid_value"),
    (CHAT, chat(response_format={"type": "text", "x": 1}), "response_format.x",
     "unknown_parameter"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema",
     "invalid_value"),
    (CHAT, shaped(name="a b"), "response_format.json_schema.name", "invalid_value"),
    (CHAT, shaped(schema=[]), "response_format.json_schema.schema", "invalid_value"),
    (CHAT, shaped(strict="yes"), "response_format.json_schema.strict", "invalid_value"),
    (CHAT, shaped(description=1), "response_format.json_schema.description", "invalid_value"),
    (CHAT, shaped(x=1), "response_format.json_schema.x", "unknown_parameter"),
    (CHAT, shaped(schema=DEEP), "response_format.json_schema.schema", "too_deep"),
    (CHAT, shaped(schema={"type": "nonsense"}), "response_format", "invalid_value"),
    (CHAT, shaped(schema={"$ref": "http://example.com/x"}), "response_format", "invalid_value"),
    (CHAT, shaped(schema={"type": "string", "pattern": "("}), "response_format", "invalid_value"),
    (CHAT, shaped(schema={"enum": ["x" * 70_000]}), "response_format", "too_long"),
    (CHAT, shaped(schema={"enum": ["x" * 140_000]}), "response_format", "too_long"),
    (TEXT, text(guided_json=5), "guided_json", "invalid_value"),
    (TEXT, text(guided_json="{"), "guided_json", "invalid_value"),
    (TEXT, text(guided_regex=5), "guided_regex", "invalid_value"),
    (TEXT, text(guided_regex="(", ), "guided_regex", "invalid_value"),
    (TEXT, text(guided_choice=[]), "guided_choice", "invalid_value"),
    (TEXT, text(guided_choice=["a", ""]), "guided_choice", "invalid_value"),
    (TEXT, text(guided_choice=["a"] * 257), "guided_choice", "too_many"),
    (TEXT, text(guided_grammar=""), "guided_grammar", "invalid_value"),
    (TEXT, text(guided_grammar="start: nonsense"), "guided_grammar", "invalid_value"),
    (TEXT, text(guided_grammar="root ::= ("), "guided_grammar", "invalid_value"),
    (TEXT, text(guided_choice=["a"], guided_regex="b"), "guided_choice", "invalid_value"),
    (TEXT, text(structured_outputs=[]), "structured_outputs", "invalid_value"),
    (TEXT, text(structured_outputs={}), "structured_outputs", "invalid_value"),
    (TEXT, text(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs",
     "invalid_value"),
    (TEXT, text(structured_outputs={"x": 1}), "structured_outputs.x", "unknown_parameter"),
    (TEXT, text(structured_outputs={"json_object": 1}), "structured_outputs.json_object",
     "invalid_value"),
    (TEXT, text(guided_regex="a", ignore_eos=True), "ignore_eos", "invalid_value"),
    (CHAT, chat(metadata={"a": 1}), "metadata", "unsupported_parameter"),
    (TEXT, text(user=BIG), "user", "unsupported_parameter"),
    (TEXT, text(speculation={"method": "eagle"}), "speculation.method", "invalid_value"),
    (TEXT, text(speculation={"max_tokens": -1}), "speculation.max_tokens", "invalid_value"),
    (TEXT, text(speculation={"mode": "lossy"}), "speculation.mode", "invalid_value"),
    (TEXT, text(speculation={"lookahead": 4}), "speculation.lookahead", "invalid_value"),
    (TEXT, text(speculation={"mode": "greedy"}), "speculation.mode", "invalid_value"),
    *(
        (CHAT, chat(speculation={"mode": mode}, temperature=0), "speculation.mode",
         "invalid_value")
        for mode in ("coupled", "rejection", "block")
    ),
    (TEXT, text(speculation={"include_rounds": 1}), "speculation.include_rounds",
     "invalid_value"),
    # several choices
    (TEXT, text(n=0), "n", "invalid_value"),
    (TEXT, text(n=-1), "n", "invalid_value"),
    (TEXT, text(n=True), "n", "invalid_value"),
    (TEXT, text(n=2.0), "n", "invalid_value"),
    (CHAT, chat(n="2"), "n", "invalid_value"),
    (CHAT, chat(n=17), "n", "too_many"),
    (TEXT, text(n=2**31), "n", "invalid_value"),
    (TEXT, text(best_of=2), "best_of", "invalid_value"),
    (TEXT, text(n=3, best_of=2), "best_of", "invalid_value"),
    (TEXT, text(best_of=0), "best_of", "invalid_value"),
    (CHAT, chat(best_of=1), "best_of", "unknown_parameter"),
    # what shapes the law
    *(
        (TEXT, text(**{name: value}), name, "invalid_value")
        for name in ("presence_penalty", "frequency_penalty")
        for value in (2.01, -2.01, "1", True, [0])
    ),
    (TEXT, b'{"model":"toy","prompt":"hi","presence_penalty":NaN}', None, "invalid_json"),
    (TEXT, b'{"model":"toy","prompt":"hi","min_p":1e999}', "min_p", "invalid_value"),
    (TEXT, text(repetition_penalty=0), "repetition_penalty", "invalid_value"),
    (TEXT, text(repetition_penalty=-1), "repetition_penalty", "invalid_value"),
    (TEXT, text(repetition_penalty=10.1), "repetition_penalty", "invalid_value"),
    (TEXT, text(min_p=-0.1), "min_p", "invalid_value"),
    (TEXT, text(min_p=1.1), "min_p", "invalid_value"),
    (TEXT, text(min_p=False), "min_p", "invalid_value"),
    (TEXT, text(logit_bias=[]), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"a": 1}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"-1": 1}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"1.0": 1}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"07": 1}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"": 1}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"٥": 1}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"9" * 5000: 1}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"5": 100.5}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"5": -101}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"5": "1"}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"5": True}), "logit_bias", "invalid_value"),
    (TEXT, text(logit_bias={"5": None}), "logit_bias", "invalid_value"),
    (TEXT, b'{"model":"toy","prompt":"hi","logit_bias":{"5":1e999}}', "logit_bias",
     "invalid_value"),
    (TEXT, text(logit_bias={"257": 1}), "logit_bias", "invalid_value"),
    (CHAT, chat(logit_bias={str(2**31): 1}), "logit_bias", "invalid_value"),
    # ends
    (TEXT, text(min_tokens=-1), "min_tokens", "invalid_value"),
    (TEXT, text(min_tokens=1.0), "min_tokens", "invalid_value"),
    (TEXT, text(min_tokens=6, max_tokens=5), "min_tokens", "invalid_value"),
    (TEXT, text(min_tokens=17), "min_tokens", "invalid_value"),  # the default of max_tokens
    (CHAT, chat(min_tokens=45), "min_tokens", "invalid_value"),  # the rest of the context
    (TEXT, text(min_tokens=1, max_tokens=0, echo=True), "min_tokens", "invalid_value"),
    (TEXT, text(stop_token_ids=5), "stop_token_ids", "invalid_value"),
    (TEXT, text(stop_token_ids=["5"]), "stop_token_ids", "invalid_value"),
    (TEXT, text(stop_token_ids=[True]), "stop_token_ids", "invalid_value"),
    (TEXT, text(stop_token_ids=[1.0]), "stop_token_ids", "invalid_value"),
    (TEXT, text(stop_token_ids=[-1]), "stop_token_ids", "invalid_value"),
    (TEXT, text(stop_token_ids=[2**31]), "stop_token_ids", "invalid_value"),
    (TEXT, text(stop_token_ids=[257]), "stop_token_ids", "invalid_value"),
    (TEXT, text(stop_token_ids=[1] * 65), "stop_token_ids", "too_many"),
    (TEXT, text(include_stop_str_in_output=1), "include_stop_str_in_output", "invalid_value"),
    # log-probabilities
    (TEXT, text(logprobs=True), "logprobs", "invalid_value"),
    (TEXT, text(logprobs=-1), "logprobs", "invalid_value"),
    (TEXT, text(logprobs="5"), "logprobs", "invalid_value"),
    (TEXT, text(logprobs=21), "logprobs", "too_many"),
    (TEXT, text(top_logprobs=1), "top_logprobs", "unknown_parameter"),
    (CHAT, chat(logprobs=1), "logprobs", "invalid_value"),
    (CHAT, chat(top_logprobs=5), "top_logprobs", "invalid_value"),
    (CHAT, chat(logprobs=False, top_logprobs=5), "top_logprobs", "invalid_value"),
    (CHAT, chat(logprobs=True, top_logprobs=True), "top_logprobs", "invalid_value"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "too_many"),
    (TEXT, text(prompt_logprobs=-1), "prompt_logprobs", "invalid_value"),
    (TEXT, text(prompt_logprobs=21), "prompt_logprobs", "too_many"),
    (CHAT, chat(prompt_logprobs=True), "prompt_logprobs", "invalid_value"),
    (CHAT, chat(prompt_logprobs=0, stream=True), "prompt_logprobs", "invalid_value"),
    (TEXT, text(echo=1), "echo", "invalid_value"),
    (CHAT, chat(echo=True), "echo", "unknown_parameter"),
    (TEXT, text(max_tokens=0, echo=False), "max_tokens", "invalid_value"),
    (TEXT, text(return_token_ids=True), "return_token_ids", "unknown_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "code"), BODIES)
async def test_refused_with_a_sentence(
    path: str, body: Any, param: str | None, code: str, harness: Any
) -> None:
    answer = await harness.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) <= 200
    assert error["message"].endswith(".")
    for word in ("nput", "Value error", "a valid", "instance of", "Options", "Body", "pydantic"):
        assert word not in error["message"], "words of our tools"
    assert UNKNOWN_REASON not in error["message"]
    name = (param or "").split(".")[-1].split("[")[0]
    assert name in error["message"] or "The prompt" in error["message"]
    assert harness.targets.requests == []
    assert await harness.is_idle()


async def test_every_sentence_is_used(harness: Any) -> None:
    answers = [await harness.post(path, body) for path, body, _, _ in BODIES]
    messages = [answer.json()["error"]["message"] for answer in answers]
    for words in REASONS.values():
        assert any(f": {words.split('{')[0]}" in message for message in messages), words


@pytest.mark.parametrize("name", [BIG, "a\nb\x1b[31m", "ключ" * 50, ""])
async def test_echo_is_short_and_printable(name: str, harness: Any) -> None:
    for answer in (
        await harness.post(TEXT, text(**{name: 1})),
        await harness.post(TEXT, text(model=name)),
        await harness.post(TEXT, text(speculation={name: 1})),
    ):
        error = answer.json()["error"]
        assert len(error["message"]) <= 200
        assert error["message"].isprintable()
        assert (error["param"] or "").isprintable()


async def test_other_model_is_404(harness: Any) -> None:
    for path, body in ((TEXT, text(model="gpt-9")), (CHAT, chat(model="gpt-9"))):
        answer = await harness.post(path, body)
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "The model 'gpt-9' does not exist; this deployment serves 'toy'.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_too_large(is_chunked: bool, make_harness: Any) -> None:
    harness = make_harness(max_body_bytes=2048)
    num_read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(10):
            num_read += 1
            yield b" " * 1024

    async with harness.client() as client:
        answer = await client.post(
            TEXT,
            content=chunks() if is_chunked else b" " * 2049,
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert num_read <= 3
    fitting = json.dumps(text()).encode()
    fitting += b" " * (2048 - len(fitting))
    harness.targets.script = [ValueError()]
    assert (await harness.post(TEXT, fitting)).status_code == 500  # read, and reached the target


@pytest.mark.parametrize("value", ["text/plain", "application/x-www-form-urlencoded", "x"])
async def test_other_media_types(value: str, harness: Any) -> None:
    answer = await harness.post(TEXT, text(), headers={"content-type": value})
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == "Content-Type must be application/json."


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/openapi.json", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_other_routes(method: str, path: str, status: int, code: str, harness: Any) -> None:
    async with harness.client() as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [("abc-1_2.3:4", True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_request_id(sent: str, is_kept: bool, harness: Any) -> None:
    headers = {"x-request-id": sent.encode("latin-1")}
    async with harness.client() as client:
        for path in ("/health", "/nowhere"):
            answer = await client.get(path, headers=headers)
            assert (answer.headers["x-request-id"] == sent) == is_kept
            assert len(answer.headers.get_list("x-request-id")) == 1
