"""Exact laws of randomised code: run it on symbolic random numbers, once per possible branch.

The code under test is the shipped code. It compares a symbolic number with a threshold; the
comparison branches, and each branch carries its exact rational probability. Nothing is sampled
and nothing is rounded, so "total variation 0" means equal. Knows nothing of acceptance rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)


class Chance:
    """One path through the program: replays decisions, then takes the first branch of new ones."""

    def __init__(self, script: Sequence[bool]) -> None:
        self.decisions = list(script)
        self.prob = Fraction(1)
        self.untaken: list[list[bool]] = []
        self._num_decided = 0

    def decide(self, prob: Fraction) -> bool:
        """True with exactly this probability; certain outcomes are no branch."""
        if prob >= 1 or prob <= 0:
            return prob >= 1
        if self._num_decided == len(self.decisions):
            self.untaken.append([*self.decisions, False])
            self.decisions.append(True)
        is_true = self.decisions[self._num_decided]
        self._num_decided += 1
        self.prob *= prob if is_true else 1 - prob
        return is_true

    def choose(self, probs: Sequence[Fraction]) -> int:
        """An index with exactly these probabilities."""
        uniform = SymbolicUniform(self)
        return uniform.choose(probs)

    def uniform(self) -> SymbolicUniform:
        return SymbolicUniform(self)

    def exponentials(self, num: int) -> list[SymbolicExponential]:
        return [SymbolicExponential(self) for _ in range(num)]


class SymbolicUniform:
    """Uniform on [0, 1), known only to lie in [low, high); every comparison narrows it.

    It may be kept and compared again, which is how code that wrongly reuses a random number gets
    its exact, wrong law.
    """

    def __init__(self, chance: Chance, low: Fraction = Fraction(0)) -> None:
        self._chance = chance
        self._low = low
        self._high = Fraction(1)

    def __lt__(self, threshold: Fraction | int) -> bool:
        cut = min(max(exact(threshold), self._low), self._high)
        is_below = self._chance.decide((cut - self._low) / (self._high - self._low))
        if is_below:
            self._high = cut
        else:
            self._low = cut
        return is_below

    def __mul__(self, scale: Fraction | int) -> _Scaled:
        return _Scaled(self, exact(scale))

    def choose(self, probs: Sequence[Fraction]) -> int:
        """Inverse of the cumulative law."""
        cumulative = Fraction(0)
        for index, prob in enumerate(probs[:-1]):
            cumulative += prob
            if self < cumulative:
                return index
        return len(probs) - 1


class _Scaled:
    def __init__(self, uniform: SymbolicUniform, scale: Fraction) -> None:
        self._uniform = uniform
        self._scale = scale

    def __lt__(self, threshold: Fraction | int) -> bool:
        if self._scale == 0:
            return threshold > 0
        return self._uniform < exact(threshold) / self._scale


class SymbolicExponential:
    """Exp(1), for a race: divided by a weight once, then compared as a running minimum."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._is_used = False

    def __truediv__(self, weight: Fraction | int) -> _Arrival:
        if self._is_used:
            raise AssertionError("a symbolic exponential was used twice")
        self._is_used = True
        return _Arrival(self._chance, exact(weight))


class _Arrival:
    """First arrival of a set of clocks whose rates sum to `rate`.

    Which clock of a set rings first says nothing about when, so a new clock beats the set with
    probability rate / (rate + set's rate) whatever happened before.
    """

    def __init__(self, chance: Chance, rate: Fraction) -> None:
        self._chance = chance
        self._rate = rate

    def __lt__(self, other: _Arrival) -> bool:
        total = self._rate + other._rate
        is_earlier = self._chance.decide(self._rate / total)
        self._rate = other._rate = total
        return is_earlier


def exact(number: Fraction | int) -> Fraction:
    """Refuse floats: one of them would silently end the exactness."""
    if not isinstance(number, Fraction | int):
        raise TypeError(f"{number!r} is not exact")
    return Fraction(number)


def exact_law(program: Callable[[Chance], Outcome]) -> dict[Outcome, Fraction]:
    """The law of what `program` returns, over everything its `Chance` can do."""
    law: defaultdict[Outcome, Fraction] = defaultdict(Fraction)
    scripts: list[list[bool]] = [[]]
    while scripts:
        chance = Chance(scripts.pop())
        law[program(chance)] += chance.prob
        scripts.extend(chance.untaken)
    return dict(law)


def total_variation(law: Mapping[Outcome, Fraction], other: Mapping[Outcome, Fraction]) -> Fraction:
    """Half the sum of absolute differences: 0 means the same law."""
    gaps = (abs(law.get(x, Fraction(0)) - other.get(x, Fraction(0))) for x in {*law, *other})
    return sum(gaps, Fraction(0)) / 2
