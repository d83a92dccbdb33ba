"""Recent outputs of one replica, to look texts up in: per cache salt and adapter, bounded.

What one cache salt's requests said must not be visible in the speed of another's, as with the
prefix cache; nor are the words of two adapters alike. Knows no request and no clock.
"""

from __future__ import annotations

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
    * max_tokens * `suffix.MAX_TOKEN_BYTES`. To learn takes O(max_depth) steps a token, so outputs
    can be put off and learnt a part at a time; `find` takes O(max_depth * log(max_depth)).

    `num_pending`: tokens that are put off; `num_given_up`: outputs that were not learnt, or not to
    their ends, since too many were.
    """

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self._max_tree_tokens = max_tokens // 2
        self._max_depth = max_depth
        self._trees: dict[_Namespace, list[SuffixTree]] = {}
        self._pending: deque[tuple[_Namespace, Sequence[int]]] = deque()
        self._open: SuffixTree | None = None  # has a part of the first that is pending
        self._num_learnt = 0  # of that output
        self.num_pending = 0
        self.num_given_up = 0

    @property
    def num_tokens(self) -> int:
        """In all namespaces, the separators between outputs among them."""
        return sum(len(tree) for trees in self._trees.values() for tree in trees)

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
            self.num_pending -= len(self._pending[0][1]) - self._num_learnt
            self.num_given_up += 1
            self._end_first()

    def learn(self, max_tokens: int) -> int:
        """At most so many of the tokens that were put off; returns how many."""
        left = max_tokens
        while left > 0 and self._pending:
            namespace, token_ids = self._pending[0]
            if self._open is None:
                self._open = self._tree_for(namespace, len(token_ids) + 1)
            part = token_ids[self._num_learnt : self._num_learnt + left]
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
            self.num_pending -= len(self._pending[0][1]) - self._num_learnt
            self.num_given_up += 1
            self._end_first()
        return True

    def _end_first(self) -> None:
        """The first that is pending is done with."""
        self._pending.popleft()
        if self._open is not None:
            self._open.separate()
        self._open, self._num_learnt = None, 0

    def _tree_for(self, namespace: _Namespace, num_tokens: int) -> SuffixTree:
        """Where so many more have room."""
        trees = self._trees.pop(namespace, [])
        if not trees or len(trees[-1]) + num_tokens > self._max_tree_tokens:
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
