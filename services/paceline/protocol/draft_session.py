"""The draft's side of one sequence: a disposable copy of the committed tokens plus a lead.

It decides what to compute next, what to send and how far to rewind. It does not know models,
KV tensors, transports or time, and nothing here can change what the target commits.

Layout of `log`: `[committed | own proposals]`. `num_computed` counts the tokens whose KV the
engine holds for exactly these tokens; `sent_len` how far the target has been told.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.protocol.messages import DraftTokens, Nack, OpenSession, Verdict
from paceline.protocol.token_log import TokenLog


@dataclass(frozen=True, slots=True)
class DraftWork:
    """One sequence's rows of a draft pass: append `token_ids` at `start`.

    `is_sampled`: the last row yields the proposal with output index `output_index`; otherwise
    this is a prefill chunk. `context_hash` covers everything up to the end of `token_ids`.
    """

    start: int
    token_ids: tuple[int, ...]
    is_sampled: bool
    output_index: int
    context_hash: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


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
        self._working: DraftWork | None = None
        self._draft_us = 0

    # -- computing --------------------------------------------------------------------------

    def can_draft(self) -> bool:
        """Whether a next token is wanted and may be computed now."""
        return self._working is None and len(self.log) < min(self.limit_position, self.max_len)

    def begin_work(self, max_rows: int) -> DraftWork:
        """Rows for the next pass: what the cache lacks, at most `max_rows` (>= 1) of it."""
        if not self.can_draft() or max_rows < 1:
            raise LocalProtocolError("begin_work without can_draft")
        start = min(self.num_computed, len(self.log) - 1)
        end = min(len(self.log), start + max_rows)
        self.num_computed = start
        self._working = DraftWork(
            start=start,
            token_ids=self.log.slice(start, end),
            is_sampled=end == len(self.log),
            output_index=max(0, end - self.prompt_len),  # a chunk inside the prompt has none
            context_hash=self.log.hash_at(end),
        )
        return self._working

    def end_work(self, token_id: int | None, draft_us: int = 0) -> bool:
        """The pass is done; True when `token_id` became a proposal.

        A verdict may have arrived meanwhile: then the cache is good only up to the first
        difference and a token sampled from another context is dropped.
        """
        work = self._working
        if work is None:
            raise LocalProtocolError("end_work without begin_work")
        self._working = None
        self._draft_us += draft_us
        same_context = self._holds(work.end, work.context_hash)
        if same_context:
            self.num_computed = work.end
        elif self.num_computed == work.start:  # else a rewind went below what we fed
            self.num_computed += self.log.common_len(work.start, work.token_ids)
        wanted = same_context and work.is_sampled and len(self.log) == work.end
        if token_id is None or not wanted or work.end >= self.limit_position:
            return False
        self.log.append(token_id)
        return True

    def cancel_work(self) -> None:
        """The pass failed; nothing of it is in the cache."""
        if self._working is not None:
            self.num_computed = min(self.num_computed, self._working.start)
            self._working = None

    def _holds(self, length: int, context_hash: int) -> bool:
        return length <= len(self.log) and self.log.hash_at(length) == context_hash

    # -- sending ----------------------------------------------------------------------------

    def take_draft(self, sent_us: int = 0) -> DraftTokens | None:
        """Proposals that the target has not been sent yet."""
        if self.sent_len >= len(self.log):
            return None
        start, self.sent_len = self.sent_len, len(self.log)
        draft_us, self._draft_us = self._draft_us, 0
        return DraftTokens(
            session_id=self.session_id,
            epoch=self.epoch,
            start=start,
            context_hash=self.log.hash_at(start),
            token_ids=self.log.slice(start),
            last_round=self.last_round,
            draft_us=draft_us,
            sent_us=sent_us,
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
        self.committed_len = end
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
