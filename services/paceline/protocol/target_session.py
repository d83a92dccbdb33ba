"""The target's side of one sequence: committed tokens, the window of proposals, the verdicts.

Decides everything about tokens; does no I/O. It does not know text, KV caches, other sequences,
threads, transports or time. Fallback is not a mode: with an empty window `begin_verify` returns
`()` and the pass is a plain decode step.

Layout of `log`: `[prompt | committed output | window]`; `committed_len` ends the second part.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.generation import FinishReason, TokenOrigin
from paceline.protocol.link import LinkEvent, LinkState, next_state
from paceline.protocol.messages import (
    DraftTokens,
    Opened,
    OpenSession,
    OpenStatus,
    Verdict,
)
from paceline.protocol.token_log import TokenLog
from paceline.sampling.acceptance import Acceptance
from paceline.sampling.params import SamplingParams, VerificationMode

MAX_POSITION = 2**31 - 1


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
    """One sequence. `max_tokens` >= 1 counts output; `max_len` bounds prompt + output."""

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
        self.max_draft_ahead = max_draft_ahead
        self.log = TokenLog(prompt_token_ids)
        # Invariant: prompt_len <= committed_len <= len(log) <= granted_limit or committed_len.
        self.committed_len = self.prompt_len
        self.link = LinkState.LOST
        self.epoch = 0
        self.round = 0
        self.finish_reason: FinishReason | None = None
        # The draft may only speak about positions from here on (length at the last open).
        self._open_len = self.prompt_len
        # Largest limit ever granted in this epoch: a credit is never taken back.
        self._granted_limit = 0
        self._draft_max_len = MAX_POSITION
        # Newest round after which proposals in flight may rest on tokens we did not commit.
        self._flush_round = 0
        # Round at the last open: whatever a draft says in this epoch, it has seen that much.
        self._open_round = 0
        self._verifying: tuple[int, ...] | None = None

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
    def is_flushed(self) -> bool:
        """Whether the draft must hear our last verdict before its proposals can fit."""
        return self._flush_round == self.round

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
        self.log.truncate(self.committed_len)
        self._open_len = self.committed_len
        self._flush_round = self._open_round = self.round
        self._granted_limit = self.limit_position
        return OpenSession(
            session_id=self.session_id,
            epoch=self.epoch,
            prompt_len=self.prompt_len,
            token_ids=self.log.slice(0, self.committed_len),
            sampling=self.sampling,
            mode=self.mode,
            limit_position=self._granted_limit,
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
        self.log.truncate(self.committed_len)

    # -- proposals --------------------------------------------------------------------------

    def receive_draft(self, draft: DraftTokens) -> Disposition:
        """Take proposals into the window.

        Raises `RemoteProtocolError` when the draft breaks a rule (speaks about tokens it was
        opened with, or beyond its credit); the caller quarantines this session on that draft.
        """
        if draft.epoch != self.epoch or not self.is_attached:
            return Disposition.STALE_EPOCH
        if draft.start < self._open_len:
            raise RemoteProtocolError(f"draft at {draft.start}, opened at {self._open_len}")
        if draft.start + len(draft.token_ids) > self._granted_limit:
            raise RemoteProtocolError(f"draft beyond its limit {self._granted_limit}")
        if draft.start > len(self.log):
            seen = max(draft.last_round, self._open_round) >= self._flush_round
            return Disposition.GAP if seen else Disposition.STALE
        if draft.context_hash != self.log.hash_at(draft.start):
            return Disposition.DIVERGED
        held = min(len(draft.token_ids), len(self.log) - draft.start)
        if self.log.common_len(draft.start, draft.token_ids) < held:
            return Disposition.DIVERGED
        if held == len(draft.token_ids):
            return Disposition.DUPLICATE
        self.log.extend(draft.token_ids[held:])
        return Disposition.KEPT

    def receive_nack(self, have_len: int) -> Verdict | None:
        """The draft misses commits: repeat them from `have_len` on (None: nothing to repeat)."""
        if not self._open_len <= have_len:
            raise RemoteProtocolError(f"nack at {have_len}, opened at {self._open_len}")
        if not self.is_attached or have_len >= self.committed_len:
            return None
        return self._verdict(have_len, self.log.slice(have_len, self.committed_len), 0)

    # -- verification -----------------------------------------------------------------------

    def begin_verify(self, limit: int) -> tuple[int, ...]:
        """Proposals for this pass, at most `limit`; () is a plain decode step."""
        if self._verifying is not None or self.is_finished:
            raise LocalProtocolError("begin_verify while verifying or after the end")
        room = self.end_len - self.committed_len - 1
        count = max(0, min(limit, self.window_len, room))
        self._verifying = self.log.slice(self.committed_len, self.committed_len + count)
        return self._verifying

    def end_verify(self, acceptance: Acceptance) -> Step:
        """Commit accepted proposals and the target's own next token, cut at EOS and at the end."""
        verified = self._verifying
        if verified is None:
            raise LocalProtocolError("end_verify without begin_verify")
        self._verifying = None
        accepted = acceptance.num_accepted_tokens
        if not 0 <= accepted <= len(verified):
            raise LocalProtocolError(f"accepted {accepted} of {len(verified)}")
        start = self.committed_len
        token_ids = self._cut((*verified[:accepted], acceptance.next_token_id))
        last = _last_origin(accepted, len(verified))
        origins = (*(TokenOrigin.ACCEPTED,) * accepted, last)[: len(token_ids)]
        self._commit(token_ids)
        num_accepted = min(accepted, len(token_ids))
        delta = TokenDelta(
            round=self.round,
            token_ids=token_ids,
            origins=origins,
            num_draft_tokens=len(verified),
            num_accepted_tokens=num_accepted,
            finish_reason=self.finish_reason,
        )
        verdict = self._verdict(start, token_ids, num_accepted) if self.is_attached else None
        return Step(delta, verdict)

    def cancel_verify(self) -> None:
        """The pass did not happen (the engine failed or the request ended meanwhile)."""
        self._verifying = None

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

    def _commit(self, token_ids: tuple[int, ...]) -> None:
        end = self.committed_len + len(token_ids)
        beyond_window = end > len(self.log)
        conflict = self.log.set_tokens(self.committed_len, token_ids)
        self.committed_len = end
        self.round += 1
        if beyond_window or conflict is not None:
            self._flush_round = self.round

    def _verdict(self, start: int, token_ids: tuple[int, ...], num_accepted: int) -> Verdict:
        self._granted_limit = max(self._granted_limit, self.limit_position)
        return Verdict(
            session_id=self.session_id,
            epoch=self.epoch,
            start=start,
            token_ids=token_ids,
            num_accepted_tokens=num_accepted,
            limit_position=self._granted_limit,
            round=self.round,
        )


def _last_origin(accepted: int, verified: int) -> TokenOrigin:
    if verified == 0:
        return TokenOrigin.PLAIN
    return TokenOrigin.BONUS if accepted == verified else TokenOrigin.RECOVERED
