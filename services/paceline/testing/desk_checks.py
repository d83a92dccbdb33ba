"""What must hold between one life of a target and its drafts: breakers, drains, honest drafts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from paceline.protocol.messages import DraftTokens
from paceline.target.breaker import MAX_BREAKERS, BreakerState
from paceline.target.draft_pool import DraftLink
from paceline.target.scheduler import Scheduler
from paceline.target.sequence import Sequence
from paceline.testing.clock import LocalClock
from paceline.testing.invariants import require
from paceline.testing.network import Envelope
from paceline.testing.world import World


@dataclass(slots=True)
class _Record:
    """One draft replica's failures in a row; `dark_us`: since when it is left alone. What it
    serves may fail meanwhile without consequence, but not the sequence that probes it."""

    num_failures: int = 0
    dark_us: int = 0
    probe_id: int | None = None


@dataclass
class DeskChecks:
    """It hears of failures from the desk itself, and counts them again."""

    world: World
    scheduler: Scheduler
    clock: LocalClock
    records: defaultdict[str, _Record] = field(default_factory=lambda: defaultdict(_Record))
    # Sequences that the last plan left on a draft that drains.
    _left: set[int] = field(default_factory=set)
    # The link's strikes, messages kept and messages stale before the one that is being heard.
    _before: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        desk = self.scheduler.drafts
        fail = desk._fail

        def record_failed(link: DraftLink, session_id: int | None, now_us: int) -> None:
            mine = self.records[link.hello.replica_id]
            mine.num_failures += 1
            is_probe = mine.probe_id is not None and session_id in (None, mine.probe_id)
            if mine.num_failures == self.world.scenario.rpc.breaker_failures or is_probe:
                mine.dark_us, mine.probe_id = now_us, None
            fail(link, session_id, now_us)

        assign = desk.pool.assign

        def record_assigned(link_id: int, session_id: int) -> bool:
            link = desk.pool.get(link_id)
            if link is not None:
                self._assigned(link, session_id, self.clock.now_us)
            return assign(link_id, session_id)

        desk._fail = record_failed  # type: ignore[method-assign]
        desk.pool.assign = record_assigned  # type: ignore[method-assign]

    def _assigned(self, link: DraftLink, session_id: int, now_us: int) -> None:
        """A draft that failed too often in a row is left alone for a while."""
        rpc, mine = self.world.scenario.rpc, self.records[link.hello.replica_id]
        if mine.num_failures >= rpc.breaker_failures:
            since_us = now_us - mine.dark_us
            is_rested = since_us >= int(rpc.breaker_min_s * 1e6)
            require(is_rested, "a failing draft was given a sequence", since_us)
            mine.probe_id = session_id
        num = len(self.scheduler.drafts.pool._breakers)
        require(num <= MAX_BREAKERS, "more breakers than are remembered", num)

    def receiving(self, link: DraftLink | None) -> None:
        """A message of this link is about to be heard."""
        counts = self.scheduler.drafts.counts
        self._before = (0 if link is None else link.strikes, counts["kept"], counts["stale"])

    def received(self, link: DraftLink | None, envelope: Envelope) -> None:
        """It was heard."""
        if link is None:
            return
        strikes, num_kept, num_stale = self._before
        counts = self.scheduler.drafts.counts
        is_struck, is_kept = link.strikes > strikes, counts["kept"] > num_kept
        message = envelope.message
        if isinstance(message, DraftTokens) and message.is_branch:
            self.world.checker.counts["stale_branch"] += counts["stale"] - num_stale
        require(envelope.is_corrupt or not is_struck, "honest message taken for a lie", message)
        # While it is dark, what its old sequences bring or miss is no news.
        if is_kept and link.breaker.state is not BreakerState.DARK:
            self.records[link.hello.replica_id] = _Record()
            is_probing = link.breaker.state is BreakerState.PROBING
            require(not is_probing, "a useful draft was not trusted again", link.hello.replica_id)

    def planned(self, now_us: int) -> None:
        """Nobody stays with a draft that drains while a healthy one has a place.

        Twice in a row: the desk looks at one sequence after the other, and one that gives its
        place up frees it for those before it at the next pass.
        """
        before, self._left = self._left, set()
        pool = self.scheduler.drafts.pool
        if not pool.has_draining:
            return
        for session_id in self.scheduler._running:
            sequence = self.scheduler._sequences[session_id]
            link = pool.get(sequence.draft_id)
            if link is None or not link.is_draining or not sequence.session.is_attached:
                continue
            if any(_may(other, sequence, now_us) for other in pool.links().values()):
                self._left.add(session_id)
                is_new = session_id not in before
                require(is_new, "a sequence was left on a draft that drains", session_id)


def _may(link: DraftLink, sequence: Sequence, now_us: int) -> bool:
    """Whether nothing at all speaks against this draft."""
    session, hello = sequence.session, link.hello
    return (
        not link.is_draining
        and link.strikes == 0
        and link.breaker.state is BreakerState.CLOSED
        and link.busy_until_us <= now_us
        and len(link.sessions) < hello.max_sessions
        and session.committed_len < hello.max_model_len
        and session.committed_len + 1 < session.end_len
        and sequence.next_open_us <= now_us
        and hello.replica_id not in sequence.barred_drafts
    )
