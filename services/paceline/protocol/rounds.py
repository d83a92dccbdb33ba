"""What a target's session answers: to a message of the draft, and to a pass. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.generation import FinishReason, TokenOrigin
from paceline.protocol.messages import Verdict


class Disposition(StrEnum):
    """What became of a `DraftTokens` message; but for KEPT and ALTERNATE it changed nothing.

    One of a branch is never a GAP and never DIVERGED: that it fits nothing yet is its nature.
    """

    KEPT = "kept"
    ALTERNATE = "alternate"  # of a branch, held beside the window: the target may yet go there
    DUPLICATE = "duplicate"  # all of it was held already
    GAP = "gap"  # something before it is missing: answer with a Nack
    STALE = "stale"  # sent before the draft had seen our last correction, or a branch not taken
    DIVERGED = "diverged"  # made from other tokens than ours
    STALE_EPOCH = "stale_epoch"  # from a replaced draft


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one pass committed. `finish_reason` is "stop" (EOS), "length" or None. `is_local`: the
    proposals were not the draft's."""

    round: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    finish_reason: FinishReason | None
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What `end_verify` asks of the driver: deliver `delta`, send `verdict` if there is one."""

    delta: TokenDelta
    verdict: Verdict | None


def token_origins(num_accepted: int, num_verified: int) -> tuple[TokenOrigin, ...]:
    """Of the accepted proposals and of the target's own token behind them."""
    if num_verified == 0:
        return (TokenOrigin.PLAIN,)
    is_full = num_accepted == num_verified
    last = TokenOrigin.BONUS if is_full else TokenOrigin.RECOVERED
    return (*(TokenOrigin.ACCEPTED,) * num_accepted, last)
