"""One POST from its first byte to its last: the only owner of its generation.

An ASGI response rather than a route function, because the work goes on while the answer is being
sent and must end with it. Knows no tokenizer and no target.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import RequestError
from paceline.gateway.assembler import RoundText
from paceline.gateway.auth import Caller, caller_of
from paceline.gateway.http import (
    beside,
    internal_error,
    read_body,
    send_json,
    trace_of,
    until_disconnect,
)
from paceline.gateway.keepalive import EventStream
from paceline.gateway.openai import GenerationBody, parse_body
from paceline.gateway.plan import BODY_TYPES, Endpoint, Plan
from paceline.gateway.responses import whole_body
from paceline.gateway.service import GatewayService
from paceline.gateway.spans import RequestSpan
from paceline.gateway.sse import ChunkBuilder

# A longer body takes milliseconds to parse: not on the event loop.
MAX_INLINE_BODY_BYTES = 64 << 10


class Exchange(Response):
    """Reads, plans, generates, answers. Errors leave it as RequestError, or ClientDisconnect."""

    def __init__(self, service: GatewayService, endpoint: Endpoint, request: Request) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint
        self._request = request
        self._arrived_s = service.monotonic()
        self._span = RequestSpan(service.tracer, trace_of(request.scope), endpoint, self._arrived_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: Exception | None = None
        try:
            await self._exchange(scope, receive, send)
        except Exception as error:
            failure = error
            raise
        finally:
            self._end_span(failure)

    def _end_span(self, failure: Exception | None) -> None:
        has_left = isinstance(failure, ClientDisconnect)
        error = failure if isinstance(failure, RequestError) else None
        if failure is not None and error is None and not has_left:
            error = internal_error()
        self._span.end(self._service.monotonic(), error, has_left)

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._service.config
        caller = caller_of(scope)
        timeout = asyncio.timeout(config.request_timeout_s)
        try:
            async with timeout:
                # Before reading what would be refused anyhow.
                self._service.room.refuse_when_full()
                caller.room.refuse_when_full()
                raw = await read_body(self._request, config.max_body_bytes, config.body_timeout_s)
                self._arrived_s = self._service.monotonic()
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
        plan = await self._service.plan(self._endpoint, body)
        plan = plan.salted(caller.cache_salt).traced(self._span.traceparent)
        self._span.plan = plan
        if plan.is_stream:
            service = self._service
            stream = EventStream(
                send, service.config.keepalive_interval_s, service.monotonic, asyncio.sleep
            )
            await beside(stream.keep_alive(), self._answer_stream(plan, stream))
        else:
            await self._answer_whole(plan, send)

    async def _answer_whole(self, plan: Plan, send: Send) -> None:
        created = self._service.now_s()
        answer = self._service.answer(plan)
        self._span.usage = answer.usage
        async with aclosing(self._service.rounds(plan, answer, self._arrived_s)) as rounds:
            items = [self._watch(item) async for item in rounds]
        if plan.has_logprobs:  # so large a body is not for the event loop
            body = await asyncio.to_thread(whole_body, plan, created, items, answer.usage)
        else:
            body = whole_body(plan, created, items, answer.usage)
        await send_json(send, body)

    def _watch(self, item: RoundText) -> RoundText:
        self._span.receive(item, self._service.monotonic())
        return item

    async def _answer_stream(self, plan: Plan, stream: EventStream) -> None:
        chunks = ChunkBuilder(plan, self._service.now_s())
        answer = self._service.answer(plan)
        self._span.usage = answer.usage
        opening = chunks.begin()
        async with aclosing(self._service.rounds(plan, answer, self._arrived_s)) as rounds:
            async for item in rounds:
                self._watch(item)
                # The status waits for the first round, or for the first comment when that takes
                # long: until then an error is a real 4xx or 5xx.
                if item.prompt_entries:
                    part = await asyncio.to_thread(chunks.round, item)
                else:
                    part = chunks.round(item)
                await stream.send_part(opening + part)
                opening = b""
                if answer.is_whole:
                    await stream.send_part(chunks.end(answer.usage))
        await stream.end()
