"""What a gateway and a target say to each other: one request, then one delta per round.

Frozen, picklable values without behaviour; they cross a Serve handle. They know no HTTP field,
no text, no tensor and no draft link.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from paceline.sampling.params import SamplingParams, VerificationMode

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SpeculationRequest:
    """What one request asks of speculation; None leaves the deployment's own choice.

    `max_tokens` caps the draft tokens verified per round (0 = none are). A `mode` is only ever
    one that fits the request's temperature: the gateway refuses the others.
    """

    method: Literal["model", "off"] = "model"
    max_tokens: int | None = None
    mode: VerificationMode | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate.

    `max_tokens` >= 1 counts every generated token, an EOS included. `stop_token_ids` (EOS ids)
    are added by the target, which knows its model; the gateway sends the ones that it knows.
    Invariant: len(prompt_token_ids) >= 1 and prompt + max_tokens fits the target's context.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    speculation: SpeculationRequest = SpeculationRequest()
    ignore_eos: bool = False


class TokenOrigin(StrEnum):
    """Why a committed token is what it is."""

    ACCEPTED = "accepted"  # proposed by a draft, kept by the target
    RECOVERED = "recovered"  # the target's own, in place of the first rejected proposal
    BONUS = "bonus"  # the target's own, after every proposal was kept
    PLAIN = "plain"  # the target's own, nothing was proposed in that round


@dataclass(frozen=True, slots=True)
class RoundDelta:
    """One verification pass of one sequence: what it committed and where the time went.

    Invariants: `token_ids` and `origins` are equally long; num_accepted_tokens <=
    num_draft_tokens <= num_speculative_tokens. `token_ids` ends at the EOS or at max_tokens, and
    then `finish_reason` is set; it is set in exactly one delta, the last. An EOS that ended the
    sequence is in `token_ids` (it counts as usage; the gateway writes no text for it).
    `num_draft_tokens` were proposed *and* verified; `num_speculative_tokens` is the cap (K) in
    force. Times are milliseconds of this round, 0 when the stage did not happen.
    """

    round: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_speculative_tokens: int = 0
    draft_ms: float = 0.0
    wire_ms: float = 0.0
    queue_ms: float = 0.0
    verify_ms: float = 0.0
    finish_reason: FinishReason | None = None
