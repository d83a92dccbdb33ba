"""Recent outputs of one replica, to look texts up in: per cache salt and adapter, bounded.

What one cache salt's requests said must not be visible in the speed of another's, as with the
prefix cache; nor are the words of two adapters alike. Knows no request and no clock.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence

from paceline.proposers.suffix_tree import Place, SuffixTree

# More cache salts (times adapters) than these: that which was told longest ago is forgotten.
MAX_NAMESPACES = 16
# Tokens of outputs that wait to be learnt; the oldest are given up first.
MAX_PENDING_TOKENS = 65_536

_Namespace = tuple[str, str]


class RecentOutputs:
    """At most `max_tokens` tokens in each namespace, a separator per output among them.

    The oldest go first, but a suffix tree cannot lose a text cheaply: there are two, of half the
    size each, and when the newer one is full, the older one goes. Memory is at most MAX_NAMESPACES
    * max_tokens * `suffix.MAX_TOKEN_BYTES`, and what waits to be learnt. To learn takes
    O(max_depth) steps a token, so outputs can be put off and learnt a part at a time; `find` takes
    O(max_depth * log(max_depth)).

    `num_pending`: tokens that are put off. `num_unlearnt`: outputs that were not learnt, or not to
    their ends, since too many waited or all was forgotten meanwhile. `num_forgotten`: trees that
    went for want of room.
    """

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self._max_tree_tokens = max_tokens // 2
        self._max_depth = max_depth
        self._trees: dict[_Namespace, list[SuffixTree]] = {}
        self._pending: deque[tuple[_Namespace, Sequence[int]]] = deque()
        # Has a part of the first that is pending: the last tree of the last namespace.
        self._open: SuffixTree | None = None
        self._num_learnt = 0  # of that output
        self.num_pending = 0
        self.num_unlearnt = 0
        self.num_forgotten = 0

    @property
    def num_tokens(self) -> int:
        """In all namespaces, the separators behind outputs among them, the open one's as well."""
        num_tokens = sum(len(tree) for trees in self._trees.values() for tree in trees)
        return num_tokens + (self._open is not None)

    def restart(self, max_tokens: int, max_depth: int) -> None:
        """With other limits, and nothing in it or waiting."""
        self._max_tree_tokens, self._max_depth = max_tokens // 2, max_depth
        self._trees.clear()
        while self._pending:
            self._give_up_first()

    def add(self, token_ids: Sequence[int], cache_salt: str = "", adapter: str = "") -> None:
        """An output that is finished; of a long one, the end. Learnt now, with all that wait."""
        self.put_off(token_ids, cache_salt, adapter)
        self.learn(self.num_pending)

    def put_off(self, token_ids: Sequence[int], cache_salt: str = "", adapter: str = "") -> None:
        """The same, to be learnt when there is time."""
        token_ids = token_ids[max(0, len(token_ids) - self._max_tree_tokens + 1) :]
        if not token_ids or self._max_tree_tokens < 2:
            return
        self._pending.append(((cache_salt, adapter), token_ids))
        self.num_pending += len(token_ids)
        while self.num_pending > MAX_PENDING_TOKENS and len(self._pending) > 1:
            self._give_up_first()

    def learn(self, max_tokens: int, room: int = sys.maxsize) -> int:
        """At most so many of the tokens that were put off; returns how many.

        `room`: most of all namespaces together. Older outputs make it, never the one that is
        learnt, and no tree may take more than half of it: of a longer output, the end.
        """
        left = max_tokens
        while left > 0 and self._pending:
            if self._open is None:
                self._open = self._open_first(room // 2)
            if self._open is None:
                break
            _, token_ids = self._pending[0]
            part = token_ids[self._num_learnt : self._num_learnt + left]
            while self.num_tokens + len(part) > room and self._oldest() is not self._open:
                self.forget_oldest()
            part = part[: max(0, room - self.num_tokens)]
            if not part:
                break
            self._open.extend(part)
            self._num_learnt += len(part)
            left -= len(part)
            self.num_pending -= len(part)
            if self._num_learnt == len(token_ids):
                self._end_first()
        return max_tokens - left

    def forget_oldest(self) -> bool:
        """A half of what the namespace that was told longest ago has; False: there is nothing."""
        if not self._trees:
            return False
        namespace, trees = next(iter(self._trees.items()))
        oldest = trees.pop(0)
        if not trees:
            del self._trees[namespace]
        if oldest is self._open:
            self._give_up_first()
        self.num_forgotten += 1
        return True

    def _oldest(self) -> SuffixTree:
        return next(iter(self._trees.values()))[0]

    def _give_up_first(self) -> None:
        self.num_pending -= len(self._pending[0][1]) - self._num_learnt
        self.num_unlearnt += 1
        self._end_first()

    def _end_first(self) -> None:
        """The first that is pending is done with."""
        self._pending.popleft()
        if self._open is not None:
            self._open.separate()
        self._open, self._num_learnt = None, 0

    def _open_first(self, most: int) -> SuffixTree | None:
        """A tree for the first that is pending, within `most`; None: that is too little."""
        most = min(most, self._max_tree_tokens)
        if most < 2:
            return None
        namespace, token_ids = self._pending[0]
        end = token_ids[max(0, len(token_ids) - most + 1) :]
        self._pending[0] = namespace, end
        self.num_pending -= len(token_ids) - len(end)
        return self._tree_for(namespace, len(end) + 1, most)

    def _tree_for(self, namespace: _Namespace, num_tokens: int, most: int) -> SuffixTree:
        """Where so many more have room within `most`."""
        trees = self._trees.pop(namespace, [])
        if not trees or len(trees[-1]) + num_tokens > most:
            self.num_forgotten += len(trees) > 1 and most < self._max_tree_tokens
            trees = [*trees[-1:], SuffixTree(self._max_depth)]
        self._trees[namespace] = trees
        if len(self._trees) > MAX_NAMESPACES:
            del self._trees[next(iter(self._trees))]
        return trees[-1]

    def find(
        self, suffix: Sequence[int], cache_salt: str = "", adapter: str = ""
    ) -> Iterator[tuple[SuffixTree, Place]]:
        """Where the longest suffix of `suffix` occurred, the newer outputs first."""
        for tree in reversed(self._trees.get((cache_salt, adapter), [])):
            place = tree.find(suffix)
            if place is not None:
                yield tree, place
