"""The text that a scripted engine writes: a hash of all tokens before. Pure.

`mix(state)` modulo the vocabulary is the next token; `advance` is the hash with it.
"""

from __future__ import annotations

from paceline.engine.toy_heads import guesses

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(state: int) -> int:
    """Splitmix64's finalizer: well spread, and the same on every machine."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def advance(state: int, token_id: int) -> int:
    """The hash of a text with one more token."""
    state = ((state ^ (token_id + 1)) * GOLDEN) & MASK
    return state ^ (state >> 29)


def head_guesses(
    state: int, num_heads: int, vocab_size: int, count: int, error_rate: float
) -> tuple[tuple[int, ...], ...]:
    """`count` candidates of each Medusa head behind the text of this hash; see `toy_heads`."""
    found = []
    for head in range(num_heads):
        truth = mix(state) % vocab_size
        best = [(truth + other) % vocab_size for other in range(count + 1)]
        found.append(guesses(best, mix(state ^ (head + 1)), error_rate, count))
        state = advance(state, truth)
    return tuple(found)
