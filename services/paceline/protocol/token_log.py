"""A token list that knows the hash of each of its prefixes.

Both ends keep one: committed tokens first, proposals behind them. The hash makes "was this
proposal made from exactly my tokens?" one comparison of 64 bits. It does not know epochs, rounds
or who is right: sessions decide that.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_INVERSE = pow(_MULTIPLIER, -1, 1 << 64)
EMPTY_HASH = 0x243F6A8885A308D3


def extend_hash(prefix_hash: int, token_id: int) -> int:
    """The u64 hash of `prefix + [token_id]`. Not cryptographic: a collision costs speed only."""
    mixed = ((prefix_hash ^ (token_id + 1)) * _MULTIPLIER) & _MASK
    return mixed ^ (mixed >> 29)


def retract_hash(whole_hash: int, token_id: int) -> int:
    """The hash of a list without its last token: `extend_hash` the other way round."""
    mixed = whole_hash ^ (whole_hash >> 29) ^ (whole_hash >> 58)
    return ((mixed * _INVERSE) & _MASK) ^ (token_id + 1)


class TokenLog:
    """Append, truncate and compare; `hash_at(n)` is the hash of the first n tokens."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._token_ids: list[int] = []
        # Invariant: len(_hashes) == len(_token_ids) + 1; _hashes[n] covers the first n tokens.
        self._hashes = array("Q", [EMPTY_HASH])
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, position: int) -> int:
        return self._token_ids[position]

    def slice(self, start: int, stop: int | None = None) -> tuple[int, ...]:
        return tuple(self._token_ids[start:stop])

    def hash_at(self, length: int) -> int:
        return self._hashes[length]

    def append(self, token_id: int) -> None:
        self._hashes.append(extend_hash(self._hashes[-1], token_id))
        self._token_ids.append(token_id)

    def extend(self, token_ids: Iterable[int]) -> None:
        """As `append` for each of them, several times faster: prompts are long."""
        added = list(token_ids)
        mask, multiplier = _MASK, _MULTIPLIER
        value = self._hashes[-1]
        hashes = []
        for token_id in added:
            value = ((value ^ (token_id + 1)) * multiplier) & mask
            value ^= value >> 29
            hashes.append(value)
        self._hashes.extend(hashes)
        self._token_ids += added

    def copy(self) -> TokenLog:
        """Another log with the same tokens, without hashing them again."""
        twin = TokenLog()
        twin._token_ids = self._token_ids[:]
        twin._hashes = self._hashes[:]
        return twin

    def truncate(self, length: int) -> None:
        del self._token_ids[length:]
        del self._hashes[length + 1 :]

    def common_len(self, start: int, token_ids: Sequence[int]) -> int:
        """How many of `token_ids`, laid at `start`, agree with what is held (and are held)."""
        held = self._token_ids[start : start + len(token_ids)]
        for index, (mine, theirs) in enumerate(zip(held, token_ids, strict=False)):
            if mine != theirs:
                return index
        return len(held)

    def set_tokens(self, start: int, token_ids: Sequence[int]) -> int | None:
        """Make positions `start...` equal `token_ids`; `start` must be <= len.

        Returns the first conflicting position (everything from there was replaced, what lay
        behind is gone) or None when the held tokens agreed and were at most extended.
        """
        agreed = self.common_len(start, token_ids)
        position = start + agreed
        if agreed == len(token_ids):
            return None
        conflict = position if position < len(self) else None
        self.truncate(position)
        self.extend(token_ids[agreed:])
        return conflict
