"""The seam between a target and its local proposers. Values and a protocol; nothing decides here.

A proposer looks at one text and guesses how it goes on. It is a function of what it was told, so
any guess is exact under sample and match (math.md 2c): it can cost time, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LocalProposal:
    """Guesses for the places behind the committed text.

    `parents` empty: a chain. Otherwise a tree: node j goes on from node `parents[j]` (< j), or
    from the committed text if that is -1; both are equally long.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """Most of it that one pass can accept."""
        if not self.parents:
            return len(self.token_ids)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


NOTHING = LocalProposal()


class Proposer(Protocol):
    """Of one sequence. `extend` is told each committed token once, the prompt first."""

    def extend(self, token_ids: Sequence[int]) -> None: ...

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """How everything told so far may go on: at most `max_tokens`, none without a guess."""
