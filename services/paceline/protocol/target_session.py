"""The target's side of one sequence: committed tokens, the window of proposals, the verdicts.

Decides everything about tokens; does no I/O. It does not know text, KV caches, other sequences,
threads, transports or time. Fallback is not a mode: with an empty window `begin_verify` returns
`()` and the pass is a plain decode step.

Layout of `log`: `[prompt | committed output | window]`; `committed_len` ends the second part.

Rejection modes: why the output keeps the target's law (math.md 2a, 2d)
-----------------------------------------------------------------------
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
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.generation import FinishReason, TokenOrigin
from paceline.protocol.link import LinkEvent, LinkState, next_state
from paceline.protocol.messages import (
    REJECTION_MODES,
    DraftTokens,
    Opened,
    OpenSession,
    OpenStatus,
    Verdict,
)
from paceline.protocol.token_log import TokenLog
from paceline.sampling.acceptance import Acceptance, verifiable_len
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

MAX_POSITION = 2**31 - 1
MAX_UNTOLD = 32  # tokens that a draft which rests may lag behind


class Disposition(StrEnum):
    """What became of a `DraftTokens` message; everything but KEPT changed nothing."""

    KEPT = "kept"
    DUPLICATE = "duplicate"  # all of it was held already
    GAP = "gap"  # something before it is missing: answer with a Nack
    STALE = "stale"  # sent before the draft had seen our last correction
    DIVERGED = "diverged"  # made from other tokens than ours
    STALE_EPOCH = "stale_epoch"  # from a replaced draft


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one pass committed. `finish_reason` is "stop" (EOS), "length" or None."""

    round: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Step:
    """What `end_verify` asks of the driver: deliver `delta`, send `verdict` if there is one."""

    delta: TokenDelta
    verdict: Verdict | None


class TargetSession:
    """One sequence. `max_tokens` >= 1 counts output; `max_len` bounds prompt + output.

    `log`, if given, holds exactly the prompt and is taken over: hashing takes time.
    `output_token_ids` are output that was committed elsewhere: it goes on behind them.
    """

    def __init__(
        self,
        session_id: int,
        prompt_token_ids: tuple[int, ...],
        *,
        sampling: SamplingParams,
        mode: VerificationMode,
        max_tokens: int,
        max_len: int,
        stop_token_ids: frozenset[int] = frozenset(),
        max_draft_ahead: int = 16,
        log: TokenLog | None = None,
        output_token_ids: tuple[int, ...] = (),
    ) -> None:
        if not prompt_token_ids:
            raise LocalProtocolError("a sequence needs at least one prompt token")
        if max_tokens < 1 or len(prompt_token_ids) >= max_len:
            raise LocalProtocolError("no room for a single output token")
        self.session_id = session_id
        self.prompt_len = len(prompt_token_ids)
        self.sampling = sampling
        self.mode = mode
        self.end_len = min(self.prompt_len + max_tokens, max_len)
        self.stop_token_ids = stop_token_ids
        # How far the draft may run from the next open or verdict on; 0: it rests.
        self.max_draft_ahead = max_draft_ahead
        self.fan_out = 0  # the one to tell the draft next
        self.log = TokenLog(prompt_token_ids) if log is None else log
        self.log.extend(output_token_ids)
        # Invariant: prompt_len <= committed_len <= len(log) <= granted_limit or committed_len.
        self.committed_len = self.prompt_len + len(output_token_ids)
        if self.committed_len >= self.end_len:
            raise LocalProtocolError("the output has ended: there is nothing to go on with")
        self.link = LinkState.LOST
        self.epoch = 0
        self.round = 0
        self.finish_reason: FinishReason | None = None
        # The draft may only speak about positions from here on (length at the last open).
        self._open_len = self.committed_len
        # What the draft has been told of. Invariant while attached: <= committed_len.
        self._told_len = self.committed_len
        # Largest limit ever granted in this epoch: a credit is never taken back.
        self._granted_limit = 0
        self._draft_max_len = MAX_POSITION
        # Newest round after which proposals in flight may rest on tokens we did not commit.
        self._flush_round = 0
        # Round at the last open: whatever a draft says in this epoch, it has seen that much.
        self._open_round = 0
        # Newest round that rejected a proposal, and the committed length after it.
        self._rejection_round = 0
        self._rejection_len = 0
        self._has_laws = mode in REJECTION_MODES
        # The laws of the window's proposals, one each; empty in the matching modes.
        self._window_probs: list[SparseProbs] = []
        self._verifying: tuple[int, ...] | None = None
        self._verifying_probs: tuple[SparseProbs, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        return self.committed_len - self.prompt_len

    @property
    def window_len(self) -> int:
        """Proposals held beyond the committed tokens."""
        return len(self.log) - self.committed_len

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_attached(self) -> bool:
        """Whether a draft is told about commits (it may not have answered yet)."""
        return self.link in (LinkState.OPENING, LinkState.STREAMING)

    @property
    def has_draft_room(self) -> bool:
        """Whether the draft's own context reaches beyond the committed tokens."""
        return self.committed_len < self._draft_max_len

    @property
    def is_flushed(self) -> bool:
        """Whether the draft must hear our last verdict before its proposals can fit."""
        return self._flush_round == self.round

    @property
    def verifying_probs(self) -> tuple[SparseProbs, ...]:
        """The laws of the proposals that `begin_verify` returned; () in the matching modes."""
        return self._verifying_probs

    @property
    def limit_position(self) -> int:
        """No proposal at or beyond it: the last output token is always the target's own."""
        return min(self.committed_len + self.max_draft_ahead, self.end_len - 1, self._draft_max_len)

    # -- the link ---------------------------------------------------------------------------

    def reopen(self, draft_max_len: int = MAX_POSITION) -> OpenSession:
        """Hand the sequence to a (new) draft: the epoch rises, the window is emptied.

        `draft_max_len` is that draft's own context limit: no credit goes beyond it.
        """
        self._draft_max_len = draft_max_len
        self.link = next_state(self.link, LinkEvent.REOPEN)
        self.epoch += 1
        self.empty_window()
        self._open_len = self.committed_len
        self._flush_round = self._open_round = self.round
        self._granted_limit = self.limit_position
        self._told_len = self.committed_len
        return OpenSession(
            session_id=self.session_id,
            epoch=self.epoch,
            prompt_len=self.prompt_len,
            token_ids=self.log.slice(0, self.committed_len),
            sampling=self.sampling,
            mode=self.mode,
            limit_position=self._granted_limit,
            fan_out=self.fan_out,
        )

    def receive_opened(self, opened: Opened) -> bool:
        """False when the answer is stale (another epoch, or not waited for)."""
        if opened.epoch != self.epoch or self.link is not LinkState.OPENING:
            return False
        accepted = opened.status is OpenStatus.OK
        event = LinkEvent.ACCEPTED if accepted else LinkEvent.REFUSED
        self.link = next_state(self.link, event)
        return True

    def lose_draft(self, event: LinkEvent = LinkEvent.PEER_LOST) -> None:
        """The draft is gone. Proposals already here stay: they are as good as before."""
        self.link = next_state(self.link, event)

    def close(self) -> None:
        if self.link is not LinkState.CLOSED:
            self.link = next_state(self.link, LinkEvent.CLOSE)
        self.empty_window()

    def empty_window(self) -> None:
        """Forget the proposals, whatever they are: no law depends on that (C2)."""
        self.log.truncate(self.committed_len)
        self._window_probs.clear()

    # -- proposals --------------------------------------------------------------------------

    def receive_draft(self, draft: DraftTokens) -> Disposition:
        """Take proposals into the window.

        Raises `RemoteProtocolError` when the draft breaks a rule (speaks about tokens it was
        opened with, or beyond its credit, or states laws that do not fit its proposals); the
        caller quarantines this session on that draft.
        """
        if draft.epoch != self.epoch or not self.is_attached:
            return Disposition.STALE_EPOCH
        if draft.start < self._open_len:
            raise RemoteProtocolError(f"draft at {draft.start}, opened at {self._open_len}")
        if draft.start + len(draft.token_ids) > self._granted_limit:
            raise RemoteProtocolError(f"draft beyond its limit {self._granted_limit}")
        if len(draft.draft_probs) != (len(draft.token_ids) if self._has_laws else 0):
            raise RemoteProtocolError(
                f"{len(draft.draft_probs)} laws for {len(draft.token_ids)} proposals in mode"
                f" {self.mode}"
            )
        seen_round = max(draft.last_round, self._open_round)
        if self._has_laws and seen_round < self._rejection_round:
            return Disposition.STALE
        if draft.start > len(self.log):
            return Disposition.GAP if seen_round >= self._flush_round else Disposition.STALE
        if draft.context_hash != self.log.hash_at(draft.start):
            return Disposition.DIVERGED
        held = min(len(draft.token_ids), len(self.log) - draft.start)
        if self.log.common_len(draft.start, draft.token_ids) < held:
            return Disposition.DIVERGED
        if held == len(draft.token_ids):
            return Disposition.DUPLICATE
        self._extend_window(draft, held)
        return Disposition.KEPT

    def _extend_window(self, draft: DraftTokens, held: int) -> None:
        stop = len(draft.token_ids)
        if self._has_laws:
            # The block from a lie on is as if never sent; what is before it counts, since to
            # drop it for what follows it would let values decide (C2).
            stop = verifiable_len(draft.token_ids, draft.draft_probs)
            self._window_probs.extend(draft.draft_probs[held:stop])
        self.log.extend(draft.token_ids[held:stop])
        if stop < len(draft.token_ids):
            raise RemoteProtocolError(f"token {draft.token_ids[stop]} has no mass in its own law")

    def receive_nack(self, have_len: int) -> Verdict | None:
        """The draft misses commits: repeat them from `have_len` on (None: nothing to repeat)."""
        if not self._open_len <= have_len:
            raise RemoteProtocolError(f"nack at {have_len}, opened at {self._open_len}")
        if not self.is_attached or have_len >= self.committed_len:
            return None
        # A draft that missed a rejection must not miss its consequence.
        return self._verdict(
            have_len,
            self.log.slice(have_len, self.committed_len),
            num_accepted=0,
            has_rejection=have_len < self._rejection_len,
        )

    # -- verification -----------------------------------------------------------------------

    def begin_verify(self, limit: int) -> tuple[int, ...]:
        """Proposals for this pass, at most `limit`; () is a plain decode step.

        In the rejection modes `limit` must not depend on what the proposals are (B1), and
        `verifying_probs` has their laws.
        """
        if self._verifying is not None or self.is_finished:
            raise LocalProtocolError("begin_verify while verifying or after the end")
        room = self.end_len - self.committed_len - 1
        count = max(0, min(limit, self.window_len, room))
        self._verifying = self.log.slice(self.committed_len, self.committed_len + count)
        self._verifying_probs = tuple(self._window_probs[:count])
        return self._verifying

    def end_verify(self, acceptance: Acceptance) -> Step:
        """Commit accepted proposals and the target's own next token, cut at EOS and at the end."""
        verified = self._verifying
        if verified is None:
            raise LocalProtocolError("end_verify without begin_verify")
        self.cancel_verify()  # from here on no pass is open
        accepted = acceptance.num_accepted_tokens
        if not 0 <= accepted <= len(verified):
            raise LocalProtocolError(f"accepted {accepted} of {len(verified)}")
        start = self.committed_len
        token_ids = self._cut((*verified[:accepted], acceptance.next_token_id))
        last = _last_origin(accepted, len(verified))
        origins = (*(TokenOrigin.ACCEPTED,) * accepted, last)[: len(token_ids)]
        has_rejection = accepted < len(verified)
        self._commit(token_ids, has_rejection)
        num_accepted = min(accepted, len(token_ids))
        delta = TokenDelta(
            round=self.round,
            token_ids=token_ids,
            origins=origins,
            num_draft_tokens=len(verified),
            num_accepted_tokens=num_accepted,
            finish_reason=self.finish_reason,
        )
        return Step(delta, self._due_verdict(start, num_accepted))

    def _due_verdict(self, start: int, num_accepted: int) -> Verdict | None:
        """Everything that the draft has not been told. One that rests is told now and then: it
        could do nothing with it, and must not believe that it is forgotten."""
        num_untold = self.committed_len - self._told_len
        if not self.is_attached or (self.max_draft_ahead == 0 and num_untold < MAX_UNTOLD):
            return None
        told_len, self._told_len = self._told_len, self.committed_len
        return self._verdict(
            told_len,
            self.log.slice(told_len, self.committed_len),
            num_accepted if told_len == start else 0,
            has_rejection=told_len < self._rejection_len,
        )

    def cancel_verify(self) -> None:
        """The pass did not happen (the engine failed or the request ended meanwhile)."""
        self._verifying, self._verifying_probs = None, ()

    def _cut(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The part to commit; the earliest end in the block wins, EOS before length."""
        room = self.end_len - self.committed_len
        for index, token_id in enumerate(token_ids[:room]):
            if token_id in self.stop_token_ids:
                self.finish_reason = "stop"
                return token_ids[: index + 1]
        if len(token_ids) >= room:
            self.finish_reason = "length"
        return token_ids[:room]

    def _commit(self, token_ids: tuple[int, ...], has_rejection: bool) -> None:
        end = self.committed_len + len(token_ids)
        must_hear = end > len(self.log)
        conflict = self.log.set_tokens(self.committed_len, token_ids)
        self.committed_len = end
        self.round += 1
        if has_rejection:
            self._rejection_round, self._rejection_len = self.round, end
            if self._has_laws:
                self.log.truncate(end)
                must_hear = True
        del self._window_probs[: len(token_ids)]
        del self._window_probs[self.window_len :]
        if must_hear or conflict is not None:
            self._flush_round = self.round

    def _verdict(
        self, start: int, token_ids: tuple[int, ...], num_accepted: int, has_rejection: bool
    ) -> Verdict:
        self._granted_limit = max(self._granted_limit, self.limit_position)
        return Verdict(
            session_id=self.session_id,
            epoch=self.epoch,
            start=start,
            token_ids=token_ids,
            num_accepted_tokens=num_accepted,
            limit_position=self._granted_limit,
            round=self.round,
            has_rejection=has_rejection,
            fan_out=self.fan_out,
        )


def _last_origin(accepted: int, verified: int) -> TokenOrigin:
    if verified == 0:
        return TokenOrigin.PLAIN
    return TokenOrigin.BONUS if accepted == verified else TokenOrigin.RECOVERED
