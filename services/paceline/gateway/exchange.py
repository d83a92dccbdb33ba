"""One POST from its first byte to its last: the only owner of its generation.

An ASGI response rather than a route function, because the work goes on while the answer is being
sent and must end with it. Knows no tokenizer and no target.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import RequestError
from paceline.gateway.answer import Answer
from paceline.gateway.assembler import RoundText, total
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
from paceline.gateway.request_log import log_of
from paceline.gateway.responses import whole_body
from paceline.gateway.service import GatewayService
from paceline.gateway.spans import CANCELLED, CLIENT_DISCONNECTED, RequestSpan
from paceline.gateway.sse import ChunkBuilder
from paceline.logs import about

# A longer body takes milliseconds to parse: not on the event loop.
MAX_INLINE_BODY_BYTES = 64 << 10


class Exchange(Response):
    """Reads, plans, generates, answers. Errors leave it as RequestError, or ClientDisconnect."""

    def __init__(self, service: GatewayService, endpoint: Endpoint, request: Request) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint
        self._request = request
        self._log = log_of(request.scope)
        self._arrived_s = service.monotonic()
        self._span = RequestSpan(service.tracer, trace_of(request.scope), endpoint, self._arrived_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: BaseException | None = None
        try:
            await self._exchange(scope, receive, send)
        except (Exception, asyncio.CancelledError) as error:
            failure = error
            raise
        finally:
            self._end_span(failure)

    def _end_span(self, failure: BaseException | None) -> None:
        error: RequestError | None = None
        gone = ""
        if isinstance(failure, ClientDisconnect):
            gone = CLIENT_DISCONNECTED
        elif isinstance(failure, asyncio.CancelledError):
            gone = CANCELLED
        elif failure is not None:
            error = failure if isinstance(failure, RequestError) else internal_error()
        if self._log.is_answered:
            gone = ""  # whoever goes then has it all
        self._span.end(self._service.monotonic(), error, gone)

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._service.config
        caller = caller_of(scope)
        self._log.key = caller.name
        timeout = asyncio.timeout(config.request_timeout_s)
        try:
            async with timeout:
                # Before reading what would be refused anyhow.
                self._service.room.refuse_when_full()
                caller.room.refuse_when_full()
                raw = await read_body(self._request, config.max_body_bytes, config.body_timeout_s)
                self._arrived_s = self._service.monotonic()
                body = await self._parse(raw)
                with self._service.places(body) as num_choices, caller.places(num_choices):
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
        self._log.model = self._service.served(body.model).name
        name = self._log.ids.request_id
        plans = [
            plan.named(name).salted(caller.cache_salt).traced(self._span.traceparent)
            for plan in await self._service.plans(self._endpoint, body)
        ]
        answers = [self._service.answer(plan) for plan in plans]
        self._span.begin_answer(plans, answers)
        with about(self._log.begin_answer(plans, answers, self._arrived_s)):
            if body.stream:
                service = self._service
                stream = EventStream(
                    send, service.config.keepalive_interval_s, service.monotonic, asyncio.sleep
                )
                await beside(stream.keep_alive(), self._answer_stream(plans, answers, stream))
            else:
                await self._answer_whole(plans, answers, send)

    async def _rounds(
        self, plans: Sequence[Plan], answers: Sequence[Answer]
    ) -> AsyncGenerator[tuple[int, RoundText], None]:
        async with aclosing(self._service.all_rounds(plans, answers, self._arrived_s)) as rounds:
            async for prompt, item in rounds:
                now_s = self._service.monotonic()
                self._log.receive(item, now_s)
                self._span.receive(now_s)
                yield prompt, item

    async def _answer_whole(
        self, plans: Sequence[Plan], answers: Sequence[Answer], send: Send
    ) -> None:
        created = self._service.now_s()
        items: list[list[RoundText]] = [[] for _ in plans]
        async with aclosing(self._rounds(plans, answers)) as rounds:
            async for prompt, item in rounds:
                items[prompt].append(item)
        usage = total([answer.usage for answer in answers])
        if plans[0].has_logprobs:  # so large a body is not for the event loop
            body = await asyncio.to_thread(whole_body, plans, created, items, usage)
        else:
            body = whole_body(plans, created, items, usage)
        await send_json(send, body)

    async def _answer_stream(
        self, plans: Sequence[Plan], answers: Sequence[Answer], stream: EventStream
    ) -> None:
        chunks = ChunkBuilder(plans, self._service.now_s(), [answer.usage for answer in answers])
        opening = chunks.begin()
        async with aclosing(self._rounds(plans, answers)) as rounds:
            async for prompt, item in rounds:
                # The status waits for the first round, or for the first comment when that takes
                # long: until then an error is a real 4xx or 5xx.
                if item.prompt_entries:
                    part = await asyncio.to_thread(chunks.round, prompt, item)
                else:
                    part = chunks.round(prompt, item)
                await stream.send_part(opening + part)
                opening = b""
                if chunks.is_whole:
                    await stream.send_part(chunks.end())
                    self._log.is_answered = True
        await stream.end()
