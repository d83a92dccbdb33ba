"""Keyed noise: every random number of a request is a pure function of what it is for.

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (token_id >> 2, output_index, purpose | choice << 8, round)
    word    = philox4x32(counter, key)[token_id & 3]
    unit    = (word + 0.5) * 2**-32                      exact in float64, never 0 and never 1
    E       = -portable_log(1.0 - unit)                  Exp(1); `1.0 - unit` is exact too
    gumbel  = -portable_log(E)

`output_index` is the 0-based absolute index of the generated token; batch row, slot, epoch and
replica never enter. `round` is the verification round for every purpose but COUPLED, where it
is 0: block verification is biased if a later round meets the same noise again.

The torch twin (`engine/sampler.py`) must give the same bits on any device, so the logarithm is
built from float64 operations that IEEE 754 rounds exactly, in this order, with no fused
multiply-add (eager torch has none; never `torch.compile` it). The constants are below:

    mantissa, exponent = frexp(x)                        mantissa in [0.5, 1)
    if mantissa < SQRT_HALF: mantissa, exponent = mantissa * 2.0, exponent - 1
    k = float64(exponent)
    f = mantissa - 1.0                                   exact
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (L2 + w * (L4 + w * L6))
    odd = z * (L1 + w * (L3 + w * (L5 + w * L7)))
    half = (0.5 * f) * f
    log = (((s * (half + (odd + even)) + k * LN2_LO) - half) + f) + k * LN2_HI

It is the atanh series of fdlibm's log in the arrangement of FreeBSD and musl, error below 1 ulp.
Small units, the winning tail, need no branch of their own: `1.0 - unit` is exact and lies above
SQRT_HALF there, so k = 0 and f = -unit, and the formula is a log1p with full relative precision.

Knows nothing of logits, tokens' meaning or acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum

from paceline.sampling.philox import MASK32, philox4x32

SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
LN2_HI = float.fromhex("0x1.62e42feep-1")
LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
L1 = float.fromhex("0x1.5555555555593p-1")
L2 = float.fromhex("0x1.999999997fa04p-2")
L3 = float.fromhex("0x1.2492494229359p-2")
L4 = float.fromhex("0x1.c71c51d8e78afp-3")
L5 = float.fromhex("0x1.7466496cb03dep-3")
L6 = float.fromhex("0x1.39a09d078c69fp-3")
L7 = float.fromhex("0x1.2f112df3e5244p-3")

CHOICE_SHIFT = 8
UNIT_SCALE = 2.0**-32


class Purpose(IntEnum):
    """What a number is for; the low 8 bits of counter word 2, so purposes are independent."""

    COUPLED = 0
    DRAFT_PROPOSAL = 1
    ACCEPT_UNIFORM = 2  # token_id 0
    RESIDUAL = 3  # recovered and bonus tokens
    BLOCK_UNIFORM = 4  # token_id 0


def noise_word(
    seed: int,
    output_index: int,
    token_id: int,
    *,
    choice: int = 0,
    purpose: Purpose = Purpose.COUPLED,
    round: int = 0,
) -> int:
    """The u32 that belongs to one token id at one output index."""
    words = _call(seed, output_index, token_id >> 2, choice, purpose, round)
    return words[token_id & 3]


def noise_words(
    seed: int,
    output_index: int,
    token_ids: Iterable[int],
    *,
    choice: int = 0,
    purpose: Purpose = Purpose.COUPLED,
    round: int = 0,
) -> list[int]:
    """`noise_word` of many ids; neighbours in ascending order share a Philox call."""
    words: list[int] = []
    group, group_words = -1, (0, 0, 0, 0)
    for token_id in token_ids:
        if token_id >> 2 != group:
            group = token_id >> 2
            group_words = _call(seed, output_index, group, choice, purpose, round)
        words.append(group_words[token_id & 3])
    return words


def _call(
    seed: int, output_index: int, group: int, choice: int, purpose: Purpose, round: int
) -> tuple[int, int, int, int]:
    if purpose is Purpose.COUPLED and round != 0:
        raise ValueError("coupled noise is keyed by position alone: round must be 0")
    counter = (group, output_index, purpose | choice << CHOICE_SHIFT, round)
    return philox4x32(counter, (seed & MASK32, seed >> 32))


def unit(word: int) -> float:
    """Uniform on (0, 1), 33 significant bits, symmetric about a half."""
    return (word + 0.5) * UNIT_SCALE


def exponential(word: int) -> float:
    """Exp(1), in [2**-33, 22.9]."""
    return -portable_log(1.0 - unit(word))


def gumbel(word: int) -> float:
    """Standard Gumbel: `argmax(log_probs + gumbel)` is one draw from the probabilities."""
    return -portable_log(exponential(word))


def portable_log(x: float) -> float:
    """Natural logarithm of a positive normal float64, the same bits everywhere."""
    mantissa, exponent = math.frexp(x)
    if mantissa < SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    k = float(exponent)
    f = mantissa - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (L2 + w * (L4 + w * L6))
    odd = z * (L1 + w * (L3 + w * (L5 + w * L7)))
    half = (0.5 * f) * f
    return (((s * (half + (odd + even)) + k * LN2_LO) - half) + f) + k * LN2_HI
