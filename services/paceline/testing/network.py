"""A seeded network of streams between drafts and targets: in order, until a fault says otherwise.

Like the gRPC streams it stands for, a stream delivers in order and dies as a whole; the faults
of `faults.py` go beyond that on purpose. It knows message classes by name only and decides
nothing about tokens; all its chance comes from one `random.Random`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from paceline.protocol.messages import DraftMessage, DraftTokens, TargetMessage
from paceline.testing.clock import VirtualClock
from paceline.testing.faults import Fault, FaultPlan

LONG_DELAY_US = 60_000
LATE_COPY_US = 8_000
STRAGGLE_US = 4_000


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and what only the simulation may know: the draft's tokens before `start`."""

    message: DraftMessage | TargetMessage
    context: tuple[int, ...] = ()
    is_corrupt: bool = False

    @property
    def kind(self) -> str:
        return type(self.message).__name__


@dataclass(slots=True, eq=False)
class End:
    """One end of a stream. `free_us`: when the last message sent towards it will have arrived;
    nothing sent towards it arrives before `blocked_until_us`."""

    receive: Callable[[Stream, Envelope], None]
    is_open: bool = True
    free_us: int = 0
    blocked_until_us: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """One incarnation of the link of a (draft, target) pair; a redial makes a new one."""

    link_id: int
    draft_id: int
    target_id: int
    draft_end: End
    target_end: End
    latency_us: int
    target_life: int


@dataclass
class SimulatedNetwork:
    """`fired` counts faults by name and, for those of messages, by name and message class."""

    clock: VirtualClock
    rng: Random
    plan: FaultPlan
    vocab_size: int
    fired: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.current: dict[tuple[int, int], Stream] = {}
        self._num_seen: Counter[str] = Counter()
        self._next_link_id = 1
        self.is_healed = False
        self.hang_up: Callable[[Stream], None] = lambda stream: None
        plan = self.plan
        self._chances = (
            (Fault.DROP, plan.drop),
            (Fault.DUPLICATE, plan.duplicate),
            (Fault.DELAY, plan.delay),
            (Fault.CORRUPT, plan.corrupt),
        )
        self._has_message_faults = any(chance for _, chance in self._chances)

    # -- streams ----------------------------------------------------------------------------

    def connect(
        self, draft_id: int, target_id: int, draft_end: End, target_end: End, target_life: int = 0
    ) -> Stream:
        """A new stream; an older one of the pair may still be open at the target."""
        link_id, self._next_link_id = self._next_link_id, self._next_link_id + 1
        latency_us = self.rng.choice((30, 200, 1000))
        stream = Stream(
            link_id, draft_id, target_id, draft_end, target_end, latency_us, target_life
        )
        self.current[draft_id, target_id] = stream
        return stream

    def block(self, duration_us: int, *ends: End) -> None:
        """Partition: what is sent towards `ends` from now on waits until it is over."""
        for end in ends:
            end.blocked_until_us = self.clock.now_us + duration_us

    def to_target(self, stream: Stream, envelope: Envelope) -> None:
        if stream.draft_end.is_open:
            self._send(stream, stream.target_end, envelope)

    def to_draft(self, stream: Stream, envelope: Envelope) -> None:
        if stream.target_end.is_open:
            self._send(stream, stream.draft_end, envelope)

    def draw_stall(self) -> bool:
        """Whether the next draft pass takes very long."""
        is_stalled = not self.is_healed and self.rng.random() < self.plan.stall
        if is_stalled:
            self.fired[Fault.STALL] += 1
        return is_stalled

    # -- messages ---------------------------------------------------------------------------

    def _send(self, stream: Stream, end: End, envelope: Envelope) -> None:
        fault = self._draw(envelope)
        if fault is not None:
            self._count(fault, envelope)
        if fault is Fault.DROP:
            return
        if fault is Fault.CORRUPT:
            envelope = self._corrupt(envelope)
        wait_us = stream.latency_us + self.rng.randrange(100)
        if fault is Fault.DELAY:
            wait_us += self.rng.randrange(LONG_DELAY_US)
        arrival_us = max(self.clock.now_us + wait_us, end.blocked_until_us, end.free_us)
        end.free_us = arrival_us
        self.clock.call_at(arrival_us, lambda: self._arrive(stream, end, envelope))
        if fault is Fault.DUPLICATE:
            late_us = arrival_us + self.rng.randrange(LATE_COPY_US)
            self.clock.call_at(late_us, lambda: self._arrive(stream, end, envelope))

    def _arrive(self, stream: Stream, end: End, envelope: Envelope) -> None:
        if end.is_open:
            end.receive(stream, envelope)
        elif not self.is_healed and self.rng.random() < self.plan.straggle:
            is_for_target = end is stream.target_end
            self.clock.call_after(
                self.rng.randrange(STRAGGLE_US),
                lambda: self._straggle(stream, is_for_target, envelope),
            )

    def _straggle(self, old: Stream, is_for_target: bool, envelope: Envelope) -> None:
        """The message outlived its stream: it arrives on the pair's newer one, if any.

        Not beyond the target's life: its numbers mean something else in the next.
        """
        stream = self.current[old.draft_id, old.target_id]
        end = stream.target_end if is_for_target else stream.draft_end
        is_newer = stream is not old and stream.target_life == old.target_life
        if is_newer and end.is_open:
            self._count(Fault.STRAGGLE, envelope)
            end.receive(stream, envelope)

    def _draw(self, envelope: Envelope) -> Fault | None:
        kind = envelope.kind
        if self.plan.scripted:
            self._num_seen[kind] += 1
            scripted = self.plan.scripted.get((kind, self._num_seen[kind]))
            if scripted is not None:
                return scripted
        if not self._has_message_faults or self.is_healed:
            return None
        if self.plan.kinds and kind not in self.plan.kinds:
            return None
        roll = self.rng.random()
        for fault, chance in self._chances:
            roll -= chance
            if roll < 0:
                is_draft = isinstance(envelope.message, DraftTokens)
                return None if fault is Fault.CORRUPT and not is_draft else fault
        return None

    def _corrupt(self, envelope: Envelope) -> Envelope:
        """Other tokens, another place, or more than was asked for; still well-formed."""
        draft = envelope.message
        assert isinstance(draft, DraftTokens)
        token_ids = list(draft.token_ids)
        start = draft.start
        damage = self.rng.randrange(4)
        if damage == 0:
            start = max(0, start + self.rng.choice((-9, -1, 1, 2)))
        elif damage == 1:
            token_ids += [self.rng.randrange(self.vocab_size) for _ in range(20)]
        else:
            index = self.rng.randrange(len(token_ids))
            token_ids[index] = (token_ids[index] + 1) % self.vocab_size
        message = replace(draft, start=start, token_ids=tuple(token_ids))
        return replace(envelope, message=message, is_corrupt=True)

    def _count(self, fault: Fault, envelope: Envelope) -> None:
        self.fired[fault] += 1
        self.fired[f"{fault} {envelope.kind}"] += 1
