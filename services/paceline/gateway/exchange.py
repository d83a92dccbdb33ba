"""One POST from its first byte to its last: the only owner of its generation.

An ASGI response rather than a route function, because the work goes on while the answer is being
sent and must end with it. Knows no tokenizer and no target.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import RequestError
from paceline.gateway.auth import Caller, caller_of
from paceline.gateway.http import EVENT_STREAM, read_body, send_json, until_disconnect
from paceline.gateway.openai import GenerationBody, parse_body
from paceline.gateway.plan import BODY_TYPES, Endpoint, Plan
from paceline.gateway.responses import whole_body
from paceline.gateway.service import GatewayService
from paceline.gateway.sse import ChunkBuilder

# A longer body takes milliseconds to parse: not on the event loop.
MAX_INLINE_BODY_BYTES = 64 << 10
_STREAM_HEADERS = [
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events otherwise
]


class Exchange(Response):
    """Reads, plans, generates, answers. Errors leave it as RequestError, or ClientDisconnect."""

    def __init__(self, service: GatewayService, endpoint: Endpoint, request: Request) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._service.config
        caller = caller_of(scope)
        timeout = asyncio.timeout(config.request_timeout_s)
        try:
            async with timeout:
                # Before reading what would be refused anyhow.
                self._service.room.refuse_when_full()
                caller.room.refuse_when_full()
                raw = await read_body(self._request, config.max_body_bytes, config.body_timeout_s)
                body = await self._parse(raw)
                with self._service.places(body), caller.places(body.num_choices):
                    await until_disconnect(receive, self._answer(body, caller, send))
        except TimeoutError:
            if not timeout.expired():
                raise
            raise RequestError(
                f"The request took longer than {config.request_timeout_s:g} s.",
                None,
                "request_timeout",
                504,
            ) from None

    async def _parse(self, raw: bytes) -> GenerationBody:
        body_type = BODY_TYPES[self._endpoint]
        if len(raw) <= MAX_INLINE_BODY_BYTES:
            return parse_body(raw, body_type)
        return await asyncio.to_thread(parse_body, raw, body_type)

    async def _answer(self, body: GenerationBody, caller: Caller, send: Send) -> None:
        plan = (await self._service.plan(self._endpoint, body)).salted(caller.cache_salt)
        if plan.is_stream:
            await self._answer_stream(plan, send)
        else:
            await self._answer_whole(plan, send)

    async def _answer_whole(self, plan: Plan, send: Send) -> None:
        created = self._service.now_s()
        answer = self._service.answer(plan)
        async with aclosing(self._service.rounds(plan, answer)) as rounds:
            items = [item async for item in rounds]
        if plan.has_logprobs:  # so large a body is not for the event loop
            body = await asyncio.to_thread(whole_body, plan, created, items, answer.usage)
        else:
            body = whole_body(plan, created, items, answer.usage)
        await send_json(send, body)

    async def _answer_stream(self, plan: Plan, send: Send) -> None:
        chunks = ChunkBuilder(plan, self._service.now_s())
        answer = self._service.answer(plan)
        is_begun = False
        async with aclosing(self._service.rounds(plan, answer)) as rounds:
            async for item in rounds:
                # The status waits for the first round: until then an error is a real 4xx or 5xx.
                opening = b"" if is_begun else chunks.begin()
                if not is_begun:
                    is_begun = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": 200,
                            "headers": _STREAM_HEADERS,
                        }
                    )
                if item.prompt_entries:
                    part = await asyncio.to_thread(chunks.round, item)
                else:
                    part = chunks.round(item)
                await _send_part(send, opening + part)
                if answer.is_whole:
                    await _send_part(send, chunks.end(answer.usage))
        await send({"type": "http.response.body", "body": b""})


async def _send_part(send: Send, part: bytes) -> None:
    if part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
