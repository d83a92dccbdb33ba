"""What one gateway process counts, as Prometheus reads it: GET /metrics.

Names and labels are vLLM's where vLLM has the thing, so that its dashboards work; one choice of a
request is what it calls a request. Every label has a bounded number of values, none of them chosen
by a client. Times are arguments. Knows no route and no target: the service tells it about rounds,
the edge about answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.samples import Sample

from paceline.gateway.assembler import RoundText, Usage
from paceline.metrics import gateway_catalog
from paceline.metrics.gateway_catalog import (
    FIRST_TOKEN_S,
    GATEWAY_LIMITS,
    GATEWAY_METRICS,
    INTER_TOKEN_S,
    LIMIT_OF_CODE,
    OURS,
    REQUEST_S,
    VLLM,
)
from paceline.metrics.metric import Kind, Metric, Role
from paceline.metrics.process import COUNTS
from paceline.metrics.snapshot import Snapshot
from paceline.metrics.target_catalog import MAX_POSITION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Different error codes; what comes after so many is OTHER.
MAX_CODES = 128
OTHER = "other"
# In place of a status where the client left before there was one.
NO_STATUS = "none"
_CODE = re.compile(r"[a-z0-9_]{1,64}")


class GatewayMetrics:
    """A registry of its own: two gateways in one process do not add up. `num_in_progress` says how
    many places are taken."""

    num_in_progress: Callable[[], int] = staticmethod(lambda: 0)

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
        self._limits: dict[str, float] = {}
        self._sources: list[Callable[[Snapshot], None]] = [COUNTS.fill]
        families = _Families(self._registry)
        self._models = {name: ModelMetrics(families, name) for name in models}

    def add_source(self, fill: Callable[[Snapshot], None]) -> None:
        """Somebody else's counts, shown with these."""
        self._sources.append(fill)

    def of(self, model: str) -> ModelMetrics:
        return self._models[model]

    def answer(self, path: str, status: int) -> None:
        """`path` is a route's, or OTHER; status 0: none was sent."""
        self._http_requests.labels(path, str(status) if status else NO_STATUS).inc()

    def refusal(self, code: str | None, limit: str = "") -> None:
        """`limit`: the name of the one that was reached, where the code does not tell."""
        known = code if code is not None and _CODE.fullmatch(code) else OTHER
        if known not in self._codes and len(self._codes) >= MAX_CODES:
            known = OTHER
        self._codes.add(known)
        self._refused.labels(known).inc()
        limit = limit or LIMIT_OF_CODE.get(known, "")
        if limit in GATEWAY_LIMITS:
            self._limits[limit] = self._limits.get(limit, 0) + 1

    def render(self) -> bytes:
        """With vLLM's names. Takes milliseconds, and is safe in a thread."""
        return generate_latest(self._registry)

    def snapshot(self) -> Snapshot:
        """The same figures, and some more, under our catalog's names."""
        snapshot = Snapshot(Role.GATEWAY)
        families = {family.name: family.samples for family in self._registry.collect()}
        for metric in GATEWAY_METRICS:
            if metric.source.startswith((VLLM, OURS)):
                _copy(snapshot, metric, families[metric.source])
        snapshot.put(gateway_catalog.IN_PROGRESS, self.num_in_progress())
        snapshot.put_each(gateway_catalog.LIMITS_HIT, self._limits)
        for name, model in self._models.items():
            snapshot.put(gateway_catalog.RETRIES, model.num_retries, name)
        for fill in self._sources:
            fill(snapshot)
        return snapshot


def _copy(snapshot: Snapshot, metric: Metric, samples: Iterable[Sample]) -> None:
    histograms: dict[tuple[str, ...], list[float]] = {}
    for sample in samples:
        labels = tuple(sample.labels.get(name, "") for name in metric.labels)
        if metric.kind is not Kind.HISTOGRAM:
            if not sample.name.endswith("_created"):
                snapshot.put(metric, sample.value, *labels)
        elif sample.name.endswith("_bucket"):
            histograms.setdefault(labels, [0.0]).append(sample.value)
        elif sample.name.endswith("_sum"):
            histograms[labels][0] = sample.value
    for labels, (total, *cumulative) in histograms.items():
        counts = [n - before for n, before in zip(cumulative, (0.0, *cumulative), strict=False)]
        snapshot.put_histogram(metric, total, counts, *labels)


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
            "time_to_first_token_seconds", "From the whole body to the first token.", FIRST_TOKEN_S
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "From round to round, shared out equally among the later one's tokens.",
            INTER_TOKEN_S,
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds",
            "From the whole body to the last token; not of errors and aborts.",
            REQUEST_S,
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
        self.num_retries = 0
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
