"""Recent outputs of one replica, to look texts up in: per cache salt and adapter, bounded.

What one cache salt's requests said must not be visible in the speed of another's, as with the
prefix cache; nor are the words of two adapters alike. Knows no request and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.proposers.suffix_tree import Place, SuffixTree

# More cache salts (times adapters) than these: that which was told longest ago is forgotten.
MAX_NAMESPACES = 16


class RecentOutputs:
    """At most `max_tokens` tokens in each namespace, a separator per output among them.

    The oldest go first, but a suffix tree cannot lose a text cheaply: there are two, of half the
    size each, and when the newer one is full, the older one goes. Memory is at most MAX_NAMESPACES
    * max_tokens * `suffix.MAX_TOKEN_BYTES`. `add` takes O(max_depth) steps a token, `find`
    O(max_depth * log(max_depth)).
    """

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self._max_tree_tokens = max_tokens // 2
        self._max_depth = max_depth
        self._trees: dict[tuple[str, str], list[SuffixTree]] = {}

    @property
    def num_tokens(self) -> int:
        """In all namespaces, the separators between outputs among them."""
        return sum(len(tree) for trees in self._trees.values() for tree in trees)

    def add(self, token_ids: Sequence[int], cache_salt: str = "", adapter: str = "") -> None:
        """An output that is finished, or its part so far; of a long one, the end."""
        token_ids = token_ids[max(0, len(token_ids) - self._max_tree_tokens + 1) :]
        if not token_ids or self._max_tree_tokens < 2:
            return
        trees = self._trees.pop((cache_salt, adapter), [])
        if not trees or len(trees[-1]) + len(token_ids) + 1 > self._max_tree_tokens:
            trees = [*trees[-1:], SuffixTree(self._max_depth)]
        trees[-1].extend(token_ids)
        trees[-1].separate()
        self._trees[cache_salt, adapter] = trees
        if len(self._trees) > MAX_NAMESPACES:
            del self._trees[next(iter(self._trees))]

    def find(
        self, suffix: Sequence[int], cache_salt: str = "", adapter: str = ""
    ) -> Iterator[tuple[SuffixTree, Place]]:
        """Where the longest suffix of `suffix` occurred, the newer outputs first."""
        for tree in reversed(self._trees.get((cache_salt, adapter), [])):
            place = tree.find(suffix)
            if place is not None:
                yield tree, place
