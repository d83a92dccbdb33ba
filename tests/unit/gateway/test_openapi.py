"""The OpenAPI document says what the routes are and do; /docs shows it without anybody's help."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from paceline.gateway.docs import CONTENT_SECURITY_POLICY
from paceline.gateway.field_table import OPENAI_FIELDS, Treatment
from paceline.gateway.fleet import FleetView, add_fleet_route
from paceline.gateway.openapi import ERRORS, OPERATIONS
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


class Controller:
    async def status(self) -> dict[str, Any]:
        return {"targets": []}


@pytest.fixture
def whole(harness: Any) -> Any:
    """With every route that the deployment adds."""
    add_fleet_route(harness.app, FleetView({"toy": Controller()}))
    return harness


async def document_of(harness: Any) -> Any:
    return (await harness.get("/openapi.json")).json()


def validator(document: Any, name: str) -> Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return Draft202012Validator(schema)


async def test_it_is_valid(whole: Any) -> None:
    document = await document_of(whole)
    assert document["openapi"].startswith("3.1")
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []
    names = [op["operationId"] for item in document["paths"].values() for op in item.values()]
    assert len(set(names)) == len(names)


async def test_every_route_is_in_it_and_nothing_else(whole: Any) -> None:
    document = await document_of(whole)
    shown = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in whole.app.routes
        if route.include_in_schema
        for method in route.methods - {"HEAD"}
    }
    assert shown == routes
    assert set(OPERATIONS) <= shown
    # What is left out are files of pages.
    hidden = {route.path for route in whole.app.routes if not route.include_in_schema}
    assert all(path.startswith("/static/") for path in hidden - {"/"})


async def test_every_field_has_a_sentence(whole: Any) -> None:
    schemas = (await document_of(whole))["components"]["schemas"]
    silent = [
        (name, field)
        for name, schema in schemas.items()
        if name.endswith(("Body", "Options"))
        for field, shown in schema["properties"].items()
        if not shown.get("description")
    ]
    assert silent == []


async def test_it_has_every_field_that_is_accepted(whole: Any) -> None:
    """Those of OpenAI's that are honored or change nothing."""
    schemas = (await document_of(whole))["components"]["schemas"]
    for column, name in (("chat", "ChatBody"), ("completions", "CompletionBody")):
        accepted = {
            row.name
            for row in OPENAI_FIELDS
            if getattr(row, column) in (Treatment.HONORED, Treatment.NEUTRAL)
        }
        assert len(accepted) > 15
        assert accepted - set(schemas[name]["properties"]) == set()


async def test_errors(whole: Any) -> None:
    """Statuses that the gateway has are those that the document knows."""
    document = await document_of(whole)
    responses = document["components"]["responses"]
    assert set(responses) == {f"Error{status}" for status in ERRORS}
    for path in (TEXT, CHAT):
        listed = set(document["paths"][path]["post"]["responses"])
        assert listed == {"200"} | {str(status) for status in ERRORS if status != 405}
    error = validator(document, "Error")
    for body, status in (({}, 400), ({"model": "x", "prompt": "x"}, 404)):
        answer = await whole.post(TEXT, body)
        assert answer.status_code == status
        error.validate(answer.json())
    assert not error.is_valid({"error": {"message": "x"}})


@pytest.mark.parametrize("chat", [False, True])
async def test_answers_are_as_it_says(
    chat: bool, whole: Any, round_of: RoundOf, events_of: Any
) -> None:
    document = await document_of(whole)
    whole.targets.script = [
        round_of("ab", num_draft_tokens=1, num_accepted_tokens=1), round_of("c", "length", 1)
    ]  # fmt: skip
    ask = whole.chat if chat else whole.complete
    kind = "ChatCompletion" if chat else "Completion"
    fields: dict[str, Any] = {"speculation": {"include_rounds": True}, "n": 1}
    validator(document, kind).validate((await ask(**fields)).json())
    validator(document, kind).validate((await ask(stop="b")).json())
    chunk = validator(document, f"{kind}Chunk")
    for options in ({}, {"stream_options": {"include_usage": True}}):
        events = events_of((await ask(stream=True, **fields, **options)).text)
        assert len(events) > 3
        for event in events[:-1]:
            chunk.validate(event)


async def test_small_answers_are_as_it_says(whole: Any) -> None:
    document = await document_of(whole)
    for path, name in (
        ("/v1/models", "ModelList"), ("/v1/models/toy", "Model"), ("/health", "Status"),
        ("/ready", "Status"), ("/version", "Version"), ("/fleet", "Fleet"),
    ):  # fmt: skip
        template = path.replace("/toy", "/{model_id}")
        content = document["paths"][template]["get"]["responses"]["200"]["content"]
        assert content["application/json"]["schema"]["$ref"].endswith(f"/{name}")
        validator(document, name).validate((await whole.get(path)).json())
    for path in ("/tokenize", "/detokenize"):
        shown = document["paths"][path]["post"]
        answer = await whole.post(
            path, shown["requestBody"]["content"]["application/json"]["example"]
        )
        assert answer.status_code == 200
        name = shown["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        validator(document, name.rpartition("/")[2]).validate(answer.json())


async def test_examples_are_answered(whole: Any, round_of: RoundOf) -> None:
    document = await document_of(whole)
    whole.targets.script = [round_of("x", "length")]
    for path in (TEXT, CHAT):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rpartition("/")[2]
        validator(document, name).validate(content["example"])
        assert (await whole.post(path, content["example"])).status_code == 200


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": [1, 2], "stop": "x", "logit_bias": {"5": 1}, "logprobs": False}),
    (TEXT, {"prompt": "x", "stop": ["x", "y"], "user": "u", "suffix": "", "stop_token_ids": None}),
    (TEXT, {"prompt": ["x"]}),
    (TEXT, {"prompt": [[1, 2]]}),
    (TEXT, {"prompt": "x", "speculation": {"max_tokens": 0, "method": "off"}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "n"}], "tools": [TOOL],
            "tool_choice": "none", "metadata": {}, "store": False}),
    (CHAT, {"messages": [{"role": "user", "content": "x"},
                         {"role": "assistant", "content": None, "tool_calls": [CALL]},
                         {"role": "tool", "tool_call_id": "c", "content": "y"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), GOOD)
async def test_what_is_accepted_is_valid(
    path: str, fields: dict[str, Any], make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(max_model_len=4096)
    harness.targets.script = [round_of("x", "length")]
    body = {"model": "toy"} | fields
    assert (await harness.post(path, body)).status_code == 200
    name = "ChatBody" if path == CHAT else "CompletionBody"
    body_validator = validator(await document_of(harness), name)
    body_validator.validate(body)
    assert not body_validator.is_valid(body | {"unknown": 1})
    assert not body_validator.is_valid(body | {"temperature": 3})
    assert not body_validator.is_valid(body | {"stop": 5})


async def test_the_page_asks_nobody_else(harness: Any) -> None:
    page = await harness.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    assert 'lang="en"' in page.text
    linked = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(linked) >= 5
    for link in linked:
        if link == "data:,":
            continue
        assert re.fullmatch(r"[a-z/.-]+", link), link
        asset = await harness.get(f"/{link}")
        assert asset.status_code == 200
        assert len(asset.content) > 100
    # No script but files: the policy would not run one.
    assert re.findall(r"<script(?! src)", page.text) == []
    async with harness.client() as client:
        assert (await client.head("/docs")).status_code == 200
