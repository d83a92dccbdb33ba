"""The one line that every request leaves in the gateway's log.

A `RequestLog` lives in the request's ASGI scope. Whoever learns something notes it there; the edge
writes it when the request has ended, however it has. Has no text, no token and nothing else of
what a client chose but its request id and `speculation.method`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Scope

from paceline import logs
from paceline.gateway.answer import Answer
from paceline.gateway.assembler import RoundText, total
from paceline.gateway.plan import Plan
from paceline.logs import RequestIds
from paceline.methods import ProposalSource, SpeculationMethod

logger = logging.getLogger(__name__)

_LOG = "paceline.log"
# What only looks; where it is answered well, that is worth no line at info.
_LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = _LOOKING | {"POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT"}


class RequestLog:
    """`outcome`: what ended the request, where it was no answer of ours; `key`: the API key's
    name; `is_answered`: the client has all of its answer, whatever is still to be tidied up. Times
    are seconds of one monotonic clock."""

    def __init__(self, ids: RequestIds, began_s: float) -> None:
        self.ids = ids
        self.outcome = ""
        self.is_answered = False
        self.key = ""
        self.model = ""
        self._began_s = began_s
        self._arrived_s = began_s
        self._first_token_s: float | None = None
        self._is_stream = False
        self._answers: Sequence[Answer] = ()
        self._method: SpeculationMethod | None = None
        self._sources: set[ProposalSource] = set()

    def begin_answer(
        self, plans: Sequence[Plan], answers: Sequence[Answer], arrived_s: float
    ) -> RequestIds:
        """One of each for every prompt. `arrived_s`: when the body was here; the time to the first
        token counts from then. What is logged about the request from now on knows its answer's id,
        too."""
        self._is_stream, self._answers, self._arrived_s = plans[0].is_stream, answers, arrived_s
        self._method = plans[0].request.speculation.method
        self.ids = replace(self.ids, completion_id=plans[0].answer_id)
        return self.ids

    def receive(self, item: RoundText, now_s: float) -> None:
        """A round as the client gets it."""
        if self._first_token_s is None and item.delta.token_ids:
            self._first_token_s = now_s
        if item.delta.source:
            self._sources.add(item.delta.source)

    def write(self, method: str, route: str, status: int, now_s: float) -> None:
        """`route`: as the routes spell it, never what the client asked for; `status`: 0 when no
        answer was begun."""
        level = logging.DEBUG if method in _LOOKING and 0 < status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        outcome = self.outcome or (f"http_{status}" if status >= 400 else "ok")
        method = method if method in _METHODS else "OTHER"
        extra = logs.extra(self.ids, outcome=outcome, **self._fields(status, now_s))
        logger.log(level, "%s %s", method, route, extra=extra)

    def _fields(self, status: int, now_s: float) -> dict[str, Any]:
        fields: dict[str, Any] = {"status": status, "total_ms": _ms(now_s - self._began_s)}
        if self.key:
            fields["key"] = self.key
        if self.model:
            fields["model"] = self.model
        if not self._answers:
            return fields
        usage = total([answer.usage for answer in self._answers])
        first_s = self._first_token_s
        return fields | {
            "stream": self._is_stream,
            "finish_reasons": [r for answer in self._answers for r in answer.finish_reasons],
            "prompt_tokens": usage.num_prompt_tokens,
            "cached_tokens": usage.num_cached_tokens,
            "completion_tokens": usage.num_completion_tokens,
            "method": self._method,
            "sources": sorted(self._sources),
            "rounds": usage.num_rounds,
            "proposed": usage.num_draft_tokens,
            "accepted": usage.num_accepted_tokens,
            "acceptance": round(usage.acceptance_rate, 4),
            "ttft_ms": None if first_s is None else _ms(first_s - self._arrived_s),
            "retries": sum(answer.num_retries for answer in self._answers),
        }


def begin_log(scope: Scope, ids: RequestIds, now_s: float) -> RequestLog:
    scope[_LOG] = RequestLog(ids, now_s)
    return log_of(scope)


def log_of(scope: Scope) -> RequestLog:
    """What the edge gave the request."""
    log: RequestLog = scope[_LOG]
    return log


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
