"""Proposals for texts that the target may yet commit, held beside the window. Pure.

A draft that fans out also proposes what would follow a likely correction. Such a *branch* fits no
log when it arrives: its context ends with a token that nobody has committed. It is kept here token
by token, each under the position and the hash of all tokens before it, so that parts of a branch
join by themselves, whatever messages brought them and in whatever order. When a commit ends where
one begins, it becomes the window at once: that correction costs no round trip.

Nothing here is owed: what is dropped or overwritten is asked for again if it is missed. It does
not know which texts are likely, epochs, credits or time.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.protocol.messages import MAX_BRANCH_TOKENS
from paceline.protocol.token_log import extend_hash

MAX_ALTERNATES = MAX_BRANCH_TOKENS  # tokens held for one sequence; the oldest give way


class Alternates:
    """Of one sequence. Invariant: at most `max_tokens` are held."""

    def __init__(self, max_tokens: int = MAX_ALTERNATES) -> None:
        self.max_tokens = max_tokens
        # By (position, hash of all tokens before it), the oldest first.
        self._held: dict[tuple[int, int], int] = {}
        self.num_evicted = 0  # tokens that gave way to newer ones, since start

    def __len__(self) -> int:
        return len(self._held)

    @property
    def positions(self) -> set[int]:
        """What something is held for."""
        return {position for position, _ in self._held}

    def put(self, start: int, context_hash: int, token_ids: Sequence[int]) -> int:
        """Hold proposals for `start, start + 1, ...`; returns how many of them are new.

        Of two continuations of one context the newer one stays.
        """
        held, num_new = self._held, 0
        for position, token_id in enumerate(token_ids, start):
            key = (position, context_hash)
            if held.get(key) != token_id:
                held.pop(key, None)
                held[key] = token_id
                num_new += 1
            context_hash = extend_hash(context_hash, token_id)
        while len(held) > self.max_tokens:
            del held[next(iter(held))]
            self.num_evicted += 1
        return num_new

    def take(self, start: int, context_hash: int) -> list[int]:
        """What was proposed for `start, start + 1, ...` behind this context, without a gap."""
        taken = []
        while (token_id := self._held.pop((start, context_hash), None)) is not None:
            taken.append(token_id)
            context_hash = extend_hash(context_hash, token_id)
            start += 1
        return taken

    def drop_before(self, position: int) -> None:
        """Forget proposals for what is committed."""
        if self._held:
            self._held = {key: held for key, held in self._held.items() if key[0] >= position}

    def clear(self) -> None:
        self._held.clear()
