"""Who has a stream to whom: drafts dial targets, lose them, and dial again with growing pauses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.testing.network import End, Stream
from paceline.testing.simulated_draft import SimulatedDraft
from paceline.testing.simulated_target import SimulatedTarget
from paceline.testing.world import World

NOTICE_US = 6_000
REDIAL_US = 1_500
MAX_REDIAL_US = 12_000


class Links:
    """All streams of a cluster. `is_over`: nobody dials any more."""

    def __init__(
        self, world: World, targets: Sequence[SimulatedTarget], drafts: Sequence[SimulatedDraft]
    ) -> None:
        self._world = world
        self._targets = targets
        self._drafts = drafts
        # Invariant: (draft, target) pairs that have a stream or a dial under way.
        self._pairs: set[tuple[int, int]] = set()
        self.is_over = False

    def open_streams(self) -> list[Stream]:
        return [stream for draft in self._drafts for stream in draft.streams.values()]

    def assign(self, draft: SimulatedDraft, wanted: set[int]) -> None:
        """Have a stream to each of these targets and to no other."""
        draft.wanted = set() if draft.table.is_draining else wanted
        for stream in list(draft.streams.values()):
            if stream.target_id not in draft.wanted and not draft.table.is_draining:
                self._world.checker.counts["reassigned"] += 1
                self.leave(draft, stream)
        for target_id in sorted(draft.wanted):
            pair = (draft.draft_id, target_id)
            if pair not in self._pairs:
                self._pairs.add(pair)
                self._dial(draft, self._targets[target_id], draft.num_boots, REDIAL_US)

    def _dial(
        self, draft: SimulatedDraft, target: SimulatedTarget, boot: int, pause_us: int
    ) -> None:
        world = self._world
        is_current = draft.is_up and draft.num_boots == boot
        if self.is_over or not is_current or target.target_id not in draft.wanted:
            if is_current:
                self._pairs.discard((draft.draft_id, target.target_id))
            return
        if not target.is_up:
            again = partial(self._dial, draft, target, boot, min(MAX_REDIAL_US, 2 * pause_us))
            world.clock.call_after(pause_us, again)
            return
        stream = world.network.connect(
            draft.draft_id,
            target.target_id,
            End(draft.receive),
            End(target.receive),
            target.life,
        )
        world.note("dial", stream.link_id, draft.draft_id, target.target_id)
        draft.streams[stream.link_id] = stream
        target.connect(stream)
        target.attach(stream, draft.hello())

    def cut(self, stream: Stream) -> None:
        """The stream ends; either end notices when it does, and the draft dials again."""
        draft, target = self._drafts[stream.draft_id], self._targets[stream.target_id]
        clock, rng = self._world.clock, self._world.rng
        clock.call_after(rng.randrange(NOTICE_US), lambda: target.detach(stream))
        clock.call_after(rng.randrange(NOTICE_US), lambda: self._lose(draft, target, stream))

    def leave(self, draft: SimulatedDraft, stream: Stream) -> None:
        """The draft says goodbye: its last messages arrive, then the stream ends."""
        target = self._targets[stream.target_id]
        at_us = max(
            self._world.clock.now_us + stream.latency_us,
            stream.target_end.blocked_until_us,
            stream.target_end.free_us,
        )
        draft.lose(stream)
        self._pairs.discard((draft.draft_id, stream.target_id))
        self._world.clock.call_at(at_us, lambda: target.detach(stream))

    def draft_died(self, draft: SimulatedDraft, streams: Sequence[Stream]) -> None:
        clock, rng = self._world.clock, self._world.rng
        self._pairs = {pair for pair in self._pairs if pair[0] != draft.draft_id}
        for stream in streams:
            target = self._targets[stream.target_id]
            clock.call_after(rng.randrange(NOTICE_US), partial(target.detach, stream))

    def target_died(self, target: SimulatedTarget, streams: Sequence[Stream]) -> None:
        clock, rng = self._world.clock, self._world.rng
        for stream in streams:
            draft = self._drafts[stream.draft_id]
            clock.call_after(rng.randrange(NOTICE_US), partial(self._lose, draft, target, stream))

    def _lose(self, draft: SimulatedDraft, target: SimulatedTarget, stream: Stream) -> None:
        if stream.link_id in draft.streams:
            draft.lose(stream)
            again = partial(self._dial, draft, target, draft.num_boots, REDIAL_US)
            self._world.clock.call_after(REDIAL_US, again)
