"""Suffix decoding: what followed most often, in the text itself and in recent outputs.

After Oliaro et al. 2024: the more tokens of the text's end have occurred before, the more are
proposed. Knows no target; `recent_outputs` keeps what others said.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

from paceline.proposers.recent_outputs import RecentOutputs
from paceline.proposers.suffix_tree import SuffixTree

# A remembered token's share of a tree, at most: text, two nodes and their table entries.
MAX_TOKEN_BYTES = 384


class SuffixProposer:
    """Proposes from the longest match of its own text's end, or from the recent outputs' if more
    of those tokens are expected to be right.

    At most max(1, `max_spec_factor` * tokens of the match) are proposed, none behind a path whose
    observed share is under `min_token_prob`. Matches have fewer than `max_tree_depth` tokens.
    `cache_salt` and `adapter`: whose recent outputs these are. `extend` takes O(max_tree_depth)
    steps a token, `propose` O(max_tree_depth * log(max_tree_depth) + max_tokens).
    """

    def __init__(
        self,
        max_tree_depth: int,
        max_spec_factor: float,
        min_token_prob: float,
        recent: RecentOutputs | None = None,
        cache_salt: str = "",
        adapter: str = "",
    ) -> None:
        self._tree = SuffixTree(max_tree_depth)
        self._end = array("i")
        self._max_depth = max_tree_depth
        self._factor, self._min_prob = max_spec_factor, min_token_prob
        self._recent = recent
        self._namespace = (cache_salt, adapter)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tree.extend(token_ids)
        self._end.extend(token_ids[-self._max_depth :])
        del self._end[: -self._max_depth]

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        best: tuple[int, ...] = ()
        most = 0.0
        places = [(self._tree, place) for place in islice(self._tree.matches(), 1)]
        if self._recent is not None:
            places += self._recent.find(self._end, *self._namespace)
        for tree, place in places:
            limit = min(max_tokens, max(1, int(self._factor * place.length)))
            found = tree.continuation(place, limit, self._min_prob)
            if found.expected > most:
                best, most = found.token_ids, found.expected
        return best
