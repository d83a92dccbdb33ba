"""One streamed answer, event by event: server-sent events to tokens, rounds and errors.

Pure: bytes in, `Chunk`s out. Knows no HTTP library, no clock and no load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError

# Of one line; a server that sends more in one is not understood.
MAX_EVENT_BYTES = 16 << 20
MAX_CODE_CHARS = 64
DONE = b"[DONE]"


class StreamError(PacelineError):
    """The answer failed or is no answer; `code` is what a report counts it under."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code[:MAX_CODE_CHARS]


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """The service's own counts. `speculation`: rounds, proposed, accepted; None if not told."""

    completion_tokens: int
    prompt_tokens: int
    speculation: tuple[int, int, int] | None


@dataclass(slots=True)
class Chunk:
    """What one event brought. `num_tokens` of it is accepted + 1 of each round where the server
    shows rounds, else 1 for a chunk with text. `num_rejections`: rounds that did not accept all
    that was proposed. `round_ks`: num_speculative_tokens of each round."""

    text: str = ""
    num_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_rejections: int = 0
    round_ks: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: UsageCounts | None = None


class EventReader:
    """Bytes as they come from the network, in pieces of any size, to chunks.

    Every `data:` line is one event, as all OpenAI-like servers send them; comments and other
    fields are passed over. `is_done` after the last event. Raises StreamError.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self.is_done = False

    def feed(self, data: bytes) -> Iterator[Chunk]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise StreamError("malformed", f"a line of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if not line.startswith(b"data:") or self.is_done:
                continue
            payload = line[5:].strip()
            if payload == DONE:
                self.is_done = True
            else:
                yield _parsed(payload)


def _parsed(payload: bytes) -> Chunk:
    try:
        body = json.loads(payload)
        if "error" in body:
            raise StreamError(error_code(body, "stream_error"), error_message(body))
        return _chunk(body)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise StreamError("malformed", f"no chunk of an answer: {payload[:80]!r}") from error


def _chunk(body: dict[str, Any]) -> Chunk:
    chunk = Chunk(usage=_usage(body["usage"]) if body.get("usage") else None)
    for choice in body.get("choices") or ():
        delta = choice.get("delta")
        chunk.text += (delta.get("content") if delta is not None else choice.get("text")) or ""
        chunk.finish_reason = choice.get("finish_reason") or chunk.finish_reason
    rounds = (body.get("speculation") or {}).get("rounds")
    if rounds is None:
        chunk.num_tokens = 1 if chunk.text else 0
        return chunk
    for item in rounds:
        num_accepted, num_proposed = int(item["accepted"]), int(item["proposed"])
        chunk.num_tokens += num_accepted + 1
        chunk.num_accepted += num_accepted
        chunk.num_proposed += num_proposed
        chunk.num_rejections += num_accepted < num_proposed
        chunk.round_ks.append(int(item["num_speculative_tokens"]))
    return chunk


def _usage(body: dict[str, Any]) -> UsageCounts:
    counts = body.get("speculation")
    return UsageCounts(
        int(body["completion_tokens"]),
        int(body.get("prompt_tokens") or 0),
        (int(counts["rounds"]), int(counts["proposed"]), int(counts["accepted"]))
        if counts
        else None,
    )


def error_code(body: object, otherwise: str) -> str:
    """OpenAI's `error.code`, which is what tells one refusal from another."""
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return str(code) if code else otherwise


def error_message(body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "no message")
