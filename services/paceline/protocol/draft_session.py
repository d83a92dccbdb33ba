"""The draft's side of one sequence: a disposable copy of the committed tokens plus a lead.

It decides what to compute next, what to send and how far to rewind. It does not know models,
KV tensors, transports or time, and nothing here can change what the target commits.

Layout of `log`: `[committed | own proposals]`. `num_computed` counts the tokens whose KV the
engine holds for exactly these tokens; `sent_len` how far the target has been told.

In the rejection modes the target divides by the laws that proposals were drawn from, so each
keeps its own, every draw has noise of its own (`DraftWork.round`: a redraw from old noise would
know what the target saw), and what the target has looked at and rejected is never proposed again:
see `target_session` for the argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.protocol.messages import (
    REJECTION_MODES,
    DraftTokens,
    Nack,
    OpenSession,
    Verdict,
)
from paceline.protocol.token_log import TokenLog
from paceline.sampling.sparse_probs import SparseProbs

# Proposals of one message in the rejection modes: with 64 entries each they fit the smallest
# message that can be configured (64 KiB).
MAX_LAWS_PER_MESSAGE = 64

_EPOCH_MASK = (1 << 12) - 1
_DRAW_BITS = 20
_DRAW_MASK = (1 << _DRAW_BITS) - 1


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One sequence's share of a draft pass: append `token_ids` at `start`, then draw a token.

    `token_ids` is everything that the cache lacks, at least the last token of the text. At most
    `max_rows` of these rows may be computed (what a prefix cache holds is free); if they do not
    reach the end, nothing is drawn and the rest is asked for again. The drawn token has output
    index `output_index`. `context_hash` covers everything up to the end of `token_ids`. `round`
    (u32) keys the noise of the draw where it is the draft's own.
    """

    start: int
    token_ids: tuple[int, ...]
    max_rows: int
    output_index: int
    context_hash: int
    round: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows that the pass computes at most."""
        return min(self.max_rows, len(self.token_ids))


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What a pass made of a `DraftWork`.

    `token_id`: the drawn token, None if the rows did not reach the end. `cached_len`: tokens in
    the cache after the pass, None: all of them. `draft_probs`: the law that the token was drawn
    from (needed in the rejection modes, ignored in the others).
    """

    token_id: int | None
    cached_len: int | None = None
    draft_probs: SparseProbs | None = None


@dataclass(frozen=True, slots=True)
class Rewind:
    """Positions from `length` on were wrong; `num_dropped` own proposals are gone."""

    length: int
    num_dropped: int


class DraftSession:
    """One sequence opened by a target. `max_len` is the draft model's own context limit."""

    def __init__(self, opened: OpenSession, *, max_len: int) -> None:
        self.session_id = opened.session_id
        self.epoch = opened.epoch
        self.prompt_len = opened.prompt_len
        self.sampling = opened.sampling
        self.mode = opened.mode
        self.max_len = max_len
        self.log = TokenLog(opened.token_ids)
        self.committed_len = len(self.log)
        self.sent_len = len(self.log)
        self.limit_position = opened.limit_position
        self.last_round = 0
        self.num_computed = 0
        self._has_laws = opened.mode in REJECTION_MODES
        # The laws of the own proposals, one each; empty in the matching modes.
        self._probs: list[SparseProbs] = []
        self._num_draws = 0
        self._working: DraftWork | None = None
        self._is_draw_void = False
        self._draft_us = 0

    # -- computing --------------------------------------------------------------------------

    def can_draft(self) -> bool:
        """Whether a next token is wanted and may be computed now."""
        return self._working is None and len(self.log) < min(self.limit_position, self.max_len)

    def begin_work(self, max_rows: int) -> DraftWork:
        """The next pass: what the cache lacks, of which at most `max_rows` (>= 1) are computed."""
        if not self.can_draft() or max_rows < 1:
            raise LocalProtocolError("begin_work without can_draft")
        start = min(self.num_computed, len(self.log) - 1)
        self.num_computed = start
        self._is_draw_void = False
        self._working = DraftWork(
            start=start,
            token_ids=self.log.slice(start),
            max_rows=max_rows,
            output_index=len(self.log) - self.prompt_len,
            context_hash=self.log.hash_at(len(self.log)),
            round=self._next_round(),
        )
        return self._working

    def _next_round(self) -> int:
        """A key that no other draw of this sequence has, in this epoch or (in 4096) another.

        The draws of one epoch wrap after a million. The noise is keyed by output index as well,
        and no position is drawn that often.
        """
        draw, self._num_draws = self._num_draws, self._num_draws + 1
        return (self.epoch & _EPOCH_MASK) << _DRAW_BITS | draw & _DRAW_MASK

    def end_work(self, result: WorkResult, draft_us: int = 0) -> bool:
        """The pass is done; True when its token became a proposal.

        A verdict may have arrived meanwhile: then the cache is good only up to the first
        difference and a token sampled from another context is dropped. Raises
        `LocalProtocolError` for a result that does not fit the work: a bug of the engine.
        """
        work = self._working
        if work is None:
            raise LocalProtocolError("end_work without begin_work")
        cached_len = work.end if result.cached_len is None else result.cached_len
        self._check(work, result, cached_len)
        self._working = None
        self._draft_us += draft_us
        same_context = self._holds(work.end, work.context_hash)
        if same_context:
            self.num_computed = cached_len
        elif self.num_computed == work.start:  # else a rewind went below what we fed
            fed = work.token_ids[: cached_len - work.start]
            self.num_computed += self.log.common_len(work.start, fed)
        wanted = same_context and len(self.log) == work.end and not self._is_draw_void
        if result.token_id is None or not wanted or work.end >= self.limit_position:
            return False
        self.log.append(result.token_id)
        if self._has_laws and result.draft_probs is not None:
            self._probs.append(result.draft_probs)
        return True

    def _check(self, work: DraftWork, result: WorkResult, cached_len: int) -> None:
        if not work.start <= cached_len <= work.end:
            raise LocalProtocolError(
                f"{cached_len} tokens cached by rows [{work.start}, {work.end})"
            )
        if result.token_id is None:
            return
        if cached_len < work.end:
            raise LocalProtocolError("a token was drawn before the end of its context")
        probs = result.draft_probs
        if self._has_laws and (probs is None or probs.weight(result.token_id) == 0):
            raise LocalProtocolError(f"token {result.token_id} without a law it can come from")

    def cancel_work(self) -> None:
        """The pass failed; nothing of it is in the cache."""
        if self._working is not None:
            self.num_computed = min(self.num_computed, self._working.start)
            self._working = None

    def _holds(self, length: int, context_hash: int) -> bool:
        return length <= len(self.log) and self.log.hash_at(length) == context_hash

    # -- sending ----------------------------------------------------------------------------

    def take_draft(self, sent_us: int = 0) -> DraftTokens | None:
        """Proposals that the target has not been sent yet (the next of them, if they are many)."""
        if self.sent_len >= len(self.log):
            return None
        start, end = self.sent_len, len(self.log)
        if self._has_laws:
            end = min(end, start + MAX_LAWS_PER_MESSAGE)
        self.sent_len = end
        draft_us, self._draft_us = self._draft_us, 0
        return DraftTokens(
            session_id=self.session_id,
            epoch=self.epoch,
            start=start,
            context_hash=self.log.hash_at(start),
            token_ids=self.log.slice(start, end),
            last_round=self.last_round,
            draft_us=draft_us,
            sent_us=sent_us,
            draft_probs=tuple(self._probs[start - self.committed_len : end - self.committed_len]),
        )

    # -- receiving --------------------------------------------------------------------------

    def receive_verdict(self, verdict: Verdict) -> Rewind | Nack | None:
        """Committed positions are set; returns what follows from it, None when all agreed."""
        if verdict.epoch != self.epoch:
            return None
        if verdict.start > self.committed_len:
            return Nack(self.session_id, self.epoch, self.committed_len)
        end = verdict.start + len(verdict.token_ids)
        if end <= self.committed_len:
            return None  # a duplicate: positions are already set
        if self.log.common_len(verdict.start, verdict.token_ids) < (
            self.committed_len - verdict.start
        ):
            raise RemoteProtocolError("a verdict changes committed tokens")
        old_len = len(self.log)
        conflict = self.log.set_tokens(verdict.start, verdict.token_ids)
        if self._has_laws and verdict.has_rejection:
            self._is_draw_void = True  # of the pass that is under way, if one is
            if conflict is None and end < old_len:
                self.log.truncate(end)
                conflict = end
        del self._probs[: end - self.committed_len]
        self.committed_len = end
        del self._probs[len(self.log) - end :]
        self.limit_position = max(self.limit_position, verdict.limit_position)
        self.last_round = max(self.last_round, verdict.round)
        self.sent_len = max(self.sent_len, end)
        if conflict is None:
            return None
        self.sent_len = end
        self.num_computed = min(self.num_computed, conflict)
        return Rewind(length=conflict, num_dropped=old_len - conflict)

    def receive_nack(self, nack: Nack) -> None:
        """The target misses proposals from `have_len` on: send them again."""
        if nack.epoch == self.epoch and self.committed_len <= nack.have_len < self.sent_len:
            self.sent_len = nack.have_len
