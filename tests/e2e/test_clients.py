"""Clients of other projects, unchanged, against a live service with real weights.

`pip install '.[clients]'` (make test does it). What a client shows must be what the `openai`
package shows for the same request: greedy text is the same however it is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.conftest import Server

MODEL = "smollm2-135m"
PROMPT = "Name three colors."
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
MAX_TOKENS = 12

pytestmark = [
    pytest.mark.serve,
    pytest.mark.model,
    pytest.mark.timeout(1200),  # the first that asks starts the service
    # What these packages deprecate is not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def chat_text(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=MAX_TOKENS, temperature=0
    )
    text = answer.choices[0].message.content
    assert text
    return text


@pytest.fixture(scope="module")
def completion_text(client: openai.OpenAI) -> str:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0
    )
    assert answer.choices[0].text
    return answer.choices[0].text


# -------------------------------------------------------------------------------- langchain


def test_langchain(url: str, chat_text: str, completion_text: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    fields: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL, "temperature": 0}
    chat = ChatOpenAI(max_tokens=MAX_TOKENS, **fields)
    answer = chat.invoke(PROMPT)
    assert answer.content == chat_text
    assert answer.usage_metadata["output_tokens"] == MAX_TOKENS
    assert "".join(str(chunk.content) for chunk in chat.stream(PROMPT)) == chat_text
    assert [item.content for item in chat.batch([PROMPT, PROMPT])] == [chat_text] * 2
    assert OpenAI(max_tokens=MAX_TOKENS, **fields).invoke(PROMPT) == completion_text


def test_several_prompts_at_once(url: str, client: openai.OpenAI) -> None:
    """LangChain sends the prompts of a batch in one request; each gets what it gets alone."""
    from langchain_openai import OpenAI

    prompts = [PROMPT, "Water is", "Once upon a time"]
    sent: Any = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}
    expected = [
        client.completions.create(prompt=prompt, **sent).choices[0].text for prompt in prompts
    ]
    with httpx.Client(timeout=120) as http:
        fields: Any = sent | {"base_url": f"{url}/v1", "api_key": "none", "http_client": http}
        result = OpenAI(**fields).generate(prompts)
        assert [generation.text for [generation] in result.generations] == expected
        assert result.llm_output["token_usage"]["completion_tokens"] == 3 * MAX_TOKENS
        assert OpenAI(**fields).batch(prompts) == expected
        pairs = OpenAI(n=2, **fields).generate(prompts).generations
    assert [[item.text for item in pair] for pair in pairs] == [[text] * 2 for text in expected]

    texts = [""] * 3
    for chunk in client.completions.create(prompt=prompts, stream=True, **sent):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_langchain_structured_output(url: str) -> None:
    from langchain_openai import ChatOpenAI

    schema = {
        "title": "answer",
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
        "required": ["color", "sure"],
        "additionalProperties": False,
    }
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0)
    for method in ("json_schema", "function_calling"):
        shown = chat.with_structured_output(schema, method=method).invoke("Which color is grass?")
        jsonschema.validate(shown, schema)


# ---------------------------------------------------------------------------------- litellm


@pytest.fixture
def own_loop() -> Iterator[None]:
    """litellm makes an event loop where it finds none, and never closes it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.usefixtures("own_loop")
def test_litellm(url: str, chat_text: str, completion_text: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network
    import litellm

    fields: Any = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    fields["max_tokens"] = MAX_TOKENS
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, **fields)
        assert answer.choices[0].message.content == chat_text
    chunks = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat_text
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **fields)
    assert text.choices[0].text == completion_text


# -------------------------------------------------------------------------------------- llm


def llm(folder: Path, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_the_llm_command(url: str, chat_text: str, tmp_path: Path) -> None:
    entry = {
        "model_id": "here",
        "model_name": MODEL,
        "api_base": f"{url}/v1",
        "supports_schema": True,
        "supports_tools": True,
    }
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    options = ("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS))
    assert llm(tmp_path, *options, PROMPT).rstrip("\n") == chat_text.rstrip("\n")
    assert llm(tmp_path, *options, "--no-stream", PROMPT).rstrip("\n") == chat_text.rstrip("\n")
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], '
    schema += '"additionalProperties": false}'
    shown = llm(tmp_path, "-m", "here", "-o", "temperature", "0", "--schema", schema, "Is it?")
    assert isinstance(json.loads(shown)["ok"], bool)


# ----------------------------------------------------------------------------------- openai

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 24}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("method", ["model", "off"])
def test_a_tool_conversation_of_two_turns(
    client: openai.OpenAI, is_stream: bool, method: str
) -> None:
    history: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: Any = {
        "model": MODEL,
        "tools": [WEATHER],
        "temperature": 0,
        "max_tokens": 64,
        "parallel_tool_calls": False,
        "extra_body": {"speculation": {"method": method}},
    }
    call = ask_for_call(client, is_stream, messages=history, tool_choice="required", **fields)
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    assert name == "get_weather"
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    seen = CALLS.setdefault("arguments", call["function"]["arguments"])
    assert seen == call["function"]["arguments"], "drafts and streams change nothing"
    history += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": '{"degrees": 21}'},
    ]
    answer = client.chat.completions.create(messages=history, **(fields | {"max_tokens": 12}))
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


CALLS: dict[str, str] = {}


def ask_for_call(client: openai.OpenAI, is_stream: bool, **fields: Any) -> dict[str, Any]:
    if not is_stream:
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or []
        return call.model_dump(include={"id", "type", "function"})
    found: dict[str, Any] = {}
    reasons = []
    for chunk in client.chat.completions.create(stream=True, **fields):
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.id:
                found = delta.model_dump(include={"id", "type", "function"})
            else:
                found["function"]["arguments"] += delta.function.arguments
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "tool_calls"
    return found
