"""What one gateway process counts, as Prometheus reads it: GET /metrics.

Names and labels are vLLM's where vLLM has the thing, so that its dashboards work; one choice of a
request is what it calls a request. Every label has a bounded number of values, none of them chosen
by a client. Times are arguments. Knows no route and no target: the service tells it about rounds,
the edge about answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from paceline.gateway.assembler import RoundText, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Accepted tokens at this place of a block and behind it are counted together.
MAX_POSITION = 32
# Different error codes; what comes after so many is OTHER.
MAX_CODES = 128
OTHER = "other"
# In place of a status where the client left before there was one.
NO_STATUS = "none"
_CODE = re.compile(r"[a-z0-9_]{1,64}")

_FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_INTER_TOKEN_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip


class GatewayMetrics:
    """A registry of its own: two gateways in one process do not add up."""

    def __init__(self, models: Collection[str]) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._http_requests = Counter(
            "paceline:http_requests",
            "Requests by route and status of the answer.",
            ["path", "status"],
            registry=self._registry,
        )
        self._refused = Counter(
            "paceline:refused",
            "Requests that ended in an error, by its code.",
            ["code"],
            registry=self._registry,
        )
        self._codes: set[str] = set()
        families = _Families(self._registry)
        self._models = {name: ModelMetrics(families, name) for name in models}

    def register(self, collector: Collector) -> None:
        """Somebody else's counts, shown with these."""
        self._registry.register(collector)

    def of(self, model: str) -> ModelMetrics:
        return self._models[model]

    def answer(self, path: str, status: int) -> None:
        """`path` is a route's, or OTHER; status 0: none was sent."""
        self._http_requests.labels(path, str(status) if status else NO_STATUS).inc()

    def refusal(self, code: str | None) -> None:
        known = code if code is not None and _CODE.fullmatch(code) else OTHER
        if known not in self._codes and len(self._codes) >= MAX_CODES:
            known = OTHER
        self._codes.add(known)
        self._refused.labels(known).inc()

    def render(self) -> bytes:
        """Takes milliseconds, and is safe in a thread."""
        return generate_latest(self._registry)


class _Families:
    """The metrics that every served model has a row of."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", what, ["model_name", *labels], registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"vllm:{name}", what, ["model_name"], registry=registry, buckets=buckets
            )

        self.running = Gauge(
            "vllm:num_requests_running",
            "Choices in progress.",
            ["model_name"],
            registry=registry,
        )
        self.success = counter(
            "request_success",
            "Choices that ended, by how: as in the answer, abort (client, deadline) or error.",
            "finished_reason",
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were read.")
        self.generation_tokens = counter("generation_tokens", "Tokens as usage counts them.")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From the whole body to the first token.", _FIRST_TOKEN_S
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "From round to round, shared out equally among the later one's tokens.",
            _INTER_TOKEN_S,
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds",
            "From the whole body to the last token; not of errors and aborts.",
            _REQUEST_S,
        )
        self.drafts = counter("spec_decode_num_drafts", "Rounds that verified a draft.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens proposed.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Tokens accepted.")
        self.accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            f"Tokens accepted, by their place in the block; {MAX_POSITION}: there and behind.",
            "position",
        )


class ModelMetrics:
    """The row of one served model. Starts at zero, not absent: then rates are right."""

    def __init__(self, families: _Families, model: str) -> None:
        self.running = families.running.labels(model)
        self.prompt_tokens = families.prompt_tokens.labels(model)
        self.generation_tokens = families.generation_tokens.labels(model)
        self.first_token = families.first_token.labels(model)
        self.inter_token = families.inter_token.labels(model)
        self.e2e = families.e2e.labels(model)
        self._drafts = families.drafts.labels(model)
        self._draft_tokens = families.draft_tokens.labels(model)
        self._accepted = families.accepted.labels(model)
        self._families = families
        self._model = model
        for reason in ("stop", "length", "abort", "error"):
            families.success.labels(model, reason)

    def end_choice(self, reason: str) -> None:
        self._families.success.labels(self._model, reason).inc()

    def draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """One round that verified a draft."""
        self._drafts.inc()
        self._draft_tokens.inc(num_draft_tokens)
        self._accepted.inc(num_accepted_tokens)
        per_pos = self._families.accepted_per_pos
        for position in range(min(num_accepted_tokens, MAX_POSITION)):
            per_pos.labels(self._model, str(position)).inc()
        if num_accepted_tokens > MAX_POSITION:
            rest = num_accepted_tokens - MAX_POSITION
            per_pos.labels(self._model, str(MAX_POSITION)).inc(rest)


class RequestMetrics:
    """One request from its place to its end. Every choice ends once, here."""

    def __init__(self, model: ModelMetrics, num_choices: int, usage: Usage, arrived_s: float):
        self._model = model
        self._usage = usage
        self._arrived_s = arrived_s
        self._num_tokens = usage.num_completion_tokens
        self._is_prompt_read = False
        # When each open choice last had a token; None before its first.
        self._last_s: dict[int, float | None] = dict.fromkeys(range(num_choices))
        model.running.inc(num_choices)

    def receive(self, item: RoundText, now_s: float) -> None:
        """A round as the answer took it: `usage` counts it already."""
        if not self._is_prompt_read:
            self._is_prompt_read = True
            self._model.prompt_tokens.inc(self._usage.num_prompt_tokens)
        delta = item.delta
        if delta.num_draft_tokens:
            self._model.draft(delta.num_draft_tokens, delta.num_accepted_tokens)
        num_new = self._usage.num_completion_tokens - self._num_tokens
        self._num_tokens += num_new
        if num_new:
            self._model.generation_tokens.inc(num_new)
            self._receive_tokens(item.choice, num_new, now_s)
        if item.finish_reason:
            self._end(item.choice, item.finish_reason)
            self._model.e2e.observe(now_s - self._arrived_s)

    def end(self, reason: str) -> None:
        """What is still open ends so: abort or error."""
        for choice in list(self._last_s):
            self._end(choice, reason)

    def _receive_tokens(self, choice: int, num_tokens: int, now_s: float) -> None:
        last_s = self._last_s.get(choice)
        if last_s is None:
            self._model.first_token.observe(now_s - self._arrived_s)
        else:
            share_s = (now_s - last_s) / num_tokens
            for _ in range(num_tokens):
                self._model.inter_token.observe(share_s)
        self._last_s[choice] = now_s

    def _end(self, choice: int, reason: str) -> None:
        del self._last_s[choice]
        self._model.running.dec()
        self._model.end_choice(reason)
