"""What a draft prepares for corrections: branches beside its main text. Pure.

A branch begins with a *runner-up*: the token that the draft holds for next likely at a position.
If the target commits that one in the place of the draft's own proposal, the branch is the main
text at once, with all that was drafted and sent behind it. In the matching modes a proposal is a
function of its context, so a branch holds exactly what the draft would draw after the correction,
only earlier. It can cost time, never a token. (In the rejection modes draws have noise of their
own and must not be made ahead: there are no branches.)

Each branch is an engine sequence of its own. It does not fork a cache: its first pass asks for the
whole text, finds the full blocks of the main text in the engine's prefix cache and computes the
rest, at most `block_size` rows. A branch that does not find them is given up.

Does not know messages, links, models or time; the main text belongs to `DraftSession`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.errors import LocalProtocolError
from paceline.protocol.draft_work import DraftWork, WorkResult, check_result
from paceline.protocol.messages import MAX_BRANCH_TOKENS
from paceline.protocol.token_log import TokenLog, extend_hash

# Branches of one sequence at a time.
MAX_BRANCHES = 12
# The second-best runner-up of a position is about as likely as the best one so many positions
# further: correction takes 0.75^5, a quarter, of the chance away.
_RANK_DISTANCE = 5


@dataclass(slots=True, eq=False)
class Branch:
    """The main text up to `position`, then `token_ids`: a runner-up and what follows it.

    `rank` counts the runner-ups of that position that come before. Entry j of `hashes` covers
    the text through `token_ids[j]`; entry j of `runner_ups` are the runner-ups of that token.
    `sequence_id` names the engine's sequence, None while nothing was computed. `num_computed` and
    `sent_len` count tokens of the text as in `DraftSession`.
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
    work: DraftWork | None = None

    @property
    def end(self) -> int:
        return self.position + len(self.token_ids)

    @property
    def is_begun(self) -> bool:
        """Whether the engine has computed something of it, or does so now."""
        return self.num_computed > 0 or self.work is not None

    def num_rows(self, block_size: int) -> int:
        """Rows that its next pass computes, if the prefix cache has the main text."""
        return 1 if self.num_computed else self.position % block_size + 1

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

    `fan_out`: runner-ups of a position that get a branch. `released` are engine sequences that
    are no longer needed, until the owner takes them.
    """

    fan_out: int = 0
    live: list[Branch] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
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
            (offset + _RANK_DISTANCE * rank, rank, first + offset, token_id)
            for offset, ranked in enumerate(runner_ups)
            for rank, token_id in enumerate(ranked[: self.fan_out])
            if (first + offset, token_id) not in self._tried
        ]
        for _, rank, position, token_id in sorted(wanted)[: MAX_BRANCHES - len(self.live)]:
            self._tried.add((position, token_id))
            hashes = [extend_hash(main.hash_at(position), token_id)]
            branch = Branch(position, rank, [token_id], hashes, [()], sent_len=position + 1)
            self.live.append(branch)

    def ready(self, committed_len: int, limit: int) -> Iterator[tuple[int, Branch]]:
        """(distance, branch) of those that may draw a token now.

        `limit`: no token at or beyond it. The distance is how many things must go as expected
        before that token is of use. Behind a correction the target can use about half of what a
        draft may be ahead: no branch gets longer.
        """
        depth = (limit - committed_len + 1) // 2
        for branch in self.live if self._num_tokens_left > 0 else ():
            if branch.work is None and branch.end < min(limit, branch.position + 1 + depth):
                yield branch.end - committed_len + _RANK_DISTANCE * branch.rank, branch

    def begin_work(self, branch: Branch, main: TokenLog, prompt_len: int, rows: int) -> DraftWork:
        """The branch's share of the next pass; it must have a sequence id by now."""
        if branch.work is not None or branch.sequence_id is None:
            raise LocalProtocolError("begin_work of a branch that works or has no sequence")
        is_first = branch.num_computed == 0
        start = branch.num_computed = 0 if is_first else branch.end - 1
        branch.work = DraftWork(
            start=start,
            token_ids=branch.text(main) if is_first else (branch.token_ids[-1],),
            max_rows=rows,
            output_index=branch.end - prompt_len,
            context_hash=branch.hashes[-1],
            round=0,
            num_runner_ups=self.fan_out,
        )
        return branch.work

    def end_work(self, branch: Branch, result: WorkResult, limit: int) -> bool:
        """The pass is done; True when the branch got a token. One that found less in the prefix
        cache than it counted on is given up."""
        work = branch.work
        if work is None:
            raise LocalProtocolError("end_work of a branch without begin_work")
        branch.num_computed = check_result(work, result)
        branch.work = None
        if result.token_id is None:
            self.drop(branch)
            return False
        if branch.end >= limit or self._num_tokens_left == 0:
            return False
        self._num_tokens_left -= 1
        branch.token_ids.append(result.token_id)
        branch.hashes.append(extend_hash(branch.hashes[-1], result.token_id))
        branch.runner_ups.append(result.runner_ups)
        return True

    def find(self, position: int, token_id: int) -> Branch | None:
        """The branch for that correction."""
        for branch in self.live:
            if branch.position == position and branch.token_ids[0] == token_id:
                return branch
        return None

    def named(self, sequence_id: int) -> Branch | None:
        """The branch that is this engine sequence."""
        for branch in self.live:
            if branch.sequence_id == sequence_id:
                return branch
        return None

    def commit(self, end: int) -> None:
        """The main text is committed up to `end`: corrections below it will not come."""
        self._keep(lambda branch: branch.position >= end)
        self._tried = {tried for tried in self._tried if tried[0] >= end}
        self._num_tokens_left = MAX_BRANCH_TOKENS

    def promote(self, branch: Branch, sequence_id: int) -> None:
        """The branch is the main text from now on; what was (`sequence_id`) and all others go."""
        self.live.remove(branch)
        self.clear()
        self.released.append(sequence_id)

    def drop(self, branch: Branch) -> None:
        self._keep(lambda other: other is not branch)

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
        return [branch.sequence_id for branch in self.live if branch.sequence_id is not None]

    def take_released(self) -> list[int]:
        """Engine sequences that are no longer needed."""
        released, self.released = self.released, []
        return released

    def _keep(self, is_kept: Callable[[Branch], bool]) -> None:
        gone = [branch for branch in self.live if not is_kept(branch)]
        if not gone:
            return
        self.live = [branch for branch in self.live if is_kept(branch)]
        self.released += [b.sequence_id for b in gone if b.sequence_id is not None]
