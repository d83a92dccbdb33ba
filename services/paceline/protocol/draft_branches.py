"""What a draft prepares for corrections: branches beside its main text. Pure.

A branch begins with a *runner-up*: the token that the draft holds for next likely at a position.
If the target commits that one in the place of the draft's own proposal, the branch is the main
text at once, with all that was drafted and sent behind it. In the matching modes a proposal is a
function of its context, so a branch holds exactly what the draft would draw after the correction,
only earlier. It can cost time, never a token. (In the rejection modes draws have noise of their
own and must not be made ahead: there are no branches.)

Each branch is an engine sequence of its own, a fork of the main text's: whatever it begins with is
in the cache, and its first pass computes the runner-up alone.

Does not know messages, links, models or time; the main text belongs to `DraftSession`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.errors import LocalProtocolError
from paceline.protocol.draft_work import DraftWork, WorkResult, check_result
from paceline.protocol.messages import MAX_BRANCH_TOKENS
from paceline.protocol.token_log import TokenLog, extend_hash

# Branches of one sequence at a time.
MAX_BRANCHES = 12
# The second-best runner-up of a position is about as likely as the best one so many positions
# further: correction takes 0.75^5, a quarter, of the chance away.
RANK_DISTANCE = 5


@dataclass(slots=True, eq=False)
class Branch:
    """The main text up to `position`, then `token_ids`: a runner-up and what follows it.

    `rank` counts the runner-ups of that position that come before. Entry j of `hashes` covers
    the text through `token_ids[j]`; entry j of `runner_ups` are the runner-ups of that token.
    `sequence_id` names the engine's sequence, None while nothing was computed. `num_computed` and
    `sent_len` count tokens of the text as in `DraftSession`. It grows to `max_end` for now.
    Invariant: while it lives, the main text agrees with it below `position` and not at it.
    """

    position: int
    rank: int
    token_ids: list[int]
    hashes: list[int]
    runner_ups: list[tuple[int, ...]]
    sent_len: int
    sequence_id: int | None = None
    num_computed: int = 0
    max_end: int = 0
    work: DraftWork | None = None

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)

    @property
    def is_begun(self) -> bool:
        """Whether the engine has computed something of it, or does so now."""
        return self.num_computed > 0 or self.work is not None

    def text(self, main: TokenLog) -> tuple[int, ...]:
        return main.slice(0, self.position) + tuple(self.token_ids)

    def take_unsent(self) -> tuple[int, int, tuple[int, ...]] | None:
        """(start, hash of what is before, tokens) that the target was not sent yet."""
        if self.sent_len >= self.end:
            return None
        start, self.sent_len = self.sent_len, self.end
        index = start - self.position  # >= 1: the runner-up itself is no proposal
        return start, self.hashes[index - 1], tuple(self.token_ids[index:])

    def cancel_work(self) -> None:
        """The pass failed; nothing of it is in the cache."""
        self.work = None


@dataclass
class Branches:
    """The branches of one sequence.

    `fan_out`: runner-ups of a position that get a branch. `due` are branches to send from.
    `released` are engine sequences that are no longer needed, until the owner takes them.
    """

    fan_out: int = 0
    live: list[Branch] = field(default_factory=list)
    due: dict[Branch, None] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    _by_sequence: dict[int, Branch] = field(default_factory=dict)
    # (position, token) that had a branch: what was given up does not come back.
    _tried: set[tuple[int, int]] = field(default_factory=set)
    # What may still be drawn before the next verdict: the target holds no more.
    _num_tokens_left: int = MAX_BRANCH_TOKENS

    def set_fan_out(self, fan_out: int) -> None:
        """So many runner-ups of a position from now on; 0: no branches at all."""
        self.fan_out = fan_out
        self._keep(lambda branch: branch.rank < fan_out)

    def grow(self, main: TokenLog, first: int, runner_ups: Sequence[tuple[int, ...]]) -> None:
        """New branches where there is a place; entry j belongs to position `first + j`."""
        if self.fan_out == 0 or len(self.live) >= MAX_BRANCHES:
            return
        wanted = [
            (offset + RANK_DISTANCE * rank, rank, first + offset, token_id)
            for offset, ranked in enumerate(runner_ups)
            for rank, token_id in enumerate(ranked[: self.fan_out])
            if (first + offset, token_id) not in self._tried
        ]
        for _, rank, position, token_id in sorted(wanted)[: MAX_BRANCHES - len(self.live)]:
            self._tried.add((position, token_id))
            hashes = [extend_hash(main.hash_at(position), token_id)]
            branch = Branch(position, rank, [token_id], hashes, [()], sent_len=position + 1)
            self.live.append(branch)

    def ready(self, committed_len: int, limit: int) -> list[tuple[int, Branch]]:
        """(distance, branch) of those that may draw a token now.

        `limit`: no token at or beyond it. The distance is how many things must go as expected
        before that token is of use. No branch gets longer than what the pass after its correction
        can verify.
        """
        depth = num_verifiable(committed_len, limit)
        ready = []
        for branch in self.live:
            branch.max_end = min(limit, branch.position + 1 + depth)
            end = branch.end
            if branch.work is None and end < branch.max_end and self._num_tokens_left > 0:
                ready.append((end - committed_len + RANK_DISTANCE * branch.rank, branch))
        return ready

    def pass_over(self, branch: Branch) -> None:
        """It is ready, but gets no row: what it has is sent before it has more."""
        self.due[branch] = None

    def begin_work(
        self, branch: Branch, sequence_id: int, main_sequence_id: int, prompt_len: int
    ) -> DraftWork:
        """The branch's share of the next pass, one row of the engine's sequence `sequence_id`,
        which is new if the branch has none yet."""
        if branch.work is not None or branch.sequence_id not in (None, sequence_id):
            raise LocalProtocolError("begin_work of a branch that works or is another sequence")
        branch.sequence_id = sequence_id
        self._by_sequence[sequence_id] = branch
        start = branch.end - 1
        branch.work = DraftWork(
            start=start,
            token_ids=(branch.token_ids[-1],),
            max_rows=1,
            output_index=start + 1 - prompt_len,
            context_hash=branch.hashes[-1],
            round=0,
            num_runner_ups=self.fan_out,
            fork_of=None if branch.num_computed else main_sequence_id,
        )
        return branch.work

    def end_work(self, branch: Branch, result: WorkResult, limit: int) -> bool:
        """The pass is done; True when the branch got a token."""
        work = branch.work
        if work is None:
            raise LocalProtocolError("end_work of a branch without begin_work")
        cached_len = check_result(work, result)
        if result.token_id is None and cached_len < work.end:
            raise LocalProtocolError("a branch whose one row was not computed")
        branch.num_computed = cached_len
        branch.work = None
        if result.token_id is None:  # no room for a longer text, nor for the next one's
            self._num_tokens_left = 0
            self.due = dict.fromkeys(self.live)
        if result.token_id is None or branch.end >= limit or self._num_tokens_left == 0:
            return False
        self._num_tokens_left -= 1
        branch.token_ids.append(result.token_id)
        branch.hashes.append(extend_hash(branch.hashes[-1], result.token_id))
        branch.runner_ups.append(result.runner_ups)
        if self._num_tokens_left == 0:
            self.due = dict.fromkeys(self.live)
        elif branch.end >= branch.max_end:
            self.due[branch] = None
        return True

    def take_due(self) -> Iterable[Branch]:
        """Branches to send from now: they do not grow, or not at once."""
        due, self.due = self.due, {}
        return due

    def find(self, position: int, token_id: int) -> Branch | None:
        """The branch for that correction."""
        for branch in self.live:
            if branch.position == position and branch.token_ids[0] == token_id:
                return branch
        return None

    def named(self, sequence_id: int) -> Branch | None:
        """The branch that is this engine sequence."""
        return self._by_sequence.get(sequence_id)

    def commit(self, end: int) -> None:
        """The main text is committed up to `end`: corrections below it will not come."""
        self._keep(lambda branch: branch.position >= end)
        if self._tried:
            self._tried = {tried for tried in self._tried if tried[0] >= end}
        self._num_tokens_left = MAX_BRANCH_TOKENS

    def promote(self, branch: Branch, sequence_id: int) -> None:
        """The branch is the main text from now on; what was (`sequence_id`) and all others go."""
        self.live.remove(branch)
        self.due.pop(branch, None)
        if branch.sequence_id is not None:
            del self._by_sequence[branch.sequence_id]
        self.clear()
        self.released.append(sequence_id)

    def clear(self) -> None:
        """The main text is another one behind the committed tokens: no branch fits it."""
        self._keep(lambda _: False)
        self._tried.clear()

    def give_up(self) -> bool:
        """Drop all that the engine holds anything of; False when there is none."""
        num_live = len(self.live)
        self._keep(lambda branch: branch.sequence_id is None)
        return len(self.live) < num_live

    def sequences(self) -> list[int]:
        """Engine sequences in use."""
        return list(self._by_sequence)

    def take_released(self) -> list[int]:
        """Engine sequences that are no longer needed."""
        released, self.released = self.released, []
        return released

    def _keep(self, is_kept: Callable[[Branch], bool]) -> None:
        gone = [branch for branch in self.live if not is_kept(branch)]
        if not gone:
            return
        self.live = [branch for branch in self.live if is_kept(branch)]
        for branch in gone:
            self.due.pop(branch, None)
            if branch.sequence_id is not None:
                del self._by_sequence[branch.sequence_id]
                self.released.append(branch.sequence_id)


def num_verifiable(committed_len: int, limit: int) -> int:
    """How many proposals a pass verifies, as far as the credit tells. For K of them a target gives
    2 K + 1: those, the token behind them, and as many again for the next pass."""
    return max(0, limit - committed_len) // 2
