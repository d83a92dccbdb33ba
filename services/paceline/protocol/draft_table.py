"""All sequences of one draft replica, over all the targets it serves. Pure: time is an argument.

One bad sequence costs only itself, a silent one is dropped after `session_idle_us`, one too many
is answered BUSY. It does not know streams or models: a `link_id` names a target's stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.errors import RemoteProtocolError
from paceline.protocol.draft_session import DraftSession, DraftWork, Rewind, WorkResult
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

SessionKey = tuple[int, int]  # (link_id, session_id)


@dataclass
class DraftTableStats:
    """Counts since start."""

    num_opened: int = 0
    num_busy: int = 0
    num_unsupported: int = 0
    num_rewinds: int = 0
    num_dropped_tokens: int = 0
    num_expired: int = 0
    num_evicted: int = 0
    num_poisoned: int = 0
    num_nacks: int = 0
    num_drafted_tokens: int = 0


@dataclass(slots=True)
class _Entry:
    session: DraftSession
    sequence_id: int
    seen_us: int
    cache_salt: int
    # A failed pass was over it and others: it runs alone until it has drawn a token.
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class PassItem:
    """One sequence's share of the next draft pass."""

    key: SessionKey
    sequence_id: int
    sampling: SamplingParams
    mode: VerificationMode
    work: DraftWork
    cache_salt: int = 0

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
        self.is_draining = False  # opens nothing new: BUSY, so that a target looks elsewhere

    def __len__(self) -> int:
        return len(self._entries)

    def session(self, key: SessionKey) -> DraftSession | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.session

    def sequences(self) -> Iterable[int]:
        return [entry.sequence_id for entry in self._entries.values()]

    def take_released(self) -> list[int]:
        """Engine sequences that are no longer needed; the caller frees them."""
        released, self._released = self._released, []
        return released

    @property
    def has_released(self) -> bool:
        return bool(self._released)

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
            session = DraftSession(message, max_len=self.max_len)
            entry = _Entry(session, self._next_sequence_id, now_us, message.cache_salt)
            self._entries[key] = entry
            self._next_sequence_id += 1
            self.stats.num_opened += 1
        return Opened(message.session_id, message.epoch, status)

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
            outcome = entry.session.receive_verdict(message)
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
        """Drop sequences that were silent too long; tell their targets."""
        limit = now_us - self.session_idle_us
        expired = [(key, e) for key, e in self._entries.items() if e.seen_us < limit]
        for key, _ in expired:
            self._drop(key)
            self.stats.num_expired += 1
        return [
            (key[0], CloseSession(key[1], entry.session.epoch, CloseReason.ABORTED))
            for key, entry in expired
        ]

    def evict_newest(self) -> tuple[int, CloseSession] | None:
        """The cache is full: give up the sequence opened last; its target is told."""
        if not self._entries:
            return None
        key, entry = next(reversed(self._entries.items()))
        self._drop(key)
        self.stats.num_evicted += 1
        close = CloseSession(key[1], entry.session.epoch, CloseReason.ABORTED)
        return key[0], close

    def fail_pass(self, items: list[PassItem]) -> list[tuple[int, CloseSession]]:
        """The pass over `items` failed for a reason of its own, and did nothing. One sequence is
        given up; several are tried again, each alone: one must not cost the others their draft."""
        self.cancel_pass(items)
        current = [(item.key, entry) for item in items if (entry := self._current(item))]
        if len(items) > 1:
            for _, entry in current:
                entry.is_suspect = True
            return []
        closes = []
        for key, entry in current:
            self._drop(key)
            self.stats.num_evicted += 1
            close = CloseSession(key[1], entry.session.epoch, CloseReason.ABORTED)
            closes.append((key[0], close))
        return closes

    def _drop(self, key: SessionKey) -> None:
        entry = self._entries.pop(key)
        self._released.append(entry.sequence_id)

    # -- passes -----------------------------------------------------------------------------

    def begin_pass(self, max_rows: int) -> list[PassItem]:
        """Every sequence that may draft, within `max_rows`; long prefills go last.

        One-row decodes come first so that a new prompt never stops the sequences that run.
        After a pass that failed its sequences are first, each alone.
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
            session = entry.session
            work = session.begin_work(rows_left)
            rows_left -= work.num_rows
            items.append(
                PassItem(
                    key=key,
                    sequence_id=entry.sequence_id,
                    sampling=session.sampling,
                    mode=session.mode,
                    work=work,
                    cache_salt=entry.cache_salt,
                )
            )
        return items

    def end_pass(self, items: list[PassItem], outcomes: list[WorkResult], draft_us: int) -> None:
        """Results of a pass, in the order of `items`."""
        for item, outcome in zip(items, outcomes, strict=True):
            entry = self._current(item)
            if entry is None:
                continue
            if outcome.token_id is not None:
                entry.is_suspect = False
            if entry.session.end_work(outcome, draft_us):
                self.stats.num_drafted_tokens += 1

    def cancel_pass(self, items: list[PassItem]) -> None:
        """The pass failed."""
        for item in items:
            entry = self._current(item)
            if entry is not None:
                entry.session.cancel_work()

    def _current(self, item: PassItem) -> _Entry | None:
        entry = self._entries.get(item.key)
        if entry is None or entry.sequence_id != item.sequence_id:
            return None  # closed or reopened during the pass
        return entry

    def take_drafts(self, now_us: int) -> dict[int, list[DraftTokens]]:
        """New proposals by link."""
        out: dict[int, list[DraftTokens]] = {}
        for (link_id, _), entry in self._entries.items():
            while (draft := entry.session.take_draft(now_us)) is not None:
                out.setdefault(link_id, []).append(draft)
        return out
