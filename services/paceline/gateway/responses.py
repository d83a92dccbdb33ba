"""OpenAI's response bodies as plain dicts. Pure; the time of creation is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import RequestError
from paceline.gateway.assembler import RoundText, Usage
from paceline.gateway.openai import MAX_SENTENCE_CHARS, clip
from paceline.gateway.plan import Endpoint, Plan
from paceline.gateway.text import Segment
from paceline.generation import RoundDelta

Json = dict[str, Any]

_OBJECTS = {
    (Endpoint.COMPLETIONS, False): "text_completion",
    (Endpoint.COMPLETIONS, True): "text_completion",
    (Endpoint.CHAT, False): "chat.completion",
    (Endpoint.CHAT, True): "chat.completion.chunk",
}


def envelope(plan: Plan, created: int) -> Json:
    """The fields that every body and chunk of one answer shares."""
    return {
        "id": plan.request.request_id,
        "object": _OBJECTS[plan.endpoint, plan.is_stream],
        "created": created,
        "model": plan.model,
        "system_fingerprint": None,
    }


def usage_body(usage: Usage) -> Json:
    """OpenAI's counts, and ours about speculation."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "speculation": {
            "rounds": usage.num_rounds,
            "proposed": usage.num_draft_tokens,
            "accepted": usage.num_accepted_tokens,
            "acceptance_rate": round(usage.acceptance_rate, 6),
            "mean_acceptance_length": round(usage.mean_acceptance_length, 6),
        },
    }


def speculation_body(rounds: Sequence[RoundText]) -> Json:
    """Rounds with their times, and every piece of text with its origin."""
    return {
        "rounds": [_round_body(item.delta) for item in rounds],
        "pieces": [_piece_body(segment) for item in rounds for segment in _merged(item.segments)],
    }


def _round_body(delta: RoundDelta) -> Json:
    return {
        "round": delta.round,
        "num_speculative_tokens": delta.num_speculative_tokens,
        "proposed": delta.num_draft_tokens,
        "accepted": delta.num_accepted_tokens,
        "draft_ms": round(delta.draft_ms, 3),
        "wire_ms": round(delta.wire_ms, 3),
        "queue_ms": round(delta.queue_ms, 3),
        "verify_ms": round(delta.verify_ms, 3),
    }


def _piece_body(segment: Segment) -> Json:
    return {"text": segment.text, "origin": segment.origin.value}


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """Neighbours of one origin inside a round become one piece."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].origin is segment.origin:
            segment = Segment(merged.pop().text + segment.text, segment.origin)
        merged.append(segment)
    return merged


def whole_body(plan: Plan, created: int, rounds: Sequence[RoundText], usage: Usage) -> Json:
    """The answer to a request that does not stream."""
    text = "".join(item.text for item in rounds)
    choice: Json = {"index": 0, "logprobs": None, "finish_reason": rounds[-1].finish_reason}
    if plan.endpoint is Endpoint.CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    body = envelope(plan, created) | {"choices": [choice], "usage": usage_body(usage)}
    if plan.include_rounds:
        body["speculation"] = speculation_body(rounds)
    return body


def model_body(model: str, created: int, max_model_len: int) -> Json:
    """`max_model_len` as vLLM adds it: clients use it to size prompts."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "paceline",
        "max_model_len": max_model_len,
    }


def error_body(error: RequestError) -> Json:
    """OpenAI's error object. The side at fault decides the type."""
    return {
        "error": {
            "message": clip(error.message, 2 * MAX_SENTENCE_CHARS),
            "type": error.type if error.status < 500 else "server_error",
            "param": error.param,
            "code": error.code,
        }
    }
