"""A draft's truncated law with integer weights: what a rejection mode puts on the wire.

The draft quantises first and then samples from the result, so the law the target
divides by is the law the token really came from, bit for bit. Knows no target and no noise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

TOTAL_WEIGHT = 65536
MAX_ENTRIES = 64
# What a draft may leave out of its law: acceptance loses no more than this.
MAX_DROPPED_MASS = 0.01


@dataclass(frozen=True, slots=True)
class SparseProbs:
    """Token `token_ids[j]` has probability `weights[j] / 65536`, every other token 0."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]
    _weight_of: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.token_ids) <= MAX_ENTRIES:
            raise ValueError(f"need 1 to {MAX_ENTRIES} entries, got {len(self.token_ids)}")
        if len(self.weights) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} ids but {len(self.weights)} weights")
        if len(set(self.token_ids)) != len(self.token_ids) or min(self.token_ids) < 0:
            raise ValueError("token ids must be distinct and not negative")
        if min(self.weights) < 1 or sum(self.weights) != TOTAL_WEIGHT:
            raise ValueError(f"weights must be positive and sum to {TOTAL_WEIGHT}")
        weight_of = dict(zip(self.token_ids, self.weights, strict=True))
        object.__setattr__(self, "_weight_of", weight_of)

    def weight(self, token_id: int) -> int:
        return self._weight_of.get(token_id, 0)

    def draw(self, word: int) -> int:
        """The token of a u16 word: inverse of the cumulative weights, exact."""
        if not 0 <= word < TOTAL_WEIGHT:
            raise ValueError(f"word must be a u16, got {word}")
        return self.token_ids[bisect_right(list(accumulate(self.weights)), word)]


def quantize_probs(
    probs: Sequence[float], num_entries: int = MAX_ENTRIES, max_dropped_mass: float = 0.0
) -> SparseProbs:
    """The most probable `num_entries` tokens (ties by lowest id), renormalised to the weights.

    With `max_dropped_mass` no more of them than leave at most that share of the mass out.
    """
    ranked = sorted((i for i, prob in enumerate(probs) if prob > 0), key=lambda i: -probs[i])
    kept = ranked[:num_entries]
    return quantize_ranked(kept, [probs[i] for i in kept], sum(probs), max_dropped_mass)


def quantize_ranked(
    token_ids: Sequence[int],
    probs: Sequence[float],
    total: float = 1.0,
    max_dropped_mass: float = 0.0,
) -> SparseProbs:
    """A law from its 1 to 64 most probable tokens, in descending order; `total` is all its mass.

    Entries of probability 0 are left out, the first one must have some. Largest remainders get
    the units that rounding down leaves over. A function of the law alone, never of a sampled
    token, as verification demands.
    """
    num_kept, mass = 0, 0.0
    is_cut = max_dropped_mass > 0.0
    for prob in probs:
        if prob <= 0.0 or (is_cut and mass >= total * (1.0 - max_dropped_mass)):
            break
        num_kept, mass = num_kept + 1, mass + prob
    # one unit is set aside for each entry, so that no kept token falls to weight 0
    spare = TOTAL_WEIGHT - num_kept
    shares = [prob / mass * spare for prob in probs[:num_kept]]
    weights = [1 + int(share) for share in shares]
    by_remainder = sorted(range(num_kept), key=lambda j: int(shares[j]) - shares[j])
    for j in by_remainder[: TOTAL_WEIGHT - sum(weights)]:
        weights[j] += 1
    return SparseProbs(tuple(token_ids[:num_kept]), tuple(weights))
