"""The line that every try of a request leaves in its target's log: which replica did what of it.

Joined to the gateway's line by the trace id, the HTTP request's or the answer's (`completion_id`);
`generation_id` tells an answer's prompts, tries and audits apart. Has no token in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from paceline import logs
from paceline.errors import RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.logs import RequestIds

logger = logging.getLogger(__name__)


async def log_generation(
    request: GenerateRequest,
    deltas: AsyncGenerator[RoundDelta | None, None],
    clock: Callable[[], float],
) -> AsyncGenerator[RoundDelta | None, None]:
    """The same deltas; the line follows when they end, or when nobody wants them any more."""
    log = _GenerationLog(request, clock())
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                if delta is not None:
                    log.receive(delta, clock())
                yield delta
        log.outcome = "ok"
    except RequestError as refusal:
        log.outcome = refusal.code or "refused"
        raise
    except (asyncio.CancelledError, GeneratorExit):
        log.outcome = "cancelled"
        raise
    finally:
        log.write(clock())


class _GenerationLog:
    def __init__(self, request: GenerateRequest, began_s: float) -> None:
        self.outcome = "internal_error"
        self._request = request
        self._began_s = began_s
        self._first_s: float | None = None
        self._num_tokens = self._num_rounds = self._num_proposed = self._num_accepted = 0

    def receive(self, delta: RoundDelta, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
        self._num_tokens += len(delta.token_ids)
        self._num_rounds += 1
        self._num_proposed += delta.num_draft_tokens
        self._num_accepted += delta.num_accepted_tokens

    def write(self, now_s: float) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        request, first_s = self._request, self._first_s
        answer_id = request.answer_id or request.request_id
        ids = RequestIds(request.http_request_id, request.trace_id, answer_id)
        fields = {
            "generation_id": request.request_id,
            "outcome": self.outcome,
            "total_ms": _ms(now_s - self._began_s),
            "first_round_ms": None if first_s is None else _ms(first_s - self._began_s),
            "prompt_tokens": len(request.prompt_token_ids),
            "output_tokens": self._num_tokens,
            "rounds": self._num_rounds,
            "proposed": self._num_proposed,
            "accepted": self._num_accepted,
        }
        logger.info("generation", extra=logs.extra(ids, **fields))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
