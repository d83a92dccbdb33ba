"""The torch twin of `sampling.noise`: the same words and the same Gumbel bits, on any device.

Every step is one IEEE-exact float64 operation or an int64 operation that cannot overflow, in the
reference's order. Never `torch.compile` this file: fusing may contract a * b + c into one
rounding. Knows keys and token ids; no logits and no requests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.sampling import noise
from paceline.sampling.philox import MASK32, MULTIPLIERS, NUM_ROUNDS, WEYL

IDS_PER_CALL = 4  # one Philox call serves the ids 4g .. 4g + 3

# A u32 times a multiplier M >= 2**31 can exceed int64, so we multiply by M - 2**32 instead:
# |product| < 2**63, its low 32 bits are the same, and the high word is (product >> 32) + factor.
_SHIFTED = tuple(multiplier - (1 << 32) for multiplier in MULTIPLIERS)


# A request keeps its seed, so its key schedule is asked for in every pass.
_MAX_SCHEDULES = 4096


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """One Philox key schedule and counter tail per row; all int64 holding u32.

    `schedule`: [rows, NUM_ROUNDS, 2], the two key words of each round in the order in which
    `group_words` adds them. `tail`: [rows, 3], counter words 1 (output index), 2 (purpose and
    choice) and 3 (round).
    """

    schedule: torch.Tensor
    tail: torch.Tensor

    def rows(self, picked: slice) -> NoiseKeys:
        """The keys of some of the rows."""
        return NoiseKeys(self.schedule[picked], self.tail[picked])


def make_keys(
    rows: Sequence[tuple[int, int, int]],
    device: torch.device,
    purpose: noise.Purpose = noise.Purpose.COUPLED,
    round: int | Sequence[int] = 0,
) -> NoiseKeys:
    """Keys of rows given as (seed, choice, output_index); one round for all, or one per row."""
    rounds = [round] * len(rows) if isinstance(round, int) else round
    schedule = [_key_schedule(seed) for seed, _, _ in rows]
    tail = [
        (output_index, purpose | choice << noise.CHOICE_SHIFT, row_round)
        for (_, choice, output_index), row_round in zip(rows, rounds, strict=True)
    ]
    return NoiseKeys(
        torch.tensor(schedule, dtype=torch.int64, device=device).reshape(-1, NUM_ROUNDS, 2),
        torch.tensor(tail, dtype=torch.int64, device=device).reshape(-1, 3),
    )


@functools.lru_cache(maxsize=_MAX_SCHEDULES)
def _key_schedule(seed: int) -> list[tuple[int, int]]:
    """Per round the key words for the first and the second half of `mixed` (see there)."""
    schedule = []
    for step in range(NUM_ROUNDS):
        key0 = ((seed & MASK32) + step * WEYL[0]) & MASK32
        key1 = ((seed >> 32) + step * WEYL[1]) & MASK32
        schedule.append((key1, key0) if step % 2 == 0 else (key0, key1))
    return schedule


def group_words(groups: torch.Tensor, keys: NoiseKeys) -> tuple[torch.Tensor, ...]:
    """The words of ids 4g, 4g + 1, 4g + 2 and 4g + 3: groups int64 [rows, n] -> 4 x [rows, n].

    The two halves of a round lie side by side in one tensor, which halves the number of calls:
    `mixed` holds counter words 0 and 2, `plain` the words 3 and 1 that are mixed into them.
    A round turns (0, 2) into (2, 0), so multipliers and key words alternate.
    """
    tail = keys.tail.T[:, :, None]
    mixed = torch.stack((groups, tail[1].expand_as(groups)))
    plain = torch.stack((tail[2], tail[0]))
    even = torch.tensor(_SHIFTED, device=groups.device)[:, None, None]
    factors = (even, even.flip(0))
    for step, round_keys in enumerate(keys.schedule.permute(1, 2, 0)[..., None].unbind()):
        product = mixed * factors[step % 2]
        high = (product >> 32).add_(mixed)
        mixed = high.bitwise_xor_(plain).bitwise_xor_(round_keys)
        plain = product.bitwise_and_(MASK32).flip(0)
    # NUM_ROUNDS is even, so the order is the first one again: (0, 2) and (3, 1).
    return mixed[0], plain[1], mixed[1], plain[0]


def token_words(token_ids: torch.Tensor, keys: NoiseKeys) -> torch.Tensor:
    """The word of each token id: int64 [rows, n] -> int64 [rows, n]."""
    words = torch.stack(group_words(token_ids >> 2, keys), dim=-1)
    return words.gather(-1, (token_ids & 3)[..., None])[..., 0]


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel of each word: int64 -> float64, the bits of `noise.gumbel`."""
    unit = (words.double() + 0.5) * noise.UNIT_SCALE
    return -portable_log(-portable_log(1.0 - unit))


def portable_log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float64, the bits of `noise.portable_log`."""
    mantissa, exponent = torch.frexp(x)
    is_low = mantissa < noise.SQRT_HALF
    mantissa = torch.where(is_low, mantissa * 2.0, mantissa)
    k = torch.where(is_low, exponent - 1, exponent).double()
    f = mantissa - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (noise.L2 + w * (noise.L4 + w * noise.L6))
    odd = z * (noise.L1 + w * (noise.L3 + w * (noise.L5 + w * noise.L7)))
    half = (0.5 * f) * f
    return (((s * (half + (odd + even)) + k * noise.LN2_LO) - half) + f) + k * noise.LN2_HI
