"""Which tokens a text has and how often, kept from pass to pass: what the penalties read.

A pass adds a few tokens to a text that may be long, so counting all of it for each row would be
most of a pass's time. Pure; knows ids and positions, no tensor, no cache block and no row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload


class TokenCounts:
    """The distinct ids of a text, in the order of their first places, and their output counts.

    The first `prompt_len` tokens are the prompt, the others output. `token_ids` (int64) and
    `num_in_output` (float64, exact) run parallel; both are to be read only, and copied before the
    next change. Because of the order, a rewind takes ids from the end.
    """

    def __init__(self, prompt_len: int) -> None:
        self.prompt_len = prompt_len
        self.token_ids = array("q")
        self.num_in_output = array("d")
        self._first_places = array("q")
        self._index: dict[int, int] = {}
        # a copy: what a failed pass had counted is in no cache when it is taken back
        self._text = array("q")

    @property
    def length(self) -> int:
        """Tokens counted, the prompt's included."""
        return len(self._text)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Count the tokens that follow."""
        new = array("q", token_ids)
        index_of, times = self._index, self.num_in_output
        for place, token_id in enumerate(new, len(self._text)):
            index = index_of.get(token_id)
            if index is None:
                index = index_of[token_id] = len(times)
                times.append(0.0)
                self.token_ids.append(token_id)
                self._first_places.append(place)
            if place >= self.prompt_len:
                times[index] += 1.0
        self._text.extend(new)

    def rewind(self, length: int) -> None:
        """Take back all but the first `length` tokens; nothing if there are no more than that."""
        while len(self._text) > length:
            token_id = self._text.pop()
            index = self._index[token_id]
            if len(self._text) >= self.prompt_len:
                self.num_in_output[index] -= 1.0
            if self._first_places[-1] == len(self._text):
                del self._index[token_id]
                for column in (self.token_ids, self.num_in_output, self._first_places):
                    column.pop()

    def count(self, token_id: int) -> int:
        """How often an id is in the output."""
        index = self._index.get(token_id)
        return 0 if index is None else int(self.num_in_output[index])


@dataclass(frozen=True, slots=True)
class TextSlice(Sequence[int]):
    """Tokens `first .. end - 1` of a text in two parts, without a copy.

    `head` may grow or be cut afterwards: a slice is good for one pass.
    """

    head: Sequence[int]
    head_len: int
    tail: Sequence[int]
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self._at(self.first + i) for i in range(*index.indices(len(self))))
        return self._at(range(self.first, self.end)[index])

    def __iter__(self) -> Iterator[int]:
        return map(self._at, range(self.first, self.end))

    def _at(self, place: int) -> int:
        return self.head[place] if place < self.head_len else self.tail[place - self.head_len]
