"""Philox4x32-10, the counter-based generator of Random123, on plain ints.

It is a keyed bijection of a 128-bit counter: no state, so any word can be computed anywhere, in
any order. Knows nothing of what its counters mean; `noise` gives them a meaning.
"""

from __future__ import annotations

Counter = tuple[int, int, int, int]
Key = tuple[int, int]

NUM_ROUNDS = 10
MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Counter, key: Key) -> Counter:
    """Four pseudo-random u32 words for four u32 counter words under two u32 key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0 = MULTIPLIERS[0] * c0
        product1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0 = (k0 + WEYL[0]) & MASK32
        k1 = (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3
