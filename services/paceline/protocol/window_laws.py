"""Rejection modes at the target: the laws of the window's proposals, and what a rejection ends.

It does not know the window's tokens, epochs or verdicts: `target_session` does.

Why the output keeps the target's law (math.md 2a, 2d)
------------------------------------------------------
A round is exact when, given the committed text, each proposal it verifies is a draw from the law
stated for it (C1), whether it is verified does not depend on its value (C2), the target's own
noise is new (C3) and the length of the block does not depend on its values (B1). So a proposal
may be carried over to a later round only if no earlier round has looked at its value:

- A plain round, or one that accepts every proposal it verified, looked at no proposal behind
  them. Its last token y was drawn without them. If y differs from the proposal at its place, the
  context of all behind is gone and so are they. If it is equal, that depends on the value at y's
  place alone, and what lies behind is still a draw from its stated law. It stays, and the next
  block starts afresh with it (B3).
- A round that rejects has looked at the rejected proposal, and in block mode at every verified
  one behind it: their values are part of why it was rejected. In exact arithmetic the recovered
  token differs from the rejected one (where the residual has mass, acceptance is certain), and
  the context of all behind is gone. Rounding, and the fallback for laws equal up to rounding, can
  recover the very token that was rejected, and then contexts and hashes fit as if nothing had
  happened. Verified again, the values behind would be conditioned on their rejection (B2). No
  sampler is trusted with that: the window is cut at the committed tokens, whatever fits;
  messages that left before the draft knew of this round are STALE, whatever fits; and the draft,
  told by `Verdict.has_rejection`, drops the same and redraws with new noise. What it sends later
  carries a `last_round` that is new enough and nothing old: it dropped that before it took note
  of the round.

Branches for likely corrections (`alternates`) have no place in these modes: which of them is
adopted would depend on the values that a round has looked at.
"""

from __future__ import annotations

from paceline.errors import RemoteProtocolError
from paceline.protocol.messages import REJECTION_MODES, DraftTokens
from paceline.sampling.acceptance import verifiable_len
from paceline.sampling.params import VerificationMode
from paceline.sampling.sparse_probs import SparseProbs


class WindowLaws:
    """Of one sequence; in the matching modes there are none, and nothing is cut."""

    def __init__(self, mode: VerificationMode) -> None:
        self._mode = mode
        self.are_used = mode in REJECTION_MODES
        # One for each proposal in the window.
        self.probs: list[SparseProbs] = []
        # Newest round that rejected a proposal, and the committed length after it.
        self._rejection_round = 0
        self._rejection_len = 0

    def check(self, draft: DraftTokens) -> None:
        """Raises `RemoteProtocolError` when its laws are not one for each proposal."""
        if len(draft.draft_probs) != (len(draft.token_ids) if self.are_used else 0):
            raise RemoteProtocolError(
                f"{len(draft.draft_probs)} laws for {len(draft.token_ids)} proposals in mode"
                f" {self._mode}"
            )

    def is_stale(self, seen_round: int) -> bool:
        """Whether what a draft sent that had seen so much may rest on a rejection."""
        return self.are_used and seen_round < self._rejection_round

    def is_unheard(self, told_len: int) -> bool:
        """Whether a draft that knows so many tokens has yet to hear of the newest rejection."""
        return told_len < self._rejection_len

    def add(self, draft: DraftTokens, held: int) -> int:
        """Take the laws of its proposals but for the first `held`; returns how many proposals
        count. The block from a lie on is as if never sent; what is before it counts, since to
        drop it for what follows it would let values decide (C2)."""
        if not self.are_used:
            return len(draft.token_ids)
        stop = verifiable_len(draft.token_ids, draft.draft_probs)
        self.probs.extend(draft.draft_probs[held:stop])
        return stop

    def reject(self, round_: int, committed_len: int) -> bool:
        """A round has rejected a proposal; True when the window must be cut, whatever fits."""
        self._rejection_round, self._rejection_len = round_, committed_len
        return self.are_used

    def move(self, num_committed: int, window_len: int) -> None:
        """So many tokens more are committed, and so many proposals left."""
        del self.probs[:num_committed]
        del self.probs[window_len:]
