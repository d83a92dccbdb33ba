"""Which draft serves which target: balanced, and with as few changes as balance allows. Pure.

- Every draft serves as many targets as it may (`targets_per_draft`), so each target has its
  `drafts_per_target` whenever there are enough drafts, and more when there are more.
- Two targets differ by at most one draft. Pairs that are there stay, as far as that allows.
- Who drains gets nothing new. A draft that drains keeps its targets and counts for nobody. A
  target that drains keeps its drafts until one of them is needed so that another target has its
  `drafts_per_target`.
- While there are too few drafts for that, the targets with more work come first; a draft's size
  decides only which of them goes there. Work is compared by powers of two: it changes all the
  time, and a pair that moves costs every sequence on it a prefill.

It does not know heartbeats, time or addresses: names are strings.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

Pairs = dict[str, tuple[str, ...]]


def assign(
    targets: Collection[str],
    drafts: Collection[str],
    targets_per_draft: int,
    previous: Mapping[str, Sequence[str]] | None = None,
    *,
    drafts_per_target: int = 1,
    draining: Collection[str] = (),
    work: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Pairs:
    """The targets of each draft, sorted by name; the same for the same arguments in any order.

    `previous`: the pairs that are there; of a draft that has more than it may serve the first
    ones stay. `draining`: targets and drafts. `work`: sequences of each target, `sizes`: sequences
    that each draft holds.
    """
    plan = Assignment(
        targets, drafts, targets_per_draft, previous or {}, drafts_per_target, draining
    )
    return plan.pairs(work or {}, sizes or {})


class Assignment:
    """One computation. `num_steps` counts its inner steps: heap operations and looks at a pair."""

    def __init__(
        self,
        targets: Collection[str],
        drafts: Collection[str],
        targets_per_draft: int,
        previous: Mapping[str, Sequence[str]],
        drafts_per_target: int = 1,
        draining: Collection[str] = (),
    ) -> None:
        leaving = set(draining)
        self._targets = sorted(t for t in targets if t not in leaving)
        self._drafts = sorted(d for d in drafts if d not in leaving)
        self._leaving_targets = leaving.intersection(targets)
        self._leaving_drafts = sorted(leaving.intersection(drafts))
        self._cap = targets_per_draft
        self._wanted = drafts_per_target
        self._previous = previous
        self.num_steps = 0
        # Of the drafts that stay: living targets, then those that leave.
        self._mine: dict[str, list[str]] = {}
        self._rides: dict[str, list[str]] = {}
        self._quota: dict[str, int] = {}
        self._rank: dict[str, int] = {}

    def pairs(self, work: Mapping[str, int], sizes: Mapping[str, int]) -> Pairs:
        known = self._leaving_targets.union(self._targets)
        out = {
            draft: tuple(sorted(set(self._before(draft, known)[: self._cap])))
            for draft in self._leaving_drafts
        }
        self._ride()
        if self._targets:
            self._rank_targets(work)
            self._keep()
            fixed = {draft: frozenset(mine) for draft, mine in self._mine.items()}
            self._fill(fixed, sizes)
            self._even_out(fixed)
        for draft in self._drafts:
            out[draft] = tuple(sorted([*self._mine.get(draft, ()), *self._rides[draft]]))
        return out

    @property
    def is_short(self) -> bool:
        """Whether there are too few drafts for `drafts_per_target`."""
        return sum(self._quota.values()) < self._wanted * len(self._targets)

    def _before(self, draft: str, among: Collection[str]) -> list[str]:
        before = self._previous.get(draft, ())
        self.num_steps += len(before)
        return list(dict.fromkeys(target for target in before if target in among))

    def _ride(self) -> None:
        """Pairs with targets that drain, which take places of their draft while nobody needs
        them; sets how many living targets each draft is to serve."""
        most = min(len(self._targets), self._cap)
        for draft in self._drafts:
            self._rides[draft] = self._before(draft, self._leaving_targets)[: self._cap]
            self._quota[draft] = min(most, self._cap - len(self._rides[draft]))
        wanted = min(self._wanted * len(self._targets), most * len(self._drafts))
        missing = wanted - sum(self._quota.values())
        for draft in sorted(self._drafts, key=lambda draft: -len(self._rides[draft])):
            while missing > 0 and self._rides[draft] and self._quota[draft] < most:
                self._rides[draft].pop()
                more = min(most, self._cap - len(self._rides[draft])) - self._quota[draft]
                self._quota[draft] += more
                missing -= more
                self.num_steps += 1

    def _rank_targets(self, work: Mapping[str, int]) -> None:
        """Who comes first where something is left over. By name alone while there is enough."""
        levels = {t: work.get(t, 0).bit_length() if self.is_short else 0 for t in self._targets}
        ranked = sorted(self._targets, key=lambda target: (-levels[target], target))
        self._rank = {target: rank for rank, target in enumerate(ranked)}
        self._levels = levels

    def _keep(self) -> None:
        """The pairs of before that fit a balanced coverage; what must go is spread over drafts."""
        floor, spare = divmod(sum(self._quota.values()), len(self._targets))
        living = set(self._targets)
        holders: dict[str, list[str]] = {target: [] for target in self._targets}
        for draft in self._drafts:
            self._mine[draft] = self._before(draft, living)[: self._quota[draft]]
            for target in self._mine[draft]:
                holders[target].append(draft)
        first = sorted(
            self._targets,
            key=lambda t: (-self._levels[t], len(holders[t]) <= floor, self._rank[t]),
        )
        allowed = {target: floor + (place < spare) for place, target in enumerate(first)}
        num_dropped = dict.fromkeys(self._drafts, 0)
        for target in self._targets:
            mine = sorted(holders[target], key=lambda draft: (num_dropped[draft], draft))
            for draft in mine[: max(0, len(mine) - allowed[target])]:
                self._mine[draft].remove(target)
                num_dropped[draft] += 1
                self.num_steps += self._cap
            self.num_steps += len(mine)

    def _fill(self, fixed: Mapping[str, frozenset[str]], sizes: Mapping[str, int]) -> None:
        """Give every draft its number of targets, always the least covered that it lacks."""
        coverage = self._coverage()
        heap = [(coverage[target], self._rank[target], target) for target in self._targets]
        heapq.heapify(heap)
        for draft in sorted(self._drafts, key=lambda draft: (-sizes.get(draft, 0), draft)):
            mine, popped = self._mine[draft], []
            while len(mine) < self._quota[draft]:
                count, rank, target = heapq.heappop(heap)
                if target not in fixed[draft]:
                    mine.append(target)
                    count += 1
                popped.append((count, rank, target))
            for entry in popped:
                heapq.heappush(heap, entry)
            self.num_steps += 2 * len(popped)

    def _coverage(self) -> Counter[str]:
        coverage = Counter(dict.fromkeys(self._targets, 0))
        for mine in self._mine.values():
            coverage.update(mine)
        return coverage

    def _even_out(self, fixed: Mapping[str, frozenset[str]]) -> None:
        """Move pairs from the most to the least covered target while they differ by two or more.

        Each move makes the sum of squares smaller, so there are at most as many as pairs.
        """
        holders: dict[str, set[str]] = {target: set() for target in self._targets}
        for draft, mine in self._mine.items():
            for target in mine:
                holders[target].add(draft)
        # Entries whose count is no longer true are thrown away when they come up.
        lows = [(len(drafts), target) for target, drafts in holders.items()]
        highs = [(-count, target) for count, target in lows]
        heapq.heapify(lows)
        heapq.heapify(highs)
        while True:
            low, high = _top(lows, holders, 1), _top(highs, holders, -1)
            if len(holders[high]) - len(holders[low]) <= 1:
                return
            # One exists: more drafts hold `high` than hold `low`. A new pair moves first.
            movable = holders[high] - holders[low]
            draft = min(movable, key=lambda draft: (high in fixed[draft], draft))
            self._mine[draft][self._mine[draft].index(high)] = low
            self.num_steps += len(holders[high]) + self._cap
            holders[high].discard(draft)
            holders[low].add(draft)
            for target in (low, high):
                heapq.heappush(lows, (len(holders[target]), target))
                heapq.heappush(highs, (-len(holders[target]), target))
            self.num_steps += 4


def _top(heap: list[tuple[int, str]], holders: Mapping[str, set[str]], sign: int) -> str:
    """The first target whose entry is true."""
    while heap[0][0] != sign * len(holders[heap[0][1]]):
        heapq.heappop(heap)
    return heap[0][1]
