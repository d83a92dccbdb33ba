"""OpenAI's response bodies as plain dicts. Pure; the time of creation is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import RequestError
from paceline.gateway.assembler import RoundText, Usage
from paceline.gateway.logprobs import (
    TokenEntry,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from paceline.gateway.openai import MAX_SENTENCE_CHARS, clip
from paceline.gateway.output_parser import CallArguments, CallBegin, Content, Part, Reasoning
from paceline.gateway.plan import Endpoint, Plan
from paceline.gateway.targets import ServedModel
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
        "id": plan.answer_id,
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
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "speculation": {
            "rounds": usage.num_rounds,
            "proposed": usage.num_draft_tokens,
            "accepted": usage.num_accepted_tokens,
            "acceptance_rate": round(usage.acceptance_rate, 6),
            "mean_accepted_length": round(usage.mean_acceptance_length, 6),
        },
    }


def speculation_body(plan: Plan, rounds: Sequence[RoundText]) -> Json:
    """Rounds with their times, and every piece of text with its origin.

    Those of an answer of several choices say whose they are; of one choice there is no doubt.
    """
    bodies, pieces = [], []
    for item in rounds:
        whose = {"choice": plan.first_choice + item.choice} if plan.num_choices > 1 else {}
        bodies.append(whose | _round_body(item.delta))
        pieces += [whose | _piece_body(segment) for segment in _merged(item.segments)]
    return {"rounds": bodies, "pieces": pieces}


def _round_body(delta: RoundDelta) -> Json:
    return {
        "round": delta.round,
        "source": delta.source,
        "num_speculative_tokens": delta.num_speculative_tokens,
        "proposed": delta.num_draft_tokens,
        "accepted": delta.num_accepted_tokens,
        "wall_ms": round(delta.wall_ms, 3),
        "draft_ms": round(delta.draft_ms, 3),
        "wire_ms": round(delta.wire_out_ms, 3),
        "wire_out_ms": round(delta.wire_out_ms, 3),
        "window_ms": round(delta.window_ms, 3),
        "queue_ms": round(delta.queue_ms, 3),
        "verify_ms": round(delta.verify_ms, 3),
        "sample_ms": round(delta.sample_ms, 3),
        "wire_back_ms": round(delta.wire_back_ms, 3),
        "rewind_ms": round(delta.rewind_ms, 3),
    }


def _piece_body(segment: Segment) -> Json:
    return {"text": segment.text, "origin": segment.origin.value, "source": segment.source}


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """Neighbours of one origin and source become one piece."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and segment.is_like(merged[-1]):
            segment = replace(segment, text=merged.pop().text + segment.text)
        merged.append(segment)
    return merged


def logprobs_body(plan: Plan, entries: Sequence[TokenEntry]) -> Json | None:
    """The entries in the endpoint's shape; None where no log-probabilities were asked for.

    Offsets of generated tokens count from the beginning of the choice's text, an echo included.
    """
    if plan.num_logprobs is None:
        return None
    if plan.endpoint is Endpoint.CHAT:
        return chat_logprobs(entries)
    return completion_logprobs(entries, len(plan.echo or ""))


def echo_logprobs_body(plan: Plan, entries: Sequence[TokenEntry]) -> Json | None:
    """The echoed prompt's tokens, with no more top ones than the generated tokens have."""
    if plan.num_logprobs is None:
        return None
    num_top = plan.num_logprobs
    return completion_logprobs([replace(entry, top=entry.top[:num_top]) for entry in entries])


def whole_body(
    plans: Sequence[Plan], created: int, rounds: Sequence[Sequence[RoundText]], usage: Usage
) -> Json:
    """The answer to a request that does not stream; `rounds` are each prompt's. Slow with
    log-probabilities of a long prompt or many tokens: then call it in a thread."""
    body = envelope(plans[0], created) | {"choices": [], "usage": usage_body(usage)}
    for plan, items in zip(plans, rounds, strict=True):
        _add_prompt(body, plan, items)
    return body


def _add_prompt(body: Json, plan: Plan, rounds: Sequence[RoundText]) -> None:
    """The choices of one prompt, behind those of the earlier ones."""
    by_choice: list[list[RoundText]] = [[] for _ in range(plan.request.n)]
    for item in rounds:
        by_choice[item.choice].append(item)
    scored = next((item.prompt_entries() for item in rounds if item.prompt_entries), ())
    choices = [_whole_choice(plan, items, scored) for items in by_choice]
    body["choices"] += choices
    if plan.num_prompt_logprobs is not None:
        # vLLM's places for it: every choice of a completion, the body of a chat.
        shown = prompt_logprobs(scored, plan.num_prompt_logprobs)
        for holder in choices if plan.endpoint is Endpoint.COMPLETIONS else [body]:
            holder["prompt_logprobs"] = shown
    if plan.include_rounds:
        report = body.setdefault("speculation", {"rounds": [], "pieces": []})
        for name, shown_rounds in speculation_body(plan, rounds).items():
            report[name] += shown_rounds


def _whole_choice(plan: Plan, rounds: Sequence[RoundText], scored: Sequence[TokenEntry]) -> Json:
    text = "".join(item.text for item in rounds)
    last = rounds[-1]
    choice: Json = {
        "index": plan.first_choice + last.choice,
        "logprobs": _whole_logprobs(plan, rounds, scored),
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
    }
    if plan.endpoint is Endpoint.CHAT:
        choice["message"] = _message(plan, rounds, text)
    else:
        choice["text"] = (plan.echo or "") + text
    return choice


def _message(plan: Plan, rounds: Sequence[RoundText], text: str) -> Json:
    message: Json = {"role": "assistant", "content": text, "refusal": None}
    if plan.output.is_plain:
        return message
    parts = [part for item in rounds for part in item.parts or ()]
    calls: list[Json] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append(call_body(plan, rounds[-1].choice, part))
        elif isinstance(part, CallArguments):
            calls[-1]["function"]["arguments"] += part.text
    content = "".join(part.text for part in parts if isinstance(part, Content))
    message["content"] = content or (None if calls else "")
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def call_body(plan: Plan, choice: int, call: CallBegin) -> Json:
    """A call whose arguments are still to come. Its id is the same however it is sent."""
    number = plan.request.request_id.rpartition("-")[2]
    return {
        "id": f"call_{number}_{choice}_{call.index}",
        "type": "function",
        "function": {"name": call.name, "arguments": ""},
    }


def part_delta(plan: Plan, choice: int, part: Part) -> Json:
    """What a stream says of one part of a choice's text."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, CallBegin):
        return {"tool_calls": [{"index": part.index, **call_body(plan, choice, part)}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _whole_logprobs(
    plan: Plan, rounds: Sequence[RoundText], scored: Sequence[TokenEntry]
) -> Json | None:
    generated = logprobs_body(plan, [entry for item in rounds for entry in item.entries])
    if plan.echo is None or generated is None:
        return generated
    echoed = echo_logprobs_body(plan, scored) or {}
    return {name: echoed[name] + generated[name] for name in generated}


def model_body(model: ServedModel, created: int) -> Json:
    """`max_model_len` as vLLM adds it: clients use it to size prompts. The last two are ours: what
    `speculation.method` may be, and why it may not be what is left."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "paceline",
        "root": model.parent or model.name,
        "parent": model.parent or None,
        "max_model_len": model.max_model_len,
        "speculation_methods": list(model.offer.methods),
        "refused_speculation_methods": {
            method: reason for method, reason in model.offer.reasons().items() if reason
        },
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
