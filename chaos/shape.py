"""What a link does to the bytes of one direction. Pure: time and randomness are arguments."""

from __future__ import annotations

import random
from dataclasses import dataclass

# What TCP makes of a lost segment on a short link: nothing arrives until it was sent again.
RETRANSMIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Shape:
    """All zero: a plain wire. `loss` and `flip` are probabilities per chunk; `is_held`: nothing
    gets through until the shape changes, and then everything does, as TCP would have it."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    rate_bytes_s: float = 0.0
    is_held: bool = False
    slice_bytes: int = 0
    flip: float = 0.0


class Direction:
    """One direction of one connection: when each chunk may leave, and what of it is damaged.

    Invariant: chunks leave in the order in which they came.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last_s = 0.0
        self._line_free_s = 0.0

    def due_s(self, now_s: float, num_bytes: int, shape: Shape) -> float:
        """When a chunk that came now may leave."""
        due = now_s
        if shape.rate_bytes_s:
            self._line_free_s = max(self._line_free_s, now_s) + num_bytes / shape.rate_bytes_s
            due = self._line_free_s
        due += max(0.0, shape.delay_s + shape.jitter_s * self._rng.uniform(-1.0, 1.0))
        while shape.loss and self._rng.random() < shape.loss:
            due += RETRANSMIT_S
        self._last_s = max(self._last_s, due)
        return self._last_s

    def damage(self, data: bytes, shape: Shape) -> bytes:
        """The chunk with one bit flipped, or as it is."""
        if not shape.flip or self._rng.random() >= shape.flip:
            return data
        index = self._rng.randrange(len(data))
        flipped = data[index] ^ (1 << self._rng.randrange(8))
        return data[:index] + bytes([flipped]) + data[index + 1 :]
