"""Who runs, who waits and who must give way, by KV blocks and places. Pure.

A sequence starts when its text fits into the blocks that are free; what it writes later takes
blocks as it goes. When they run out, the newest running sequence gives its own back and waits at
the front of the queue: nothing of its text is lost, only KV that can be computed again. The
oldest one always goes on, because what can never fit was refused at the door.
Knows no proposals, no passes and no engine: the number of free blocks is told.
"""

from __future__ import annotations

from collections import deque

from paceline.config import TargetConfig
from paceline.engine.base import EngineInfo
from paceline.errors import OverloadedError, RequestError
from paceline.protocol.link import LinkState
from paceline.target.endings import no_place
from paceline.target.sequence import Sequence
from paceline.target.stats import SchedulerStats


class Roster:
    """All sequences of a target, by session id. Both queues are in order of arrival."""

    def __init__(self, info: EngineInfo, config: TargetConfig, stats: SchedulerStats) -> None:
        self._config = config
        self._stats = stats
        self._block_size = info.block_size
        # Kept free when a sequence starts, for what those that run will write.
        self._watermark = int(config.kv_watermark * info.num_blocks)
        self._num_blocks = self._free_blocks = info.num_blocks
        self._released: list[int] = []
        self.sequences: dict[int, Sequence] = {}
        self.running: list[int] = []
        self.waiting: deque[int] = deque()

    # -- blocks -----------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Free by the engine's last word, less what running sequences will take for their text.

        What was released since is not counted before the engine has said so. It may be below 0:
        a first sequence runs whatever else is promised.
        """
        running = map(self.sequences.__getitem__, self.running)
        return self._free_blocks - sum(map(self._missing_blocks, running))

    def learn_free_blocks(self, num_free_blocks: int) -> None:
        """The engine's count; a block that only the prefix cache holds is free."""
        self._free_blocks = num_free_blocks

    def room(self, sequence: Sequence, free_blocks: int) -> int:
        """Proposals that fit behind the text, into its last block and `free_blocks` more."""
        length = sequence.session.committed_len
        return (self._blocks(length) + max(0, free_blocks)) * self._block_size - length

    def num_new_blocks(self, sequence: Sequence, num_draft_tokens: int) -> int:
        """Blocks that so many proposals take beyond those of the text."""
        length = sequence.session.committed_len
        return self._blocks(length + num_draft_tokens) - self._blocks(length)

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that the text needs beyond those that the sequence has.

        A prompt found in the prefix cache takes free blocks too (they are not free any more),
        but not if a running sequence holds them already.
        """
        needed = self._blocks(sequence.session.committed_len)
        if sequence.cached_len:
            return needed - self._blocks(sequence.cached_len)
        leader = sequence.leader
        if sequence.num_preemptions and not sequence.is_running:
            # Room to go on, or it would soon be back here.
            return min(needed + 1, self._blocks(sequence.session.end_len))
        has_leader = leader is not None and leader.session.link is not LinkState.CLOSED
        if has_leader and not sequence.num_preemptions:
            return needed - sequence.num_shared_tokens // self._block_size
        return needed

    def _blocks(self, length: int) -> int:
        return -(-length // self._block_size)

    def take_released(self) -> list[int]:
        """Engine sequences to free, before the next pass."""
        released, self._released = self._released, []
        return released

    # -- coming and going -------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Waiting sequences that have never run: those that `target.max_queued_seqs` counts."""
        return sum(not self.sequences[i].num_preemptions for i in self.waiting)

    def check_room(
        self, lengths: list[int], num_shared_tokens: int, is_background: bool = False
    ) -> None:
        """Whether the choices of a new request, whose texts are so long, may come in, all of
        them: by numbers alone, so that a refusal costs next to nothing.

        For a client, those in the background are as good as gone. Raises `OverloadedError` when
        more than `target.max_queued_seqs` would have to wait (any, of a request in the background),
        and `RequestError` when that would be so even if nobody else were here.
        """
        n, num_shared_blocks = len(lengths), num_shared_tokens // self._block_size
        missing = [
            self._blocks(length) - (num_shared_blocks if index else 0)
            for index, length in enumerate(lengths)
        ]
        max_queued = self._config.max_queued_seqs
        at_best = self._num_startable(missing, 0, self._num_blocks)
        if n - at_best > max_queued:
            raise RequestError(
                f"n must be at most {at_best + max_queued} for this prompt: the KV cache lets"
                f" {at_best} start at once and {max_queued} may queue (target.max_queued_seqs)",
                "n",
            )
        num_queued, num_startable = self.num_queued, 0
        background = [] if is_background else self._background()
        if background:
            num_queued, num_startable = self._count_without(background, missing)
        elif not self.waiting:  # else those come first
            num_startable = self._num_startable(missing, len(self.running), self.num_free_blocks)
        if is_background and num_startable < n:
            raise no_place()
        if num_queued + n - num_startable > max_queued:
            self._stats.num_refused += 1
            raise OverloadedError(
                f"{self.num_queued} sequences are queued (target.max_queued_seqs)",
                None,
                "queue_full",
                retry_after_s=1,
            )

    def _count_without(self, background: list[Sequence], missing: list[int]) -> tuple[int, int]:
        """How many would be queued, and how many of the new ones would start, if those in the
        background were gone, as they are soon when somebody waits.

        Blocks that they share with a client count as theirs: then one more may wait for a while.
        """
        leaving = [s for s in background if s.is_running]
        free = self.num_free_blocks
        free += sum(self._missing_blocks(s) + self._blocks(s.cached_len) for s in leaving)
        everybody = map(self.sequences.__getitem__, self.waiting)
        waiting = [sequence for sequence in everybody if not sequence.is_background]
        needed = [*map(self._missing_blocks, waiting), *missing]
        num_started = self._num_startable(needed, len(self.running) - len(leaving), free)
        num_queued = sum(not sequence.num_preemptions for sequence in waiting[num_started:])
        return num_queued, max(0, num_started - len(waiting))

    def enqueue(self, group: list[Sequence]) -> None:
        """Let the sequences of one request, for which there is room, wait for their turn."""
        for sequence in group:
            session_id = sequence.session.session_id
            self.sequences[session_id] = sequence
            self.waiting.append(session_id)

    def _num_startable(self, missing: list[int], num_running: int, free: int) -> int:
        """How many new sequences would start at once, which need so many blocks each."""
        for count, missing_blocks in enumerate(missing):
            if not self._may_start(missing_blocks, num_running + count, free):
                return count
            free -= missing_blocks
        return len(missing)

    def _may_start(self, missing_blocks: int, num_running: int, free: int) -> bool:
        if num_running == 0:
            return True  # alone it fits, or it had been refused
        if num_running >= self._config.max_num_seqs:
            return False
        return missing_blocks <= free - self._watermark

    def overdue(self, now_us: int) -> list[int]:
        """Who has waited too long for a request's first place, in order of arrival."""
        overdue = []
        for session_id in self.waiting:
            deadline_us = self.sequences[session_id].queue_deadline_us
            if deadline_us > now_us:
                break  # and so is everybody's behind
            if deadline_us:
                overdue.append(session_id)
        return overdue

    def giving_way(self) -> list[int]:
        """Whom nobody waits for, when somebody has to wait."""
        if not self.waiting:
            return []
        return [s.session.session_id for s in self._background() if not s.is_aborted]

    def _background(self) -> list[Sequence]:
        """Those that no client waits for, in the order in which they started."""
        everybody = map(self.sequences.__getitem__, (*self.running, *self.waiting))
        return [sequence for sequence in everybody if sequence.is_background]

    def admit(self) -> list[Sequence]:
        """Start what may start, first come first served; returns it."""
        admitted: list[Sequence] = []
        if not self.waiting:
            return admitted
        free = self.num_free_blocks
        while self.waiting:
            sequence = self.sequences[self.waiting[0]]
            missing_blocks = self._missing_blocks(sequence)
            if not self._may_start(missing_blocks, len(self.running), free):
                break
            free -= missing_blocks
            self.running.append(self.waiting.popleft())
            sequence.is_running = True
            self._stop_waiting(sequence)
            admitted.append(sequence)
        return admitted

    def _stop_waiting(self, sequence: Sequence) -> None:
        """Its request has a place: neither it nor the choices behind it can be overdue."""
        if not sequence.queue_deadline_us:
            return
        sequence.queue_deadline_us = 0
        for session_id in self.waiting:
            other = self.sequences[session_id]
            if other.first_session_id != sequence.first_session_id:
                break
            other.queue_deadline_us = 0

    def remove(self, session_id: int) -> Sequence:
        """The sequence has ended."""
        sequence = self.sequences.pop(session_id)
        if sequence.is_running:
            self._stop(sequence)
        else:
            self.waiting.remove(session_id)
        return sequence

    def preempt_newest(self) -> Sequence:
        """Take the blocks of the sequence that started last; it is the first to start again.

        One in the background gives way before any client's: for good, as it then waits.
        """
        background = [s for s in self._background() if s.is_running]
        sequence = background[-1] if background else self.sequences[self.running[-1]]
        self._stop(sequence)
        sequence.preempt()
        if background:
            self.waiting.append(sequence.session.session_id)
        else:
            self.waiting.appendleft(sequence.session.session_id)
        return sequence

    def drop_cache(self, sequence: Sequence) -> None:
        """Take the blocks of a running sequence, which keeps its place."""
        self._released.append(sequence.session.session_id)
        sequence.preempt()

    def _stop(self, sequence: Sequence) -> None:
        sequence.is_running = False
        self.running.remove(sequence.session.session_id)
        self._released.append(sequence.session.session_id)
