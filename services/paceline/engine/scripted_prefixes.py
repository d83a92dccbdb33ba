"""The prefix cache of `engine/scripted.py`: hashes of whole blocks. Pure; knows no sequence."""

from __future__ import annotations

States = tuple[int, ...]


class Prefixes:
    """Full blocks that were computed: (hash of what is before, its tokens) -> the hash after each
    of them. Beyond `limit` blocks the oldest goes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: dict[tuple[int, States], States] = {}

    def add(self, state: int, token_ids: States, states: States) -> None:
        key = (state, token_ids)
        self._blocks.pop(key, None)
        self._blocks[key] = states
        if len(self._blocks) > self.limit:
            del self._blocks[next(iter(self._blocks))]

    def find(self, state: int, token_ids: States, size: int) -> list[int]:
        """The hashes after the first tokens, as far as whole blocks of `size` are known; the last
        token is never among them, since somebody wants to know what follows it."""
        states: list[int] = []
        for start in range(0, len(token_ids) - size, size):
            found = self._blocks.get((state, token_ids[start : start + size]))
            if found is None:
                break
            states += found
            state = found[-1]
        return states
