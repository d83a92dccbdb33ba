"""A streamed answer as server-sent events: one per round, as OpenAI's clients expect them.

Pure: bytes are returned, never sent. Order: role chunk (chat only), one chunk per round that has
text, finish chunk, usage chunk when asked for, `[DONE]`.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import RequestError
from paceline.gateway.assembler import RoundText, Usage
from paceline.gateway.plan import Endpoint, Plan
from paceline.gateway.responses import Json, envelope, error_body, speculation_body, usage_body
from paceline.generation import FinishReason

DONE = b"data: [DONE]\n\n"


# JSON lets these stand, but some clients split lines at them.
_LINE_BREAKS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"})


def event(body: Json) -> bytes:
    """JSON escapes line feeds itself, so one `data:` line always suffices."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_BREAKS)}\n\n".encode()


def error_event(error: RequestError) -> bytes:
    """How a stream that has begun fails. No `[DONE]` follows: the text is not whole."""
    return event(error_body(error))


class ChunkBuilder:
    """The events of one streamed answer."""

    def __init__(self, plan: Plan, created: int) -> None:
        self._plan = plan
        self._envelope = envelope(plan, created)
        if plan.include_usage:
            # OpenAI: then every other chunk says null.
            self._envelope["usage"] = None

    def begin(self) -> bytes:
        """Chat streams open with the role."""
        if self._plan.endpoint is Endpoint.COMPLETIONS:
            return b""
        return self._chunk({"delta": {"role": "assistant", "content": ""}})

    def round(self, item: RoundText) -> bytes:
        """One round's text. A round that releases none is silent, unless rounds are asked for."""
        if not item.text and not self._plan.include_rounds:
            return b""
        if self._plan.endpoint is Endpoint.CHAT:
            choice: Json = {"delta": {"content": item.text}}
        else:
            choice = {"text": item.text}
        if not self._plan.include_rounds:
            return self._chunk(choice)
        return self._chunk(choice, speculation=speculation_body([item]))

    def end(self, finish_reason: FinishReason, usage: Usage) -> bytes:
        """Finish chunk, usage chunk when asked for, [DONE]."""
        empty: Json = {"delta": {}} if self._plan.endpoint is Endpoint.CHAT else {"text": ""}
        events = self._chunk(empty, finish_reason)
        if self._plan.include_usage:
            events += event(self._envelope | {"choices": [], "usage": usage_body(usage)})
        return events + DONE

    def _chunk(
        self, choice: Json, finish_reason: FinishReason | None = None, **extra: Any
    ) -> bytes:
        fields = {"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}
        return event(self._envelope | {"choices": [fields]} | extra)
