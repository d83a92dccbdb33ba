"""The draft's side of one sequence: a disposable copy of the committed tokens plus a lead.

It decides what to compute next, what to send and how far to rewind. It does not know models,
KV tensors, transports or time, and nothing here can change what the target commits.

Layout of `log`: `[committed | own proposals]`. `num_computed` counts the tokens whose KV the
engine holds for exactly these tokens; `sent_len` how far the target has been told.

In the rejection modes the target divides by the laws that proposals were drawn from, so each
keeps its own, every draw has noise of its own (`DraftWork.round`: a redraw from old noise would
know what the target saw), and what the target has looked at and rejected is never proposed again:
see `window_laws` for the argument.

In the other modes the target may ask for *branches* (`draft_branches`): a correction that one of
them foresaw makes it the main text, under an engine sequence of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.protocol.draft_branches import Branch, Branches, num_verifiable
from paceline.protocol.draft_work import DraftWork, WorkResult, check_result
from paceline.protocol.messages import (
    REJECTION_MODES,
    DraftTokens,
    Nack,
    OpenSession,
    Verdict,
)
from paceline.protocol.token_log import TokenLog
from paceline.sampling.sparse_probs import SparseProbs

__all__ = ["DraftSession", "DraftWork", "Rewind", "WorkResult"]

# Proposals of one message in the rejection modes: with 64 entries each they fit the smallest
# message that can be configured (64 KiB).
MAX_LAWS_PER_MESSAGE = 64

_EPOCH_MASK = (1 << 12) - 1
_DRAW_BITS = 20
_DRAW_MASK = (1 << _DRAW_BITS) - 1


@dataclass(frozen=True, slots=True)
class Rewind:
    """Positions from `length` on were wrong; `num_dropped` own proposals are gone.

    `is_promoted`: a branch has taken their place.
    """

    length: int
    num_dropped: int
    is_promoted: bool = False


class DraftSession:
    """One sequence opened by a target. `max_len` is the draft model's own context limit.

    `sequence_id` names the engine's sequence of the main text; a promotion changes it.
    """

    def __init__(self, opened: OpenSession, *, max_len: int, sequence_id: int = 0) -> None:
        self.session_id = opened.session_id
        self.epoch = opened.epoch
        self.prompt_len = opened.prompt_len
        self.sampling = opened.sampling
        self.mode = opened.mode
        self.max_len = max_len
        self.sequence_id = sequence_id
        self.log = TokenLog(opened.token_ids)
        self.committed_len = len(self.log)
        self.sent_len = len(self.log)
        self.limit_position = opened.limit_position
        self.last_round = 0
        self.num_computed = 0
        self.is_full = False  # the engine has no room for what comes next: see `WorkResult`
        self._has_laws = opened.mode in REJECTION_MODES
        # The laws of the own proposals, one each; empty in the matching modes.
        self._probs: list[SparseProbs] = []
        self._num_draws = 0
        self.branches = Branches()
        # The runner-ups of the own proposals, one entry each.
        self._runner_ups: list[tuple[int, ...]] = []
        self._has_new = False  # since branches were last looked for
        self._can_branch = not self._has_laws
        self._set_fan_out(opened.fan_out)
        self._working: DraftWork | None = None
        self._is_draw_void = False
        self._draft_us = 0
        # Of the round that is open at the target, as far as we know; empty: nobody traces it.
        self.trace_context = opened.trace_context
        # Moments, 0: none. A verdict since the last work began; what the unsent proposals are to
        # say of the last verdict before them, and of when they were begun.
        self._verdict_us = self._received_us = self._began_us = 0

    # -- computing --------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return min(self.limit_position, self.max_len)

    def can_draft(self) -> bool:
        """Whether a next token is wanted and may be computed now."""
        return self._working is None and len(self.log) < self._limit

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
            num_runner_ups=self.branches.fan_out,
            received_us=self._verdict_us,
        )
        self._verdict_us = 0
        return self._working

    def _next_round(self) -> int:
        """A key that no other draw of this sequence has, in this epoch or (in 4096) another.

        The draws of one epoch wrap after a million. The noise is keyed by output index as well,
        and no position is drawn that often.
        """
        draw, self._num_draws = self._num_draws, self._num_draws + 1
        return (self.epoch & _EPOCH_MASK) << _DRAW_BITS | draw & _DRAW_MASK

    def end_work(self, result: WorkResult, draft_us: int = 0, began_us: int = 0) -> bool:
        """The pass is done, which began at `began_us` and took `draft_us`; True when its token
        became a proposal.

        A verdict may have arrived meanwhile: then the cache is good only up to the first
        difference and a token sampled from another context is dropped. Raises
        `LocalProtocolError` for a result that does not fit the work: a bug of the engine.
        """
        work = self._working
        if work is None:
            raise LocalProtocolError("end_work without begin_work")
        cached_len = check_result(work, result)
        self._check_law(result)
        self._working = None
        if result.token_id is None and cached_len == work.end:
            self.is_full, self.max_len = True, min(self.max_len, work.end)
        same_context = self._holds(work.end, work.context_hash)
        if same_context:
            self.num_computed = cached_len
        elif self.num_computed == work.start:  # else a rewind went below what we fed
            fed = work.token_ids[: cached_len - work.start]
            self.num_computed += self.log.common_len(work.start, fed)
        wanted = same_context and len(self.log) == work.end and not self._is_draw_void
        if wanted:  # what was in vain dates nothing: a verdict that came later does
            self._draft_us += draft_us
            self._received_us = self._received_us or work.received_us
            self._began_us = self._began_us or began_us
        if result.token_id is None or not wanted or work.end >= self.limit_position:
            return False
        self.log.append(result.token_id)
        self._runner_ups.append(result.runner_ups)
        self._has_new = True
        if self._has_laws and result.draft_probs is not None:
            self._probs.append(result.draft_probs)
        return True

    def _check_law(self, result: WorkResult) -> None:
        if not self._has_laws or result.token_id is None:
            return
        probs = result.draft_probs
        if probs is None or probs.weight(result.token_id) == 0:
            raise LocalProtocolError(f"token {result.token_id} without a law it can come from")

    def cancel_work(self) -> None:
        """The pass failed; nothing of it is in the cache."""
        if self._working is not None:
            self.num_computed = min(self.num_computed, self._working.start)
            self._working = None

    def _holds(self, length: int, context_hash: int) -> bool:
        return length <= len(self.log) and self.log.hash_at(length) == context_hash

    # -- branches ---------------------------------------------------------------------------

    def _set_fan_out(self, fan_out: int) -> None:
        self.branches.set_fan_out(fan_out if self._can_branch else 0)

    def forbid_branches(self) -> None:
        """None any more, whatever the target grants."""
        self._can_branch = False
        self._set_fan_out(0)

    def ready_branches(self) -> list[tuple[int, Branch]]:
        """Branches that may draw a token now, and how far each is from being of use.

        A correction can only come in the proposals that a pass verifies, or behind the last.
        """
        if self._has_new:
            self._has_new = False
            reach = num_verifiable(self.committed_len, self._limit) + 1
            self.branches.grow(self.log, self.committed_len, self._runner_ups[:reach])
        return self.branches.ready(self.committed_len, self._limit)

    def begin_branch(self, branch: Branch, sequence_id: int) -> DraftWork:
        """As `begin_work`, for one of `ready_branches`: one row of the engine's `sequence_id`, new
        if the branch has none. What it then forks is computed: its runner-up came from there."""
        return self.branches.begin_work(branch, sequence_id, self.sequence_id, self.prompt_len)

    def end_branch(self, branch: Branch, result: WorkResult) -> bool:
        """As `end_work`; the branch lives."""
        return self.branches.end_work(branch, result, self.limit_position)

    def has_sequence(self, sequence_id: int) -> bool:
        """Whether the engine's sequence is the main text or a branch that lives."""
        return sequence_id == self.sequence_id or self.branches.named(sequence_id) is not None

    def text_of(self, sequence_id: int) -> tuple[int, ...] | None:
        """The text of the main chain or of a branch, None when there is no such sequence."""
        if sequence_id == self.sequence_id:
            return self.log.slice(0)
        branch = self.branches.named(sequence_id)
        return None if branch is None else branch.text(self.log)

    # -- sending ----------------------------------------------------------------------------

    def take_draft(self, sent_us: int = 0) -> DraftTokens | None:
        """Proposals that the target has not been sent yet (the next of them, if they are many)."""
        if self.sent_len >= len(self.log):
            return None
        start, end = self.sent_len, len(self.log)
        if self._has_laws:
            end = min(end, start + MAX_LAWS_PER_MESSAGE)
        self.sent_len = end
        draft_us, began_us, received_us = self._draft_us, self._began_us, self._received_us
        self._draft_us = self._began_us = self._received_us = 0
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
            began_us=began_us,
            received_us=received_us,
        )

    def take_branch_drafts(self, sent_us: int = 0) -> Iterator[DraftTokens]:
        """The same of branches, each once it is as long as it gets for now: many short messages
        would cost both ends more than they are worth. Time is accounted to the main text alone."""
        for branch in self.branches.take_due():
            unsent = branch.take_unsent()
            if unsent is not None:
                start, context_hash, token_ids = unsent
                yield DraftTokens(
                    session_id=self.session_id,
                    epoch=self.epoch,
                    start=start,
                    context_hash=context_hash,
                    token_ids=token_ids,
                    last_round=self.last_round,
                    sent_us=sent_us,
                    is_branch=True,
                )

    # -- receiving --------------------------------------------------------------------------

    def receive_verdict(self, verdict: Verdict, now_us: int = 0) -> Rewind | Nack | None:
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
        self.trace_context, self._verdict_us = verdict.trace_context, now_us
        old_len = len(self.log)
        promoted_at = self._promote(verdict)
        conflict = self.log.set_tokens(verdict.start, verdict.token_ids)
        if self._has_laws and verdict.has_rejection:
            self._is_draw_void = True  # of the pass that is under way, if one is
            if conflict is None and end < old_len:
                self.log.truncate(end)
                conflict = end
        num_committed, self.committed_len = end - self.committed_len, end
        _keep_open(self._probs, num_committed, len(self.log) - end)
        _keep_open(self._runner_ups, num_committed, len(self.log) - end)
        self.limit_position = max(self.limit_position, verdict.limit_position)
        self.last_round = max(self.last_round, verdict.round)
        self.sent_len = max(self.sent_len, end)
        if conflict is not None:
            self.sent_len = end
            self._began_us = self._received_us = 0
            self.num_computed = min(self.num_computed, conflict)
            self.branches.clear()
        self.branches.commit(end)
        self._has_new = True
        self._set_fan_out(verdict.fan_out)
        rewound_to = conflict if promoted_at is None else promoted_at
        if rewound_to is None:
            return None
        return Rewind(rewound_to, old_len - rewound_to, is_promoted=promoted_at is not None)

    def _promote(self, verdict: Verdict) -> int | None:
        """Make the branch that foresaw this verdict's correction the main text; returns where.

        One of which nothing was computed is worth no more than an ordinary rewind. The verdict may
        differ from the branch further on: then the rewind is inside it.
        """
        if not self.branches.live:
            return None
        agreed = self.log.common_len(verdict.start, verdict.token_ids)
        position = verdict.start + agreed
        if agreed == len(verdict.token_ids) or position == len(self.log):
            return None
        branch = self.branches.find(position, verdict.token_ids[agreed])
        if branch is None or branch.sequence_id is None or not branch.is_begun:
            return None
        self.branches.promote(branch, self.sequence_id)
        self.log.truncate(position)
        self.log.extend(branch.token_ids)
        del self._runner_ups[position - self.committed_len :]
        self._runner_ups += branch.runner_ups
        self.sequence_id, self.num_computed = branch.sequence_id, branch.num_computed
        self.sent_len, self._working = branch.sent_len, branch.work
        return position

    def receive_nack(self, nack: Nack) -> None:
        """The target misses proposals from `have_len` on: send them again."""
        if nack.epoch == self.epoch and self.committed_len <= nack.have_len < self.sent_len:
            self.sent_len = nack.have_len


def _keep_open(values: list[Any], num_committed: int, num_open: int) -> None:
    """Of what there is one of for each own proposal: that of those which are still open."""
    del values[:num_committed]
    del values[num_open:]
