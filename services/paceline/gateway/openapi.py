"""The OpenAPI document of the routes that an app has. Pure; made once.

Request bodies are the models that validate them; answers are those of `openapi_schemas`. A route
that this table does not know (a page, say) is described by its own docstring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from paceline.gateway.chat import ChatBody, MessageBody
from paceline.gateway.openai import Body, CompletionBody, GenerationBody
from paceline.gateway.openapi_schemas import FIELDS, OWN_FIELDS, SCHEMAS, ref
from paceline.gateway.parameters import MESSAGE_NEUTRAL, NeutralParameter
from paceline.gateway.responses import Json
from paceline.gateway.tokenization import DetokenizeBody, TokenizeBody

JSON = "application/json"
BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
ERRORS: Mapping[int, str] = {
    400: "The request cannot be honored; the sentence says which field and why.",
    401: "An API key is needed and there is none, or it is not known here.",
    404: "There is no such path or model.",
    405: "The path does not have that method; Allow names those that it has.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body's Content-Type is not application/json.",
    429: "Too much at once, here or with this API key; Retry-After says when to try again.",
    431: "The headers are too large.",
    500: "A fault of the server; its log has the trace that x-paceline-trace-id names.",
    503: "No target can answer now; Retry-After says when to try again.",
    504: "The request took too long.",
}
_ANY = (401, 429, 431, 500)
_OF_MODELS = "OpenAI's, with the context's length (vLLM's) and the methods of speculation."
_WITH_BODY = (400, *_ANY, 404, 408, 413, 415)


@dataclass(frozen=True, slots=True)
class Operation:
    """`answers`: media type -> schema of the 200."""

    summary: str
    description: str
    tag: str
    answers: Mapping[str, Json]
    errors: Sequence[int] = (431, 500)
    body: type[Body] | None = None
    example: Json | None = None
    is_public: bool = False


def _stream(chunk: str) -> Json:
    return {
        "type": "string",
        "description": f"With `stream`: events `data: {{{chunk}}}`, at last `data: [DONE]`. Lines "
        "that begin with a colon are signs of life. An error behind the first event is an event "
        "with an Error, and no `[DONE]` follows.",
    }


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation",
        "OpenAI's chat completions, with vLLM's sampling fields and `speculation`.",
        "Generation",
        {JSON: ref("ChatCompletion"), "text/event-stream": _stream("ChatCompletionChunk")},
        (*_WITH_BODY, 503, 504),
        ChatBody,
        {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32},
    ),
    ("POST", "/v1/completions"): Operation(
        "Go on with a text",
        "OpenAI's completions, with vLLM's sampling fields and `speculation`.",
        "Generation",
        {JSON: ref("Completion"), "text/event-stream": _stream("CompletionChunk")},
        (*_WITH_BODY, 503, 504),
        CompletionBody,
        {"model": "toy", "prompt": "Once upon a time", "max_tokens": 32, "stream": True},
    ),
    ("POST", "/tokenize"): Operation(
        "Count tokens",
        "vLLM's: the tokens of a prompt, or of messages as the chat template writes them.",
        "Tokens",
        {JSON: ref("Tokens")},
        _WITH_BODY,
        TokenizeBody,
        {"prompt": "Hello", "return_token_strs": True},
    ),
    ("POST", "/detokenize"): Operation(
        "Tokens to text",
        "vLLM's: the text of tokens, control tokens as they are spelt.",
        "Tokens",
        {JSON: ref("Prompt")},
        _WITH_BODY,
        DetokenizeBody,
        {"tokens": [72, 105]},
    ),
    ("GET", "/v1/models"): Operation(
        "Models that are served", _OF_MODELS, "Models", {JSON: ref("ModelList")}, _ANY
    ),
    ("GET", "/v1/models/{model_id}"): Operation(
        "One model", _OF_MODELS, "Models", {JSON: ref("Model")}, (*_ANY, 404)
    ),
    ("GET", "/health"): Operation(
        "Whether this process is alive",
        "Says nothing about targets.",
        "Operation",
        {JSON: ref("Status")},
        is_public=True,
    ),
    ("GET", "/ready"): Operation(
        "Whether a request would be answered",
        "503 until every served model has a target that is ready.",
        "Operation",
        {JSON: ref("Status")},
        (431, 500, 503),
        is_public=True,
    ),
    ("GET", "/version"): Operation(
        "Paceline's version", "", "Operation", {JSON: ref("Version")}, is_public=True
    ),
    ("GET", "/metrics"): Operation(
        "Counters for Prometheus",
        "This gateway process's. Needs a key where keys are configured, unless "
        "`gateway.public_metrics` is set.",
        "Operation",
        {"text/plain": {"type": "string"}},
        _ANY,
    ),
    ("GET", "/fleet"): Operation(
        "Targets and drafts",
        "What the controller knows; requests are answered without it.",
        "Operation",
        {JSON: ref("Fleet")},
        (*_ANY, 503),
    ),
    ("GET", "/openapi.json"): Operation(
        "This document", "", "Pages", {JSON: {"type": "object"}}, is_public=True
    ),
    ("GET", "/docs"): Operation(
        "The page that shows this document",
        "",
        "Pages",
        {"text/html": {"type": "string"}},
        is_public=True,
    ),
}


def openapi_document(app: FastAPI) -> Json:
    """OpenAPI 3.1."""
    paths: Json = {}
    for route in app.routes:
        if isinstance(route, Route) and getattr(route, "include_in_schema", True):
            path = route.path.replace(":path}", "}")
            # What HEAD says follows from GET.
            for method in sorted((route.methods or set()) - {"HEAD"}):
                known = OPERATIONS.get((method, path)) or _page(route)
                paths.setdefault(path, {})[method.lower()] = _operation(method, path, known)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": app.title,
            "version": app.version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Speculative decoding as a service: OpenAI's API, vLLM's additions, "
            "and what the drafts did. Every answer has an x-request-id and an "
            "x-paceline-trace-id; a `traceparent` header joins the request to its sender's trace.",
        },
        "servers": [{"url": "."}],
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "responses": {f"Error{status}": _error(status) for status in ERRORS},
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Only where `gateway.api_keys` are configured.",
                }
            },
        },
    }


def _page(route: Route) -> Operation:
    text = " ".join((route.endpoint.__doc__ or route.name).split())
    return Operation(text, "", "Pages", {"text/html": {"type": "string"}}, is_public=True)


def _operation(method: str, path: str, operation: Operation) -> Json:
    shown: Json = {
        "operationId": f"{method.lower()}{path.translate(_TO_NAME)}".rstrip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {
            "200": {
                "description": "As asked.",
                "content": {media: {"schema": what} for media, what in operation.answers.items()},
            }
        }
        | {
            str(status): {"$ref": f"#/components/responses/Error{status}"}
            for status in sorted(operation.errors)
        },
    }
    if operation.description:
        shown["description"] = operation.description
    if operation.is_public:
        shown["security"] = []
    if "{" in path:
        name = path.split("{")[1].split("}")[0]
        shown["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body is not None:
        content = {"schema": ref(operation.body.__name__), "example": operation.example}
        shown["requestBody"] = {"required": True, "content": {JSON: content}}
    return shown


_TO_NAME = str.maketrans({"/": "_", ".": "_", "{": None, "}": None})


def _error(status: int) -> Json:
    headers = {}
    if status in (429, 503):
        headers = {"headers": {"Retry-After": {"schema": {"type": "integer"}}}}
    example = {
        "error": {"message": ERRORS[status], "type": _type(status), "param": None, "code": None}
    }
    content = {JSON: {"schema": ref("Error"), "example": example}}
    return {"description": ERRORS[status], "content": content, **headers}


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "overloaded_error" if status == 429 else "invalid_request_error"


def _schemas() -> Json:
    _, made = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    schemas: Json = made["$defs"]
    for name, schema in schemas.items():
        for field, shown in schema.get("properties", {}).items():
            shown.pop("title", None)
            own = OWN_FIELDS.get((name, field)) or FIELDS.get(field, {})
            if "description" not in shown:
                if "anyOf" in own:
                    shown.clear()
                shown.update(own)
    neutral = {
        body.__name__: body.neutral for body in BODIES if issubclass(body, GenerationBody)
    } | {MessageBody.__name__: MESSAGE_NEUTRAL}
    for name, table in neutral.items():
        for field, parameter in table.items():
            schemas[name]["properties"].setdefault(field, _without_effect(parameter))
    return schemas | dict(SCHEMAS)


def _without_effect(parameter: NeutralParameter) -> Json:
    return {"description": f"Changes nothing; accepted: {parameter.accepted} (or null)."}
