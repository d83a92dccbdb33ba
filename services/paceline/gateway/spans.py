"""The gateway's span of each request, and which requests are traced.

Decided once, here, by the trace's id: every other process follows the flag that it is told. A
request that turns out slow or fails has its span all the same, as its target does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from paceline.config import TracingConfig
from paceline.errors import RequestError
from paceline.gateway.answer import Answer
from paceline.gateway.assembler import total
from paceline.gateway.plan import Endpoint, Plan
from paceline.gateway.trace import Trace
from paceline.tracing.context import is_sampled
from paceline.tracing.spans import Attribute, Span, Tracer, int_attribute

# What ended a request that no error of ours did, as its `error.type`.
CLIENT_DISCONNECTED, CANCELLED = "client_disconnected", "cancelled"
OPERATIONS = {Endpoint.CHAT: "chat", Endpoint.COMPLETIONS: "text_completion"}


class GatewayTracer:
    """`random_bits(n)` gives span ids."""

    def __init__(
        self,
        tracer: Tracer,
        config: TracingConfig,
        random_bits: Callable[[int], int] = random.getrandbits,
    ) -> None:
        self.tracer = tracer
        self.slow_request_s = config.slow_request_s
        self._sample_ratio = config.sample_ratio
        self._random_bits = random_bits

    def join(self, trace: Trace) -> Trace:
        """The same trace with our span as the parent of what follows."""
        sampled = trace.is_sampled or is_sampled(int(trace.trace_id, 16), self._sample_ratio)
        return Trace(trace.trace_id, f"{self._random_bits(64) or 1:016x}", sampled)


class RequestSpan:
    """From a request's arrival to its answer's last byte; `tracer` None: nobody looks.

    Times are the service's monotonic clock.
    """

    def __init__(
        self, tracer: GatewayTracer | None, client: Trace, endpoint: Endpoint, begin_s: float
    ) -> None:
        self._tracer = tracer
        self._client = client
        self._own = client if tracer is None else tracer.join(client)
        self._operation = OPERATIONS[endpoint]
        self._begin_s = begin_s
        self._first_s: float | None = None
        self._plans: Sequence[Plan] = ()
        self._answers: Sequence[Answer] = ()

    @property
    def traceparent(self) -> str:
        """What the target is told."""
        return self._own.traceparent

    def begin_answer(self, plans: Sequence[Plan], answers: Sequence[Answer]) -> None:
        """One of each for every prompt."""
        self._plans, self._answers = plans, answers

    def receive(self, now_s: float) -> None:
        """There is a round for the client."""
        if self._first_s is None:
            self._first_s = now_s

    def end(self, now_s: float, error: RequestError | None = None, gone: str = "") -> None:
        """`gone`: CLIENT_DISCONNECTED or CANCELLED, before the answer's end."""
        tracer = self._tracer
        if tracer is None:
            return
        failed = error is not None and error.status >= 500
        slow_s = tracer.slow_request_s
        is_slow = now_s - self._begin_s > slow_s
        if not (self._own.is_sampled or (slow_s and (failed or is_slow))):
            return
        attributes = self._attributes()
        if gone:
            attributes["error.type"] = gone
        elif error is not None:
            attributes["error.type"] = error.code or str(error.status)
            attributes["http.response.status_code"] = error.status
        offset_us = tracer.tracer.unix_offset_us
        model = f" {self._plans[0].model}" if self._plans else ""
        tracer.tracer.emit(
            Span(
                self._operation + model,
                int(self._own.trace_id, 16),
                int(self._own.span_id, 16),
                int(self._client.span_id, 16) if self._client.has_parent else 0,
                int(self._begin_s * 1e6) + offset_us,
                int(now_s * 1e6) + offset_us,
                attributes,
                is_server=True,
                error=str(attributes["error.type"]) if failed else "",
            )
        )

    def _attributes(self) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "paceline",
        }
        if self._plans:
            usage = total([answer.usage for answer in self._answers])
            attributes |= _of_plan(self._plans[0])
            attributes["gen_ai.usage.input_tokens"] = usage.num_prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = usage.num_completion_tokens
        if self._first_s is not None:
            first_s = self._first_s - self._begin_s
            attributes["gen_ai.response.time_to_first_chunk"] = round(first_s, 6)
        if reasons := tuple(reason for answer in self._answers for reason in answer.finish_reasons):
            attributes["gen_ai.response.finish_reasons"] = reasons
        return attributes


def _of_plan(plan: Plan) -> dict[str, Attribute]:
    request = plan.request
    sampling = request.sampling
    return {
        "gen_ai.request.model": plan.model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": int_attribute(sampling.seed),
        "gen_ai.request.choice.count": plan.num_choices,
        "gen_ai.request.stream": plan.is_stream,
        "gen_ai.response.id": plan.answer_id,
        "gen_ai.response.model": plan.model,
        "paceline.request_id": plan.answer_id,
    }
