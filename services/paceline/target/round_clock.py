"""The moments of a sequence's open round, and the record of one that is over. Pure.

All times are the target's monotonic clock in microseconds, those of a draft converted to it; 0
means not known. What a draft says of its times is its word: it is cut to the round that it is
part of, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from paceline.generation import RoundDelta
from paceline.protocol.messages import DraftTokens
from paceline.protocol.target_session import TargetSession
from paceline.round_times import Interval, RoundTimes, Stage, partition

# Messages of drafts, and passes, of one round whose times are kept. Of more messages they
# are the newest: in the partition, what only the older would explain is `window`.
MAX_ROUND_ARRIVALS = 32
MAX_ROUND_PASSES = 256


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Start and end of a pass on the target's monotonic clock, microseconds; `logits_us`: when its
    sampling began, 0 where that is not known."""

    started_us: int
    ended_us: int
    logits_us: int = 0

    @property
    def verified_us(self) -> int:
        """End of what counts as verifying."""
        if not self.logits_us:
            return self.ended_us
        return min(max(self.logits_us, self.started_us), self.ended_us)


@dataclass(slots=True)
class PassRecord:
    """A pass, shared by the rounds in it. `num_rows` were computed; `span` is a tracer's."""

    times: PassTimes
    batch_size: int = 0
    num_rows: int = 0
    span: object = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One `DraftTokens`: when the verdict before it left us (`told_us`) and was received, when the
    draft computed, and when the message left and arrived."""

    arrived_us: int
    sent_us: int = 0
    began_us: int = 0
    ended_us: int = 0
    received_us: int = 0
    told_us: int = 0

    @staticmethod
    def of(draft: DraftTokens, now_us: int, offset_us: int | None, told_us: int = 0) -> Arrival:
        """`offset_us` is the draft's clock minus ours; None while nobody knows. What is known is
        never 0, whatever the draft says."""
        if offset_us is None or not draft.sent_us:
            return Arrival(now_us)
        sent_us = max(1, min(now_us, draft.sent_us - offset_us))
        if not draft.began_us:
            return Arrival(now_us, sent_us)
        began_us = max(1, min(sent_us, draft.began_us - offset_us))
        ended_us = min(sent_us, began_us + draft.draft_us)
        if not draft.received_us:
            return Arrival(now_us, sent_us, began_us, ended_us)
        received_us = max(1, min(began_us, draft.received_us - offset_us))
        return Arrival(now_us, sent_us, began_us, ended_us, received_us, told_us)

    def intervals(self) -> list[Interval]:
        found = [(Stage.WIRE_OUT, self.sent_us, self.arrived_us)] if self.sent_us else []
        if self.began_us:
            found.append((Stage.DRAFT, self.began_us, self.ended_us))
        if self.received_us:
            found.append((Stage.REWIND, self.received_us, self.began_us))
            if self.told_us:
                found.append((Stage.WIRE_BACK, self.told_us, self.received_us))
        return found


@dataclass(slots=True)
class RoundRecord:
    """A round that is over. Of each of its `passes` there is when the sequence was ready for it.
    The last part is only there where somebody traces the sequence."""

    begin_us: int
    end_us: int
    passes: list[tuple[int, PassRecord]]
    arrivals: list[Arrival]
    epoch: int = 0
    limit_position: int = 0
    draft_replica_id: str = ""
    mode: str = ""

    def describe(self, session: TargetSession, draft_replica_id: str) -> None:
        self.epoch, self.limit_position = session.epoch, session.limit_position
        self.mode = session.mode.value
        self.draft_replica_id = draft_replica_id

    def intervals(self) -> list[Interval]:
        found: list[Interval] = []
        for ready_us, each in self.passes:
            times = each.times
            found.append((Stage.QUEUE, ready_us, times.started_us))
            found.append((Stage.VERIFY, times.started_us, times.verified_us))
            found.append((Stage.SAMPLE, times.verified_us, times.ended_us))
        for arrival in self.arrivals:
            found += arrival.intervals()
        return found

    def times(self) -> RoundTimes:
        begin_us, end_us = self.begin_us, self.end_us
        if len(self.passes) == 1:
            ready_us, each = self.passes[0]
            times = each.times
            if ready_us <= begin_us <= times.started_us and times.ended_us == end_us:
                # As nearly always where others run as well: one stage behind the other.
                verified_us = times.verified_us
                sample_us, verify_us = end_us - verified_us, verified_us - times.started_us
                queue_us = times.started_us - begin_us
                return RoundTimes(end_us - begin_us, sample_us, verify_us, queue_us, 0, 0, 0, 0, 0)
        return partition(begin_us, end_us, self.intervals())


@dataclass(slots=True)
class RoundClock:
    """`begin_us`: when the open round began; `ready_us`: since when its next pass could have begun,
    as far as the sequence is concerned."""

    begin_us: int = 0
    ready_us: int = 0
    # The last verdict that the draft was sent, and when.
    _told_round: int = -1
    _told_us: int = 0
    _passes: list[tuple[int, PassRecord]] = field(default_factory=list)
    _arrivals: list[Arrival] = field(default_factory=list)

    def start(self, now_us: int) -> None:
        """The request is here."""
        self.begin_us = self.ready_us = now_us

    def told(self, round: int, now_us: int) -> None:
        """The draft has been sent the verdict of `round`."""
        self._told_round, self._told_us = round, now_us

    def arrive(self, draft: DraftTokens, now_us: int, offset_us: int | None) -> None:
        if len(self._arrivals) == MAX_ROUND_ARRIVALS:
            del self._arrivals[0]
        told_us = self._told_us if draft.last_round == self._told_round else 0
        self._arrivals.append(Arrival.of(draft, now_us, offset_us, told_us))

    def passed(self, record: PassRecord) -> None:
        """The sequence was in this pass; the round goes on unless `close` follows."""
        if len(self._passes) == MAX_ROUND_PASSES:
            self._passes.pop()
        self._passes.append((self.ready_us, record))
        self.ready_us = record.times.ended_us

    def close(self, end_us: int) -> RoundRecord:
        """A pass has committed something: the next round begins where this one ends. What arrived
        after the end belongs to the next."""
        record = RoundRecord(self.begin_us, end_us, self._passes, self._arrivals)
        later = [arrival for arrival in self._arrivals if arrival.arrived_us > end_us]
        if later:
            record.arrivals = [a for a in self._arrivals if a.arrived_us <= end_us]
        self._passes, self._arrivals = [], later
        self.begin_us = self.ready_us = end_us
        return record


class RoundTracer(Protocol):
    """What becomes of a sequence's rounds."""

    def context(self, round: int) -> bytes:
        """Of that round's span, for drafts; empty where there is none (yet)."""

    def end_round(self, record: RoundRecord, delta: RoundDelta) -> None: ...


NO_TRACES: Mapping[int, RoundTracer] = MappingProxyType({})  # by choice
