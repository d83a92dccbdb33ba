"""POST /tokenize and /detokenize, as vLLM has them: a model's tokens without generating any.

For clients that count before they ask. Bodies are bounded as those of every other route, and each
request takes a place while a thread works for it. Knows no target.
"""

# No `from __future__ import annotations` here: FastAPI reads the routes' annotations as classes.

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.config import GatewayConfig
from paceline.errors import RequestError
from paceline.gateway import fields
from paceline.gateway.auth import caller_of
from paceline.gateway.chat import MAX_TEMPLATE_KWARGS, MessageBody, ToolBody
from paceline.gateway.http import read_body
from paceline.gateway.openai import Body, parse_body
from paceline.gateway.responses import Json
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import Tokenizer
from paceline.gateway.tools import MAX_TOOLS, FunctionSpec


class TokenizeBody(Body):
    """POST /tokenize: the tokens of a prompt, or of messages as the chat template writes them."""

    model: str | None = Field(None, description="may be left out where only one is served")
    prompt: str | None = Field(None, description="a text; either this or `messages`")
    messages: list[MessageBody] | None = Field(
        None, min_length=1, fail_fast=True, description="a chat; either this or `prompt`"
    )
    add_special_tokens: bool | None = Field(
        None, description="of a prompt: with what the model's texts begin with (default true)"
    )
    add_generation_prompt: bool | None = Field(
        None, description="of messages: up to where the answer begins (default true)"
    )
    continue_final_message: Literal[False] | None = Field(None, description="only false")
    tools: Annotated[list[ToolBody], BeforeValidator(fields.null_is_empty)] = Field(
        [], max_length=MAX_TOOLS, fail_fast=True, description="of messages: functions offered"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=MAX_TEMPLATE_KWARGS, description="of messages: the template's arguments"
    )
    return_token_strs: bool | None = Field(None, description="also what each token writes")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) is (self.messages is None):
            raise PydanticCustomError("prompt", "Give either a 'prompt' or 'messages'.")
        others = ("add_special_tokens",) if self.prompt is None else _OF_MESSAGES
        for name in others:
            if getattr(self, name):
                what = "a 'prompt'" if self.prompt is None else "'messages'"
                raise PydanticCustomError(name, f"'{name}' is only allowed with {what}.")
        return self

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        if self.messages is None:
            return tokenizer.encode(self.prompt or "", self.add_special_tokens is not False)
        functions = tuple(
            FunctionSpec(
                tool.function.name,
                tool.function.parameters,
                bool(tool.function.strict),
                tool.function.description or "",
            )
            for tool in self.tools
        )
        return tokenizer.encode_chat(
            [message.as_message() for message in self.messages],
            functions,
            self.chat_template_kwargs,
            self.add_generation_prompt is not False,
        )


_OF_MESSAGES = ("add_generation_prompt", "tools", "chat_template_kwargs")


class DetokenizeBody(Body):
    """POST /detokenize: the text of tokens, control tokens as they are spelt."""

    model: str | None = Field(None, description="may be left out where only one is served")
    tokens: Annotated[list[int], BeforeValidator(fields.token_id_list)] = Field(
        description="token ids"
    )


BodyT = TypeVar("BodyT", TokenizeBody, DetokenizeBody)


def add_tokenization_routes(app: FastAPI, service: GatewayService) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        def answer(body: TokenizeBody, model: ServedModel) -> Json:
            return tokenized(body, model, service.config)

        return await _answer(service, request, TokenizeBody, answer)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _answer(service, request, DetokenizeBody, detokenized)


def tokenized(body: TokenizeBody, model: ServedModel, config: GatewayConfig) -> Json:
    """Slow. Raises RequestError for messages that the template refuses."""
    if body.messages is not None and len(body.messages) > config.max_messages:
        limit = config.max_messages
        raise RequestError(f"At most {limit} messages are allowed.", "messages", "too_many")
    tokenizer = model.tokenizer
    tokens = body.encode(tokenizer)
    token_strs = None
    if body.return_token_strs:
        token_strs = [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": model.max_model_len,
        "tokens": tokens,
        "token_strs": token_strs,
    }


def detokenized(body: DetokenizeBody, model: ServedModel) -> Json:
    """Slow. Raises RequestError for ids that stand for nothing."""
    for token in body.tokens:
        if not model.tokenizer.has_token(token):
            raise RequestError(
                f"'tokens' has {token}, which is no token of this model.", "tokens", "invalid_value"
            )
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}


async def _answer(
    service: GatewayService,
    request: Request,
    body_type: type[BodyT],
    answer: Callable[[BodyT, ServedModel], Json],
) -> Response:
    caller, config = caller_of(request.scope), service.config
    service.room.refuse_when_full()
    caller.room.refuse_when_full()
    raw = await read_body(request, config.max_body_bytes, config.body_timeout_s)

    def work() -> bytes:
        body = parse_body(raw, body_type)
        shown = answer(body, _served(service, body.model))
        return json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()

    with service.room.take(1), caller.places(1):
        return Response(await asyncio.to_thread(work), media_type="application/json")


def _served(service: GatewayService, name: str | None) -> ServedModel:
    """Raises RequestError: 404 for another model, 400 where one must be named."""
    if name is not None:
        return service.served(name)
    if len(service.models) > 1:
        raise RequestError(
            "Missing required parameter: 'model'.", "model", "missing_required_parameter"
        )
    return next(iter(service.models.values()))
