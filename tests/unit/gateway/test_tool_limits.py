"""The bounds of tools and of forms: the last that passes, and one more, which is a 400."""

from __future__ import annotations

from typing import Any

from paceline.gateway.chat import MAX_TEMPLATE_KWARGS
from paceline.gateway.structured import MAX_GUIDED_CHOICES
from paceline.gateway.tools import MAX_SCHEMA_DEPTH, MAX_TOOLS


async def refused(harness: Any, **fields: Any) -> tuple[str, str]:
    """(param, code)."""
    answer = await harness.chat(**fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["code"]


async def is_taken(harness: Any, round_of: Any, **fields: Any) -> bool:
    harness.targets.script = [round_of(b"ok", "stop")]
    return bool((await harness.chat(**fields)).status_code == 200)


def tools(num: int) -> list[Any]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(num)]


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


async def test_as_many_tools(make_harness: Any, round_of: Any) -> None:
    harness = make_harness(max_model_len=1 << 15)
    assert await is_taken(harness, round_of, tools=tools(MAX_TOOLS))
    assert await refused(harness, tools=tools(MAX_TOOLS + 1)) == ("tools", "invalid_value")


async def test_as_deep_a_schema(make_harness: Any, round_of: Any) -> None:
    harness = make_harness(max_model_len=1 << 12)

    def offered(depth: int) -> list[Any]:
        return [{"type": "function", "function": {"name": "f", "parameters": nested(depth)}}]

    assert await is_taken(harness, round_of, tools=offered(MAX_SCHEMA_DEPTH))
    param, _ = await refused(harness, tools=offered(MAX_SCHEMA_DEPTH + 1))
    assert param == "tools[0].function"
    assert await refused(harness, guided_json=nested(MAX_SCHEMA_DEPTH + 1)) == (
        "guided_json",
        "too_deep",
    )


async def test_as_many_kwargs(harness: Any, round_of: Any) -> None:
    given = {f"a{i}": i for i in range(MAX_TEMPLATE_KWARGS)}
    assert await is_taken(harness, round_of, chat_template_kwargs=given)
    param, _ = await refused(harness, chat_template_kwargs=given | {"more": 1})
    assert param == "chat_template_kwargs"


async def test_as_many_choices(harness: Any, round_of: Any) -> None:
    choices = [f"c{i}" for i in range(MAX_GUIDED_CHOICES + 1)]
    assert await is_taken(harness, round_of, guided_choice=choices[:-1])
    assert await refused(harness, guided_choice=choices) == ("guided_choice", "too_many")


async def test_as_large_a_grammar(make_harness: Any, round_of: Any) -> None:
    form = {"guided_choice": ["x" * 80]}
    probe = make_harness()
    assert await is_taken(probe, round_of, **form)
    size = len(probe.targets.requests[-1].sampling.grammar)
    assert await is_taken(make_harness(max_grammar_bytes=size), round_of, **form)
    small = make_harness(max_grammar_bytes=size - 1)
    assert await refused(small, **form) == ("guided_choice", "too_long")
