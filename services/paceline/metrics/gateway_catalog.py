"""What a gateway process counts: requests as clients see them.

Those with `VLLM` as source have the figures of the metric that vLLM calls so, which `/metrics`
shows under that name, too.
"""

from __future__ import annotations

from paceline.metrics.metric import Declare, Metric, Role

FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
INTER_TOKEN_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip

VLLM, OURS = "vllm:", "paceline:"
MAX_CONCURRENT = "gateway.max_concurrent_requests"
KEY_MAX_CONCURRENT = "gateway.api_keys.max_concurrent_requests"
# The error codes that say that a named limit was reached here, and the limit, unless the error
# itself names another. What a target's limits refuse is counted there.
LIMIT_OF_CODE: dict[str, str] = {
    "too_many_requests": MAX_CONCURRENT,
    "rate_limit_exceeded": "gateway.api_keys.max_requests_per_minute",
    "overloaded": "max_ongoing_requests",
    "body_too_large": "gateway.max_body_bytes",
    "body_timeout": "gateway.body_timeout_s",
    "request_timeout": "gateway.request_timeout_s",
    "context_length_exceeded": "model.max_model_len",
}
GATEWAY_LIMITS = (*LIMIT_OF_CODE.values(), KEY_MAX_CONCURRENT, "model.num_kv_blocks")
_MODEL = ("model_name",)

_GATEWAY = Declare(Role.GATEWAY, "gateway: service")

IN_PROGRESS = _GATEWAY.gauge(
    "gateway_requests_in_progress", "Places taken: choices, and aborts under way.", "choices"
)
CONTROLLER_UP = _GATEWAY.gauge(
    "controller_up", "1 while the model's controller answers this gateway.", "bool", labels=_MODEL
)
LIMITS_HIT = _GATEWAY.counter(
    "gateway_limits_hit",
    "Requests that a named limit of the gateway refused.",
    "requests",
    labels=("limit",),
    values=GATEWAY_LIMITS,
)
RETRIES = _GATEWAY.counter(
    "request_retries", "Tries after a target was lost or full.", "requests", labels=_MODEL
)
HTTP_REQUESTS = _GATEWAY.counter(
    "http_requests",
    "Requests by route and status of the answer.",
    "requests",
    f"{OURS}http_requests",
    labels=("path", "status"),
)
REFUSED = _GATEWAY.counter(
    "refused",
    "Requests that ended in an error, by its code.",
    "requests",
    f"{OURS}refused",
    labels=("code",),
)
RUNNING = _GATEWAY.gauge(
    "gateway_choices_running",
    "Choices in progress at this gateway.",
    "choices",
    f"{VLLM}num_requests_running",
    labels=_MODEL,
)
SUCCESS = _GATEWAY.counter(
    "request_success",
    "Choices that ended, by how: as in the answer, abort (client, deadline) or error.",
    "choices",
    f"{VLLM}request_success",
    labels=(*_MODEL, "finished_reason"),
)
PROMPT_TOKENS = _GATEWAY.counter(
    "prompt_tokens",
    "Tokens of prompts that were read.",
    "tokens",
    f"{VLLM}prompt_tokens",
    labels=_MODEL,
)
GENERATION_TOKENS = _GATEWAY.counter(
    "generation_tokens",
    "Tokens as usage counts them.",
    "tokens",
    f"{VLLM}generation_tokens",
    labels=_MODEL,
)
FIRST_TOKEN = _GATEWAY.histogram(
    "time_to_first_token_seconds",
    "From the whole body to the first token.",
    "seconds",
    FIRST_TOKEN_S,
    f"{VLLM}time_to_first_token_seconds",
    labels=_MODEL,
)
INTER_TOKEN = _GATEWAY.histogram(
    "inter_token_latency_seconds",
    "From round to round, shared out equally among the later one's tokens.",
    "seconds",
    INTER_TOKEN_S,
    f"{VLLM}inter_token_latency_seconds",
    labels=_MODEL,
)
E2E = _GATEWAY.histogram(
    "e2e_request_latency_seconds",
    "From the whole body to the last token; not of errors and aborts.",
    "seconds",
    REQUEST_S,
    f"{VLLM}e2e_request_latency_seconds",
    labels=_MODEL,
)

GATEWAY_METRICS: tuple[Metric, ...] = (
    IN_PROGRESS, CONTROLLER_UP, LIMITS_HIT, RETRIES, HTTP_REQUESTS, REFUSED, RUNNING, SUCCESS,
    PROMPT_TOKENS, GENERATION_TOKENS, FIRST_TOKEN, INTER_TOKEN, E2E,
)  # fmt: skip
