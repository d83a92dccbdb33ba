"""All sequences of one draft replica, over all the targets it serves. Pure: time is an argument.

One bad sequence costs only itself, a silent one is dropped after `session_idle_us`, one too many
is answered BUSY. It does not know streams or models: a `link_id` names a target's stream.

Branches (`draft_branches`) live on what is left over: rows of a pass that the main texts do not
use, as many as `branch_budget` finds cheap, and KV blocks, which they give back before any
sequence has to go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from paceline.errors import RemoteProtocolError
from paceline.protocol.branch_budget import BranchBudget
from paceline.protocol.draft_branches import Branch
from paceline.protocol.draft_session import DraftSession, DraftWork, Rewind, WorkResult
from paceline.protocol.draft_stats import DraftTableStats
from paceline.protocol.messages import (
    REJECTION_MODES,
    CloseReason,
    CloseSession,
    DraftMessage,
    DraftTokens,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
    TargetMessage,
    Verdict,
)
from paceline.sampling.params import SamplingParams, VerificationMode

SUPPORTED_MODES = tuple(VerificationMode)

# Rows of branches in one pass, over all sequences: with the main texts of 64 sequences it still
# fits the largest pass that is captured as a CUDA graph.
MAX_BRANCH_ROWS = 192
# Passes without branches after the cache was full.
BRANCH_PAUSE_PASSES = 64

SessionKey = tuple[int, int]  # (link_id, session_id)


@dataclass(slots=True)
class _Entry:
    session: DraftSession
    seen_us: int
    cache_salt: int
    # A failed pass was over it and others: it runs alone until it has drawn a token.
    is_suspect: bool = False


# One for every row of every pass, and never changed: not frozen only because that makes them twice
# as slow to build.
@dataclass(slots=True)
class PassItem:
    """The share of one sequence, or of a branch of it, in the next draft pass."""

    key: SessionKey
    sequence_id: int
    sampling: SamplingParams
    mode: VerificationMode
    work: DraftWork
    cache_salt: int = 0
    trace_context: bytes = b""

    @property
    def propose_round(self) -> int | None:
        """Noise key of a draw from the draft's own law; None where the sampler's token is wanted.

        With a key the result must state the law.
        """
        return self.work.round if self.mode in REJECTION_MODES else None


@dataclass
class DraftTable:
    """`num_blocks` KV blocks of `block_size` tokens bound what is opened; None: no bound.

    The bound counts every sequence as if it shared no block with another.
    """

    max_sessions: int
    max_len: int
    session_idle_us: int
    num_blocks: int | None = None
    block_size: int = 16
    modes: tuple[VerificationMode, ...] = SUPPORTED_MODES
    stats: DraftTableStats = field(default_factory=DraftTableStats)

    def __post_init__(self) -> None:
        self._entries: dict[SessionKey, _Entry] = {}
        self._next_sequence_id = 1
        self._released: list[int] = []
        self._branch_pause = 0
        self._budget = BranchBudget()
        self.is_draining = False  # opens nothing new: BUSY, so that a target looks elsewhere

    def __len__(self) -> int:
        return len(self._entries)

    def session(self, key: SessionKey) -> DraftSession | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.session

    def sequences(self) -> Iterable[int]:
        """The engine's sequences in use, those of branches included."""
        sessions = [entry.session for entry in self._entries.values()]
        mains = [session.sequence_id for session in sessions]
        return mains + [s for session in sessions for s in session.branches.sequences()]

    def take_released(self) -> list[int]:
        """Engine sequences that are no longer needed; the caller frees them."""
        released, self._released = self._released, []
        for entry in self._entries.values():
            released += entry.session.branches.take_released()
        return released

    @property
    def has_released(self) -> bool:
        sessions = (entry.session for entry in self._entries.values())
        return bool(self._released) or any(session.branches.released for session in sessions)

    # -- messages ---------------------------------------------------------------------------

    def receive(self, link_id: int, message: TargetMessage, now_us: int) -> list[DraftMessage]:
        """Act on one message of a target; returns what to answer."""
        match message:
            case OpenSession():
                return [self._open(link_id, message, now_us)]
            case Verdict():
                return self._verdict(link_id, message, now_us)
            case Nack():
                entry = self._touch((link_id, message.session_id), message.epoch, now_us)
                if entry is not None:
                    entry.session.receive_nack(message)
            case CloseSession():
                entry = self._entries.get((link_id, message.session_id))
                if entry is not None and entry.session.epoch <= message.epoch:
                    self._drop((link_id, message.session_id))
            case _:
                pass  # Ping, Drain and Bye concern the stream, not a sequence
        return []

    def _open(self, link_id: int, message: OpenSession, now_us: int) -> Opened:
        key = (link_id, message.session_id)
        old = self._entries.get(key)
        if old is not None and old.session.epoch >= message.epoch:
            status = OpenStatus.OK if old.session.epoch == message.epoch else OpenStatus.BUSY
            return Opened(message.session_id, message.epoch, status)
        if old is not None:
            self._drop(key)
        status = self._admit(message)
        if status is OpenStatus.OK:
            sequence_id = self._new_sequence_id()
            session = DraftSession(message, max_len=self.max_len, sequence_id=sequence_id)
            self._entries[key] = _Entry(session, now_us, message.cache_salt)
            self.stats.num_opened += 1
        return Opened(message.session_id, message.epoch, status)

    def _new_sequence_id(self) -> int:
        self._next_sequence_id += 1
        return self._next_sequence_id - 1

    def _admit(self, message: OpenSession) -> OpenStatus:
        if message.mode not in self.modes:
            self.stats.num_unsupported += 1
            return OpenStatus.UNSUPPORTED
        if len(message.token_ids) > self.max_len:
            # No honest target asks: it knows this draft's context from its Hello.
            self.stats.num_unsupported += 1
            return OpenStatus.UNSUPPORTED
        length = max(message.limit_position, len(message.token_ids))
        is_full = len(self._entries) >= self.max_sessions or not self._fits(length)
        if self.is_draining or is_full:
            self.stats.num_busy += 1
            return OpenStatus.BUSY
        return OpenStatus.OK

    def _fits(self, length: int) -> bool:
        """Whether the cache can hold one more sequence of `length` beside the credits given."""
        if self.num_blocks is None:
            return True
        sessions = (entry.session for entry in self._entries.values())
        held = (max(len(session.log), session.limit_position) for session in sessions)
        return sum(map(self._blocks, held)) + self._blocks(length) <= self.num_blocks

    def _blocks(self, length: int) -> int:
        return -(-min(length, self.max_len) // self.block_size)

    def _verdict(self, link_id: int, message: Verdict, now_us: int) -> list[DraftMessage]:
        key = (link_id, message.session_id)
        if key not in self._entries:
            # Whatever became of it here, the target still counts on it: say so.
            return [CloseSession(message.session_id, message.epoch, CloseReason.UNKNOWN)]
        entry = self._touch(key, message.epoch, now_us)
        if entry is None:
            return []
        if message.start + len(message.token_ids) > self.max_len:
            self._drop(key)  # no honest target: it parts from a draft that its text outgrows
            return [CloseSession(message.session_id, message.epoch, CloseReason.PROTOCOL)]
        try:
            outcome = entry.session.receive_verdict(message, now_us)
        except RemoteProtocolError:
            self._drop(key)  # the sequence is poisoned; the target will reopen it
            self.stats.num_poisoned += 1
            return [CloseSession(message.session_id, message.epoch, CloseReason.PROTOCOL)]
        if isinstance(outcome, Nack):
            self.stats.num_nacks += 1
            return [outcome]
        if isinstance(outcome, Rewind):
            self.stats.num_rewinds += 1
            self.stats.num_dropped_tokens += outcome.num_dropped
            self.stats.num_promoted += outcome.is_promoted
        return []

    def _touch(self, key: SessionKey, epoch: int, now_us: int) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None or entry.session.epoch != epoch:
            return None
        entry.seen_us = now_us
        return entry

    def lose_link(self, link_id: int) -> None:
        """The target's stream is gone, and with it all its sequences."""
        for key in [key for key in self._entries if key[0] == link_id]:
            self._drop(key)

    def expire(self, now_us: int) -> list[tuple[int, CloseSession]]:
        """Drop sequences that were silent too long, or have no room here; tell their targets."""
        limit = now_us - self.session_idle_us
        ended = [
            (key, CloseReason.FINISHED if e.session.is_full else CloseReason.ABORTED, e)
            for key, e in self._entries.items()
            if e.seen_us < limit or e.session.is_full
        ]
        for key, reason, _ in ended:
            self._drop(key)
            self.stats.num_expired += reason is CloseReason.ABORTED
        return [(key[0], CloseSession(key[1], e.session.epoch, why)) for key, why, e in ended]

    def evict_newest(self) -> tuple[int, CloseSession] | None:
        """The cache is full: give up the sequence opened last; its target is told.

        None when branches have given their blocks back first, or there is nothing to give up.
        """
        if self._drop_branches() or not self._entries:
            return None
        key, entry = next(reversed(self._entries.items()))
        self._drop(key)
        self.stats.num_evicted += 1
        close = CloseSession(key[1], entry.session.epoch, CloseReason.ABORTED)
        return key[0], close

    def fail_pass(self, items: list[PassItem]) -> list[tuple[int, CloseSession]]:
        """The pass over `items` failed for a reason of its own, and did nothing. One sequence is
        given up; several are tried again, each alone: one must not cost the others their draft.
        No branch is tried again, nor another one of its sequence."""
        self.cancel_pass(items)
        current = [(item, entry) for item in items if (entry := self._current(item))]
        for _, entry in current:
            entry.session.forbid_branches()
            entry.is_suspect |= len(items) > 1
        closes = []
        for item, entry in current if len(items) == 1 else ():
            if item.sequence_id != entry.session.sequence_id:
                continue  # a branch alone, which is gone by now
            self._drop(item.key)
            self.stats.num_evicted += 1
            close = CloseSession(item.key[1], entry.session.epoch, CloseReason.ABORTED)
            closes.append((item.key[0], close))
        return closes

    def _drop(self, key: SessionKey) -> None:
        session = self._entries.pop(key).session
        self._released.append(session.sequence_id)
        self._released += [*session.branches.sequences(), *session.branches.take_released()]

    def _drop_branches(self) -> bool:
        """Give all branches up, and do without for a while; False when there were none."""
        dropped = [entry.session.branches.give_up() for entry in self._entries.values()]
        if any(dropped):
            self._branch_pause = BRANCH_PAUSE_PASSES
        return any(dropped)

    # -- passes -----------------------------------------------------------------------------

    def begin_pass(self, max_rows: int) -> list[PassItem]:
        """Every sequence that may draft, within `max_rows`; long prefills go last.

        One-row decodes come first so that a new prompt never stops the sequences that run.
        Branches get the rows that are left. After a pass that failed its sequences are first, each
        alone.
        """
        ready = [item for item in self._entries.items() if item[1].session.can_draft()]
        ready.sort(key=lambda item: len(item[1].session.log) - item[1].session.num_computed)
        suspects = [item for item in ready if item[1].is_suspect]
        ready = suspects[:1] or ready
        items: list[PassItem] = []
        rows_left = max_rows
        for key, entry in ready:
            if rows_left < 1:
                break
            work = entry.session.begin_work(rows_left)
            rows_left -= work.num_rows
            items.append(_pass_item(key, entry, entry.session.sequence_id, work))
        if not suspects:
            rows_left = min(rows_left, MAX_BRANCH_ROWS, self._budget.max_rows(len(items)))
            items += self._begin_branches(rows_left)
        return items

    def _begin_branches(self, rows_left: int) -> list[PassItem]:
        """As many branches as fit, those first that are the most likely to be of use soon."""
        if self._branch_pause:
            self._branch_pause -= 1
            return []
        ready: list[tuple[int, SessionKey, _Entry, Branch]] = []
        for key, entry in self._entries.items():
            if entry.session.branches.fan_out:
                found = entry.session.ready_branches()
                ready += [(distance, key, entry, branch) for distance, branch in found]
        if len(ready) > rows_left:
            ready.sort(key=itemgetter(0))
            for _, _, entry, branch in ready[rows_left:]:
                entry.session.branches.pass_over(branch)
            del ready[rows_left:]
        return [self._begin_branch(*item) for item in ready]

    def _begin_branch(self, _: int, key: SessionKey, entry: _Entry, branch: Branch) -> PassItem:
        sequence_id = branch.sequence_id
        if sequence_id is None:
            sequence_id = self._new_sequence_id()
            self.stats.num_branches += 1
        work = entry.session.begin_branch(branch, sequence_id)
        return _pass_item(key, entry, sequence_id, work)

    def end_pass(
        self,
        items: list[PassItem],
        outcomes: list[WorkResult],
        draft_us: int,
        cycle_us: int | None = None,
        began_us: int = 0,
    ) -> None:
        """Results of a pass, in the order of `items`. `cycle_us`: since the pass before ended,
        all that rows cost beside the engine's `draft_us` (None: the draft has stood still)."""
        self.stats.end_pass(len(items), draft_us)
        if items and all(len(item.work.token_ids) == 1 for item in items):
            self._budget.learn(len(items), draft_us if cycle_us is None else cycle_us)
        for item, outcome in zip(items, outcomes, strict=True):
            entry = self._entries.get(item.key)
            if entry is None:
                continue
            branch = entry.session.branches.named(item.sequence_id)
            if branch is not None:
                self.stats.num_branch_tokens += entry.session.end_branch(branch, outcome)
                continue
            if item.sequence_id != entry.session.sequence_id:
                continue  # closed or reopened during the pass, or a branch that is no more
            if outcome.token_id is not None:
                entry.is_suspect = False
            if entry.session.end_work(outcome, draft_us, began_us):
                self.stats.num_drafted_tokens += 1

    def cancel_pass(self, items: list[PassItem]) -> None:
        """The pass failed."""
        for item in items:
            entry = self._current(item)
            if entry is not None:
                branch = entry.session.branches.named(item.sequence_id)
                (branch or entry.session).cancel_work()

    def _current(self, item: PassItem) -> _Entry | None:
        entry = self._entries.get(item.key)
        if entry is None or not entry.session.has_sequence(item.sequence_id):
            return None  # closed or reopened during the pass, or a branch that is no more
        return entry

    def take_drafts(self, now_us: int) -> dict[int, list[DraftTokens]]:
        """New proposals by link."""
        out: dict[int, list[DraftTokens]] = {}
        for (link_id, _), entry in self._entries.items():
            while (draft := entry.session.take_draft(now_us)) is not None:
                out.setdefault(link_id, []).append(draft)
            for draft in entry.session.take_branch_drafts(now_us):
                out.setdefault(link_id, []).append(draft)
        return out


def _pass_item(key: SessionKey, entry: _Entry, sequence_id: int, work: DraftWork) -> PassItem:
    session, salt = entry.session, entry.cache_salt
    context = session.trace_context
    return PassItem(key, sequence_id, session.sampling, session.mode, work, salt, context)
