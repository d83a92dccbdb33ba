"""Tools, as the `openai` package uses them: offered, called, answered; streamed and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
MAX_LEN = 2048
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STRICT: Any = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASK: Any = [{"role": "user", "content": "Is it warm in Paris?"}]
ARGUMENTS = '{"city": "Paris é"}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
BAD = "<tool_call>nonsense</tool_call>"
SIZES = (1, 3, 8, 1000)


@pytest.fixture
def gateway(make_harness: Any) -> Any:
    return make_harness(max_model_len=MAX_LEN)


def sdk(gateway: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://gateway/v1",
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(gateway.app)),
        max_retries=0,
    )


def script(round_of: RoundOf, text: str, size: int, end: Any = "stop") -> list[RoundDelta]:
    """The text in rounds of `size` bytes; the last one has an EOS behind it, or is cut off."""
    raw = text.encode()
    parts = [raw[i : i + size] for i in range(0, len(raw), size)] or [b""]
    rounds = [round_of(part, None, number) for number, part in enumerate(parts[:-1])]
    last = [*parts[-1], *([256] if end == "stop" else [])]
    return [*rounds, round_of(last, end, len(parts) - 1)]


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, list[Any], list[Any]]:
    """(content, calls put together, finish reasons)."""
    content, calls, reasons = "", [], []
    stream = await client.chat.completions.create(model="toy", stream=True, **fields)
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                if delta.id:
                    assert delta.index == len(calls)
                    assert delta.type == "function"
                    assert delta.function.arguments == ""
                    calls.append([delta.id, delta.function.name, ""])
                else:
                    assert delta.function.name is None
                    calls[delta.index][2] += delta.function.arguments
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    return content, calls, reasons


@pytest.mark.parametrize("size", SIZES)
async def test_a_conversation_of_two_turns(gateway: Any, round_of: RoundOf, size: int) -> None:
    client = sdk(gateway)
    gateway.targets.script = script(round_of, "I look.\n" + CALL, size)
    answer = await client.chat.completions.create(model="toy", messages=ASK, tools=[WEATHER])
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.function.arguments == ARGUMENTS

    shown = await streamed(client, messages=ASK, tools=[WEATHER])
    assert (shown[0], shown[2]) == ("I look.", ["tool_calls"])
    assert [found[1:] for found in shown[1]] == [["get_weather", ARGUMENTS]]

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    gateway.targets.script = script(round_of, "Yes, 21 degrees.", size)
    history = [*ASK, choice.message, result]
    answer = await client.chat.completions.create(model="toy", messages=history, tools=[WEATHER])
    assert answer.choices[0].message.content == "Yes, 21 degrees."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    prompt = bytes(gateway.targets.requests[-1].prompt_token_ids).decode()
    assert "get_weather" in prompt
    assert "Paris é" in prompt
    assert "21 degrees" in prompt
    assert await gateway.is_idle()


@pytest.mark.parametrize("size", SIZES)
async def test_several_calls_in_one_answer(gateway: Any, round_of: RoundOf, size: int) -> None:
    text = CALL + "\n" + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    gateway.targets.script = script(round_of, text, size)
    fields: Any = {"messages": ASK, "tools": [WEATHER, NOW]}
    answer = await sdk(gateway).chat.completions.create(model="toy", **fields)
    message = answer.choices[0].message
    assert message.content is None
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert calls == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert len({call.id for call in message.tool_calls or []}) == 2
    content, shown, reasons = await streamed(sdk(gateway), **fields)
    assert (content, reasons) == ("", ["tool_calls"])
    assert [tuple(call[1:]) for call in shown] == calls


@pytest.mark.parametrize(
    ("text", "end", "reason", "content", "arguments"),
    [
        # Cut off inside the call: what there is, and "length".
        (CALL[:60], "length", "length", "", '{"city": "P'),
        (CALL[:20], "length", "length", CALL[:20], None),
        (
            "<tool_call>nonsense</tool_call>",
            "stop",
            "stop",
            "<tool_call>nonsense</tool_call>",
            None,
        ),
        ("no call", "stop", "stop", "no call", None),
        ("", "stop", "stop", "", None),
    ],
)
@pytest.mark.parametrize("size", SIZES)
async def test_ends(
    gateway: Any, round_of: RoundOf, size: int, text: str, end: str, reason: str, content: str,
    arguments: str | None,
) -> None:  # fmt: skip
    gateway.targets.script = script(round_of, text, size, end)
    answer = (await gateway.chat(tools=[WEATHER])).json()
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    assert answer["choices"][0]["finish_reason"] == reason
    assert message["content"] == (content or (None if calls else ""))
    wanted = [] if arguments is None else [arguments]
    assert [call["function"]["arguments"] for call in calls] == wanted
    assert answer["usage"]["completion_tokens"] == len(text.encode()) + (end == "stop")
    shown = await streamed(sdk(gateway), messages=ASK, tools=[WEATHER])
    assert (shown[0], shown[2]) == (content, [reason])
    assert [call[2] for call in shown[1]] == wanted


@pytest.mark.parametrize(
    ("stop", "reason", "arguments"),
    [("Par", "stop", '{"city": "'), ("</tool", "tool_calls", ARGUMENTS), ("\n<", "stop", None)],
)
@pytest.mark.parametrize("size", SIZES)
async def test_a_stop_string_in_a_call(
    gateway: Any, round_of: RoundOf, size: int, stop: str, reason: str, arguments: str | None
) -> None:
    """A call that is cut open is none to make: its reason is the stop string's."""
    gateway.targets.script = script(round_of, "Well.\n" + CALL + "no more", size)
    answer = (await gateway.chat(tools=[WEATHER], stop=[stop])).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == [arguments] * (
        arguments is not None
    )
    shown = await streamed(sdk(gateway), messages=ASK, tools=[WEATHER], stop=[stop])
    assert shown[0] == choice["message"]["content"]
    assert [call[2] for call in shown[1]] == [call["function"]["arguments"] for call in calls]
    assert shown[2] == [reason]


async def test_what_is_not_taken_apart_yet_is_no_chunk(
    gateway: Any, round_of: RoundOf, events_of: Any
) -> None:
    gateway.targets.script = script(round_of, CALL, 1)
    stream = await gateway.chat(tools=[WEATHER], stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in events_of(stream.text)[:-1]]
    # The role first, the end last.
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(deltas[:-1])
    assert len(deltas) == 3 + len(ARGUMENTS), "a call's head, then its arguments"


def history(arguments: str) -> Any:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "warm"}
    return [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": "\\ud83d\\ude00"}'])
async def test_arguments_in_the_history(gateway: Any, round_of: RoundOf, arguments: str) -> None:
    gateway.targets.script = [round_of(b"ok", "stop")]
    assert (await gateway.chat(tools=[WEATHER], messages=history(arguments))).status_code == 200


@pytest.mark.parametrize(
    "arguments", ["x", "[]", "1", '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 99 + "1" + "}" * 99]
)
async def test_arguments_that_no_template_can_show(gateway: Any, arguments: str) -> None:
    answer = await gateway.chat(tools=[WEATHER], messages=history(arguments))
    assert answer.status_code == 400
    assert "'arguments' must be a JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"parallel_tool_calls": False},
        {"tools": [STRICT]},
    ],
)
async def test_held_calls_need_their_eos(gateway: Any, fields: Any) -> None:
    answer = await gateway.chat(**{"tools": [WEATHER], "ignore_eos": True, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ignore_eos")


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"tools": [WEATHER]},
     {"tools": [STRICT], "tool_choice": "none"}],
)  # fmt: skip
async def test_free_text_needs_no_eos(gateway: Any, round_of: RoundOf, fields: Any) -> None:
    gateway.targets.script = [round_of(b"ok", "length")]
    assert (await gateway.chat(ignore_eos=True, **fields)).status_code == 200


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": [WEATHER | {"function": {"name": "f", "description": "d" * 4096}}]}),
        ("messages", {"messages": history('{"city": "' + "d" * 4096 + '"}')}),
    ],
)
async def test_what_cannot_fit_is_not_tokenized(gateway: Any, param: str, fields: Any) -> None:
    answer = await gateway.chat(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "bytes is too long" in error["message"]


def grammar_of(gateway: Any) -> str:
    return str(gateway.targets.requests[-1].sampling.grammar)


@pytest.mark.parametrize(
    ("fields", "needs_grammar", "reason"),
    [
        ({}, False, "tool_calls"),
        ({"tool_choice": "auto"}, False, "tool_calls"),
        ({"tools": [STRICT]}, True, "tool_calls"),
        ({"parallel_tool_calls": False}, True, "tool_calls"),
        ({"tool_choice": "required"}, True, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, True, "stop"),
        ({"response_format": {"type": "json_object"}}, True, "tool_calls"),
    ],
)
async def test_who_decides(
    gateway: Any, round_of: RoundOf, fields: Any, needs_grammar: bool, reason: str
) -> None:
    gateway.targets.script = script(round_of, CALL, 7)
    answer = (await gateway.chat(**{"tools": [WEATHER], **fields})).json()
    assert answer["choices"][0]["finish_reason"] == reason
    assert bool(grammar_of(gateway)) is needs_grammar


async def test_tool_choice_none_hides_the_tools(gateway: Any, round_of: RoundOf) -> None:
    gateway.targets.script = script(round_of, CALL, 7)
    answer = (await gateway.chat(tools=[WEATHER], tool_choice="none")).json()
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert b"get_weather" not in bytes(gateway.targets.requests[-1].prompt_token_ids)


async def test_allowed_tools(gateway: Any, round_of: RoundOf) -> None:
    gateway.targets.script = script(round_of, CALL, 7)
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"mode": "auto", "tools": [named]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = (await gateway.chat(tools=[WEATHER, NOW], tool_choice=choice)).json()
    # A call of another function is no call.
    assert answer["choices"][0]["message"]["content"] == CALL


async def test_a_model_without_tools(make_harness: Any) -> None:
    class Plain(ToyTokenizer):
        @property
        def tool_format(self) -> None:
            return None

    harness = make_harness(tokenizer=Plain())
    answer = await harness.chat(tools=[WEATHER])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


async def test_log_probabilities_cover_every_token(
    gateway: Any, round_of: RoundOf, score: Any, events_of: Any
) -> None:
    gateway.targets.script = [
        score(b"", item.token_ids, item.finish_reason, item.round)
        for item in script(round_of, CALL, 9)
    ]
    answer = (await gateway.chat(tools=[WEATHER], logprobs=True)).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(CALL.encode()) + 1
    stream = await gateway.chat(tools=[WEATHER], logprobs=True, stream=True)
    entries = [
        entry
        for chunk in events_of(stream.text)[:-1]
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert entries == answer["choices"][0]["logprobs"]["content"]
