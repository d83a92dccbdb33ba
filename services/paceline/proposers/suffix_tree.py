"""How often each run of at most `max_depth` tokens occurred in a growing text: a suffix tree.

Paths are compressed: a node's edge is a stretch of the text. All suffixes of the text that
occurred before, at most `max_depth` - 1, are walkers in the tree; a token moves each of them by one
step. So a token costs O(max_depth) steps (amortized; typically as many as the longest match has
tokens), and adds at most two nodes: where a walker leaves the known paths. Knows no policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# No token: stands between two texts in one tree, and nothing is followed past it.
SEPARATOR = -1
_ROOT = 0
_TOKEN_BITS = 32


class Place(NamedTuple):
    """The end of a run of `length` tokens: `offset` tokens into the edge above `node`."""

    node: int
    offset: int
    length: int


class Continuation(NamedTuple):
    """`expected`: of `token_ids`, how many will be right if the text goes on as it used to."""

    token_ids: tuple[int, ...]
    expected: float


class SuffixTree:
    """Counts are exact for every run that has a follower; ties go to what was seen last.

    Memory: at most 2 nodes for each token and separator, see MAX_TOKEN_BYTES in `suffix`.
    """

    def __init__(self, max_depth: int) -> None:
        if max_depth < 2:
            raise ValueError(f"a suffix tree needs {max_depth=} >= 2")
        self._max_depth = max_depth
        self._text = array("i")
        # One entry per node. The edge above it is text[start:end]; a leaf's reaches to max_depth,
        # which may lie behind the text's end. `count`: how often the edge's first token followed
        # the parent's run. `followers`: the sum of its children's counts. `best`: the child with
        # the largest count; the root, which is no child, in a leaf.
        self._start, self._end = array("i", [0]), array("i", [0])
        self._parent, self._best = array("i", [_ROOT]), array("i", [_ROOT])
        self._count, self._followers = array("i", [0]), array("i", [0])
        self._children: dict[int, int] = {}  # (node, first token of the edge) -> node
        # The walkers, longest suffix first: entry j stands behind a run of len - j tokens.
        self._nodes: list[int] = []
        self._offsets: list[int] = []

    def __len__(self) -> int:
        """Tokens and separators."""
        return len(self._text)

    @property
    def num_nodes(self) -> int:
        return len(self._start)

    def matches(self) -> Iterator[Place]:
        """All suffixes of the text that occurred before, the longest first."""
        length = len(self._nodes)
        for node, offset in zip(self._nodes, self._offsets, strict=True):
            yield Place(node, offset, length)
            length -= 1

    def find(self, suffix: Sequence[int]) -> Place | None:
        """The end of the longest suffix of `suffix` (shorter than max_depth) that has occurred;
        None if none has. O(max_depth * log(max_depth)): what occurred, occurred with its tail."""
        suffix = array("i", suffix[1 - self._max_depth :])
        found: Place | None = None
        shortest, longest = 1, len(suffix)
        while shortest <= longest:
            length = (shortest + longest) // 2
            place = self._locate(suffix[-length:])
            if place is None:
                longest = length - 1
            else:
                found, shortest = place, length + 1
        return found

    def continuation(self, place: Place, max_tokens: int, min_prob: float) -> Continuation:
        """What followed most often, step by step, until that path's share is under `min_prob`.

        A run that is unique goes on in the text, also behind the tree's depth; at the text's end
        it goes on as if the tokens found so far stood there.
        """
        text, node, found = self._text, place.node, list[int]()
        position, end = self._start[node] + place.offset, self._end[node]
        prob, expected = 1.0, 0.0
        while len(found) < max_tokens:
            if position == end and self._best[node] != _ROOT:
                child = self._best[node]
                prob *= self._count[child] / self._followers[node]
                if prob < min_prob:
                    break
                node, position, end = child, self._start[child], self._end[child]
            behind = position - len(text)
            token = text[position] if behind < 0 else found[behind]
            if token == SEPARATOR:
                break
            found.append(token)
            expected += prob
            position += 1
        return Continuation(tuple(found), expected)

    def separate(self) -> None:
        """What is appended from here on is another text. Costs a token of the bound."""
        self._append(SEPARATOR)
        self._nodes.clear()
        self._offsets.clear()

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._append(token_id)

    def _append(self, token: int) -> None:
        nodes, offsets = self._nodes, self._offsets
        text, starts, ends, counts = self._text, self._start, self._end, self._count
        index = len(text)
        text.append(token)
        nodes.append(_ROOT)
        offsets.append(0)
        num_left = 0
        for walker, (node, offset) in enumerate(zip(nodes, offsets, strict=True)):
            position = starts[node] + offset
            if position < ends[node]:
                if text[position] == token:
                    offsets[walker] = offset + 1
                    continue
                node = self._split(walker)
            child = self._children.get(node << _TOKEN_BITS | token & 0xFFFFFFFF)
            if child is None:
                depth = len(nodes) - 1 - walker
                child = self._add(node, index, index + self._max_depth - depth, 0)
                num_left = walker + 1  # if a run has left the tree, all longer ones have before
            else:
                nodes[walker], offsets[walker] = child, 1
            counts[child] += 1
            self._followers[node] += 1
            if counts[child] >= counts[self._best[node]]:
                self._best[node] = child
        if len(nodes) - num_left == self._max_depth:
            self._end_of_path(num_left, index + 1)
            num_left += 1
        del nodes[:num_left], offsets[:num_left]

    def _end_of_path(self, walker: int, end: int) -> None:
        """A walker at max_depth stops; from now on the leaf's run stands where it occurred last."""
        node = self._nodes[walker]
        self._start[node], self._end[node] = end - self._offsets[walker], end

    def _split(self, walker: int) -> int:
        """A node where the walker stands, inside an edge; the edge's own node is below it."""
        node, offset = self._nodes[walker], self._offsets[walker]
        start, parent = self._start[node], self._parent[node]
        upper = self._add(parent, start, start + offset, self._count[node])
        if self._best[parent] == node:
            self._best[parent] = upper
        self._parent[node], self._start[node] = upper, start + offset
        self._children[upper << _TOKEN_BITS | self._text[start + offset] & 0xFFFFFFFF] = node
        # Walkers above the split have not been further; shorter ones than this one still may.
        self._nodes[walker] = upper
        num_above = 1
        for other in range(walker + 1, min(walker + offset, len(self._nodes))):
            if self._nodes[other] == node:
                self._nodes[other] = upper
                num_above += 1
        self._count[node] -= num_above
        self._followers[upper], self._best[upper] = self._count[node], node
        return upper

    def _add(self, parent: int, start: int, end: int, count: int) -> int:
        node = len(self._start)
        self._start.append(start)
        self._end.append(end)
        self._parent.append(parent)
        self._best.append(_ROOT)
        self._count.append(count)
        self._followers.append(0)
        self._children[parent << _TOKEN_BITS | self._text[start] & 0xFFFFFFFF] = node
        return node

    def _locate(self, run: array[int]) -> Place | None:
        node, done = _ROOT, 0
        while True:
            child = self._children.get(node << _TOKEN_BITS | run[done])
            if child is None:
                return None
            start = self._start[child]
            size = min(self._end[child] - start, len(run) - done)
            if self._text[start : start + size] != run[done : done + size]:
                return None
            done += size
            if done == len(run):
                return Place(child, size, done)
            node = child
