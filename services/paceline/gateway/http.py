"""The HTTP edge: bounded bodies, request ids, traces, and errors in OpenAI's shape.

Knows no route, no model and no target. This is where exceptions end: nothing above it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline import logs
from paceline.errors import RequestError
from paceline.gateway.request_log import RequestLog, begin_log
from paceline.gateway.responses import Json, error_body
from paceline.gateway.sse import error_event
from paceline.gateway.trace import TRACE_ID_HEADER, TRACEPARENT_HEADER, Trace, begin_trace
from paceline.logs import RequestIds

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
# All of a request that a log line shows: bounded and harmless.
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,%d}" % MAX_REQUEST_ID_CHARS)
EVENT_STREAM = "text/event-stream; charset=utf-8"
# A client that does not even take an error is left alone after this.
FAIL_TIMEOUT_S = 5.0
# What a 429 or 503 says when whoever refused named no time.
RETRY_AFTER_S = 1
_TRACE = "paceline.trace"
# Told once per request: the status of the answer (0: none was begun) and what ended it, if an
# error of ours did.
OnEnd = Callable[[Scope, int, RequestError | None], None]


class ClientStalled(ClientDisconnect):
    """The client is there, but took nothing for too long."""


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, never holding more than the limit. Raises RequestError (408, 413, 415)."""
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip()
    if media_type.lower() != "application/json":
        # Also keeps foreign web pages out: a browser sends forms anywhere without asking.
        raise RequestError("Content-Type must be application/json.", None, "media_type", 415)
    too_large = RequestError(
        f"The body is larger than {max_bytes} bytes.", None, "body_too_large", 413
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    timeout = asyncio.timeout(timeout_s)
    try:
        async with timeout:
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        if not timeout.expired():
            raise
        raise RequestError(
            f"The body did not arrive within {timeout_s:g} s.", None, "body_timeout", 408
        ) from None
    return bytes(body)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run the work; cancel it and raise ClientDisconnect when the client leaves first.

    Call it after the body was read: from then on `receive` only reports the disconnect.
    """
    await beside(_wait_for_disconnect(receive), work)


async def beside(companion: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> None:
    """Run the work and its companion, which must not end first. When it raises, the work is
    cancelled and that error is raised; when the work ends, the companion is cancelled."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(companion)
    task, other = tasks
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            other.result()
    finally:
        other.cancel()
        task.cancel()
        await asyncio.wait(tasks)
        for done in tasks:
            done.cancelled() or done.exception()  # seen, whichever of them is raised
    task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


class Reply:
    """An ASGI `send` that adds headers and remembers how far the answer has come.

    Whoever produces the answer waits in it while the client does not read: nothing piles up here.
    """

    def __init__(
        self, send: Send, extra_headers: list[tuple[bytes, bytes]], write_timeout_s: float
    ) -> None:
        self._send = send
        self._extra_headers = extra_headers
        self._write_timeout_s = write_timeout_s
        self._is_stream = False
        self.status = 0
        self.is_whole = False  # the last piece of the body was taken

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            content_type = dict(headers).get(b"content-type", b"")
            self.status = message["status"]
            self._is_stream = content_type == EVENT_STREAM.encode()
            message = {**message, "headers": headers + self._extra_headers}
        timeout = asyncio.timeout(self._write_timeout_s)
        try:
            async with timeout:
                await self._send(message)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise ClientStalled from None
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_whole = True

    async def fail(self, error: RequestError, scope: Scope, receive: Receive) -> None:
        """An error body; inside a stream that has begun, an error event."""
        with contextlib.suppress(TimeoutError, ClientStalled):
            async with asyncio.timeout(FAIL_TIMEOUT_S):
                if not self.status:
                    await error_response(error)(scope, receive, self)
                elif self._is_stream:
                    await self({"type": "http.response.body", "body": error_event(error)})


def error_response(error: RequestError) -> JSONResponse:
    headers = {}
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status in (429, 503):
        retry_after_s = RETRY_AFTER_S
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 408:
        headers["connection"] = "close"  # what is left of the body is not worth waiting for
    return JSONResponse(error_body(error), error.status, headers)


class EdgeMiddleware:
    """Outermost but for CORS: gives every request an id and a trace, and every exception an answer
    without a stack trace."""

    def __init__(
        self,
        app: ASGIApp,
        adds_request_id: bool,
        max_header_bytes: int,
        write_timeout_s: float,
        clock: Callable[[], float],
        on_end: OnEnd,
    ) -> None:
        self._app = app
        self._adds_request_id = adds_request_id
        self._max_header_bytes = max_header_bytes
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        trace = _begin_trace(scope)
        shown = [(TRACE_ID_HEADER, trace.trace_id.encode())]
        if self._adds_request_id:
            shown.append((REQUEST_ID_HEADER, request_id))
        reply = Reply(send, shown, self._write_timeout_s)
        error: RequestError | None = None
        ids = RequestIds(request_id.decode(), trace.trace_id)
        log = begin_log(scope, ids, self._clock())
        with logs.about(ids):
            try:
                error = await self._answer(scope, receive, reply, log)
            except asyncio.CancelledError:
                # By the server around us, maybe because its client has all and is gone.
                log.outcome = "" if reply.is_whole or log.is_answered else "cancelled"
                raise
            finally:
                self._on_end(scope, reply.status, error)

    async def _answer(
        self, scope: Scope, receive: Receive, reply: Reply, log: RequestLog
    ) -> RequestError | None:
        """The error that ended the request, if one of ours did."""
        failure: RequestError | None = None
        try:
            _check_headers(scope, self._max_header_bytes)
            await self._app(scope, receive, reply)
        except ClientStalled:
            log.outcome = "client_stalled"
        except ClientDisconnect:
            # What has its answer may go, too, and servers say so.
            log.outcome = "" if reply.is_whole or log.is_answered else "client_left"
        except RequestError as error:
            failure = error
        except Exception as error:  # the process edge
            logger.exception("the request failed", exc_info=logs.without_message(error))
            failure = internal_error()
        if failure is not None:
            log.outcome = failure.code or f"http_{failure.status}"
            await reply.fail(failure, scope, receive)
        return failure


def trace_of(scope: Scope) -> Trace:
    """What the edge gave the request."""
    trace: Trace = scope[_TRACE]
    return trace


def internal_error() -> RequestError:
    return RequestError("Internal error; the server's log has it.", None, "internal_error", 500)


def _check_headers(scope: Scope, max_bytes: int) -> None:
    """Raises RequestError (431). The server around us has read them all by now; from here on they
    would be carried about."""
    if sum(len(name) + len(value) for name, value in scope["headers"]) > max_bytes:
        raise RequestError(
            f"The request's headers are larger than {max_bytes} bytes.",
            None,
            "headers_too_large",
            431,
        )


def _request_id(scope: Scope) -> bytes:
    """The client's id for logs and answers when it is harmless, else a new one. Never used to
    name work inside: a client could then abort another's."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return f"req-{uuid.uuid4().hex}".encode()


def _begin_trace(scope: Scope) -> Trace:
    values = [value for name, value in scope["headers"] if name == TRACEPARENT_HEADER]
    scope[_TRACE] = begin_trace(values, lambda: uuid.uuid4().hex)
    return trace_of(scope)


async def http_exception_response(request: Request, error: Exception) -> JSONResponse:
    """The framework's own 404 and 405, in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "There is no such path.", 405: "This path does not have that method."}
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    answer = error_response(RequestError(what.get(status, "Bad request."), None, code, status))
    if isinstance(error, HTTPException) and error.headers:
        answer.headers.update(error.headers)
    return answer


async def send_json(send: Send, body: Json) -> None:
    """A 200 with a JSON body, in two messages."""
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(raw)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
