"""Room for so many choices at a time, of a gateway or of one API key. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import OverloadedError


class Places:
    """`limit` None: no end of them; `name` is its name. `sentence` says how many are taken, with a
    `{num}` in it."""

    def __init__(self, limit: int | None, sentence: str, name: str) -> None:
        self.limit = limit
        self.name = name
        self.num_taken = 0
        self._sentence = sentence

    @contextmanager
    def take(self, num_choices: int) -> Iterator[None]:
        """Hold so many until the block is left. Raises OverloadedError."""
        self.refuse_when_full(num_choices)
        self.num_taken += num_choices
        try:
            yield
        finally:
            self.num_taken -= num_choices

    def refuse_when_full(self, num_choices: int = 1) -> None:
        """Raises OverloadedError while so many places are not free."""
        if self.limit is not None and self.num_taken + num_choices > self.limit:
            raise OverloadedError(
                f"{self._sentence.format(num=self.num_taken)}, of {self.limit} at most; each of "
                "a prompt's 'n' choices counts. Try again.",
                None,
                "too_many_requests",
                retry_after_s=1,
                limit=self.name,
            )
