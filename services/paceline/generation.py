"""What a gateway and a target say to each other: one request, then one delta per round.

Frozen values without behaviour; they cross a Serve handle, pickled by name, so that gateways and
targets of two releases understand each other. They know no HTTP field, no text, no tensor and no
draft link.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from paceline.by_name import by_name
from paceline.methods import ProposalSource, SpeculationMethod
from paceline.sampling.params import SamplingParams, VerificationMode

FinishReason = Literal["stop", "length"]


@by_name
@dataclass(frozen=True, slots=True)
class SpeculationRequest:
    """What one request asks of speculation; None leaves the deployment's own choice.

    `method`: where proposals come from (`paceline.methods`).
    `max_tokens` caps the draft tokens verified per round (0 = none are). `lookahead` "fixed" asks
    for exactly `max_tokens` (or the deployment's K) where the ceiling allows it. A `mode` is only
    ever one that fits the request's temperature (greedy at 0, one of the others above): the
    gateway refuses the rest.
    """

    method: SpeculationMethod | None = None
    max_tokens: int | None = None
    mode: VerificationMode | None = None
    lookahead: Literal["adaptive", "fixed"] | None = None


@by_name
@dataclass(frozen=True, slots=True)
class Resumption:
    """What a request's client has already got from a target that was lost.

    `outputs[i]` are the output tokens of choice i so far, None when that choice has ended and is
    not to be run. The target goes on behind them: the next tokens are those that the lost one
    would have written (greedy, coupled), or follow the same law with new noise (rejection modes).
    `attempt` >= 1 counts the tries before this one.
    Invariant: len(outputs) == n, not all are None, and each is shorter than max_tokens.
    """

    attempt: int
    outputs: tuple[tuple[int, ...] | None, ...]


@by_name
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and `n` sequences to generate from it.

    `max_tokens` >= 1 counts every generated token of one sequence, an EOS included.
    `stop_token_ids` are the client's; EOS ids are added by the target, which knows its model
    (unless `ignore_eos`), and so is `sampling.stop_token_ids`, what `min_tokens` holds back.
    Choice i of n uses `sampling` with `choice` = i. `num_logprobs`: None for none, else every
    generated token gets its log-probability and those of so many most likely tokens;
    `num_prompt_logprobs` the same for the prompt's tokens.
    `resumption`: go on where another target was lost; None starts from the prompt.
    `cache_salt` (u64): only requests with the same salt share KV blocks in the prefix cache.
    `adapter`: the LoRA adapter of the target's model to apply; empty: the model itself.
    `traceparent`: W3C trace context of the client's request, empty without one; for traces only.
    `answer_id`: what the client calls the answer that this is a part of (`id` in the body); empty
    for none, and for log lines only. `first_choice`: which of that answer's choices this prompt's
    first one is, for traces only: `choice` in deltas and in `sampling` counts from 0 regardless.
    `http_request_id`: what the client's side calls the request (x-request-id), for log lines only:
    unlike `request_id` it need not be unique.
    `is_background`: no client waits for it. A target takes it only if it can start at once, and
    ends it (429, `no_place`) as soon as another request has to wait.
    Invariant: len(prompt_token_ids) >= 1 and prompt + max_tokens fits the target's context.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    speculation: SpeculationRequest = SpeculationRequest()
    ignore_eos: bool = False
    n: int = 1
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    resumption: Resumption | None = None
    cache_salt: int = 0
    adapter: str = ""
    traceparent: str = ""
    http_request_id: str = ""
    is_background: bool = False
    answer_id: str = ""
    first_choice: int = 0

    @property
    def trace_id(self) -> str:
        """Of the traceparent; empty without one."""
        return self.traceparent[3:35]


@by_name
@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token under the model's own law: softmax of the target's raw logits over all ids that
    the tokenizer has, before any processor (vLLM's `raw_logprobs`).

    `rank` is 1 + the number of ids with a larger logit. `top` are (token id, logprob) of the most
    likely ids in descending order, ties by lowest id; it need not contain `token_id`.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenOrigin(StrEnum):
    """Why a committed token is what it is."""

    ACCEPTED = "accepted"  # proposed by a draft, kept by the target
    RECOVERED = "recovered"  # the target's own, in place of the first rejected proposal
    BONUS = "bonus"  # the target's own, after every proposal was kept
    PLAIN = "plain"  # the target's own, nothing was proposed in that round


@by_name
@dataclass(frozen=True, slots=True)
class RoundDelta:
    """One verification pass of one sequence: what it committed and where the time went.

    `choice` says which of the request's n sequences. `logprobs` has one entry per token, or is
    empty when none were asked for. `prompt_logprobs` (first delta of choice 0 only) has an entry
    for every prompt token but the first, which has no law. `num_cached_tokens` (first delta of a
    choice): prompt tokens whose KV was found in the prefix cache. `source`: what made the round's
    proposals.

    Invariants: `token_ids` and `origins` are equally long; num_accepted_tokens <=
    num_draft_tokens <= num_speculative_tokens. `token_ids` ends at the EOS or at max_tokens, and
    then `finish_reason` is set; it is set in exactly one delta of a choice, its last. An EOS that
    ended the sequence is in `token_ids` (it counts as usage; the gateway writes no text for it).
    `num_draft_tokens` were proposed *and* verified; `num_speculative_tokens` is the cap (K) in
    force. A round lasts from the end of the round before (the first: from when the target got the
    request) to the end of its pass: `wall_ms`. Each instant of it is in one of the eight others
    (see `round_times`), so they add up; 0 when the stage did not happen or was hidden by a later.
    """

    round: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_speculative_tokens: int = 0
    wall_ms: float = 0.0
    draft_ms: float = 0.0
    wire_out_ms: float = 0.0
    window_ms: float = 0.0
    queue_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    wire_back_ms: float = 0.0
    rewind_ms: float = 0.0
    finish_reason: FinishReason | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    source: ProposalSource = ""
