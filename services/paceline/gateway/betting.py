"""A sequential test of "these statistics have mean 0" that may be looked at after every sample.

Testing by betting (Shafer and Vovk; Ramdas et al., "Game-theoretic statistics and safe
anytime-valid inference", 2023; for bounded means Waudby-Smith and Ramdas, 2024): a gambler with 1
coin stakes a share of it on each statistic being positive, or negative. While the mean of what
comes next, given all that came, is 0, no bet is worth more than its price: the wealth is a
supermartingale, and by Ville's inequality it *ever* reaches 1 / alpha with probability <= alpha.
So an alarm at that wealth has false-alarm level alpha, however often one looks and whenever one
stops. Which statistic gives a bug away, and how much of the wealth to stake, nobody knows before:
the coin is split equally over all of them, and a mean of supermartingales is one.

    bet on one side of one statistic f in [-1, 1]:  wealth *= 1 + stake * (side * f - tolerance)

`tolerance` makes the hypothesis "the mean is within +- tolerance": rounding is no evidence.

A bug that comes with tomorrow's deployment must not have to win back what a year without one
lost. So the coin is also split over starting times: the share 1 / (j (j + 1)) begins to bet in
era j (shares of a coin again; the idea of Shiryaev and Roberts, and of the e-detectors of Shin,
Ramdas and Rinaldo, 2023). Of shares that have begun some are thrown away in time, which only makes
alarms rarer; about two for each doubling of the time stay.

Pure. Knows no token, no request and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Halves of each other: the best stake is at most a factor of 1.4 away, for effects from 1 to 0.01.
STAKES = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)
# Gauges and JSON have no use for more.
MAX_E_VALUE = 1e300

# +1: it pays when the statistic is positive; a statistic may be watched on one side or on both.
Sides = Sequence[tuple[int, ...]]
# A statistic that is None says nothing this time.
Values = Sequence[float | None]


class Bets:
    """One coin on several statistics. `sides[i]` are those of statistic i."""

    def __init__(self, sides: Sides, tolerance: float) -> None:
        self._sides = sides
        self._tolerance = tolerance
        # Of each bet: statistic, side and stake, in this order.
        self.log_wealth = [0.0] * (sum(map(len, sides)) * len(STAKES))

    def receive(self, values: Values) -> None:
        """One sample: all statistics of it, each in [-1, 1]."""
        index = 0
        for value, sides in zip(values, self._sides, strict=True):
            if value is not None and not -1.0 <= value <= 1.0:
                raise ValueError(f"a statistic must be in [-1, 1], got {value}")
            for side in sides:
                if value is not None:
                    gain = side * value - self._tolerance
                    for place, stake in enumerate(STAKES, index):
                        self.log_wealth[place] += math.log1p(stake * gain)
                index += len(STAKES)

    def log_e_value(self, start: Sequence[float] | None = None) -> float:
        """Of the mean wealth of all bets; of a coin that came when `log_wealth` was `start`."""
        begun = start or [0.0] * len(self.log_wealth)
        return _log_sum([now - then for now, then in zip(self.log_wealth, begun, strict=True)]) - (
            math.log(len(begun))
        )


@dataclass(frozen=True, slots=True)
class _Era:
    """A share of the coin: its number, from 1 on, and what the bets' log wealth was then."""

    number: int
    starts: tuple[tuple[float, ...], ...]

    def is_kept(self, newest: int) -> bool:
        """The first one for ever, of the others every second one twice as long as the rest, and
        so on: so there is always one that began shortly before whatever happened."""
        past = self.number - 1
        lowest_bit = past & -past
        return past == 0 or newest - self.number < _ERA_LIFE * lowest_bit


# Eras that a share in an odd one lives.
_ERA_LIFE = 4


class SequentialTest:
    """`kinds`: the sides of each kind of sample's statistics; the coin is split among the kinds.

    `end_sample` ends a sample of all kinds: only then the e-value may be read. `era_len` of them
    make an era.
    """

    def __init__(self, kinds: Sequence[Sides], tolerance: float, era_len: int = 64) -> None:
        self.num_samples = 0
        self._bets = [Bets(sides, tolerance) for sides in kinds]
        self._era_len = era_len
        self._eras: list[_Era] = []
        self._begin_era(1)

    @property
    def num_eras(self) -> int:
        """Those that are kept."""
        return len(self._eras)

    def receive(self, kind: int, values: Values) -> None:
        self._bets[kind].receive(values)

    def end_sample(self) -> None:
        self.num_samples += 1
        if self.num_samples % self._era_len == 0:
            number = self._eras[-1].number + 1
            self._eras = [era for era in self._eras if era.is_kept(number)]
            self._begin_era(number)

    @property
    def e_value(self) -> float:
        """Wealth of the coin: the alarm belongs at 1 / alpha. At most MAX_E_VALUE."""
        rest = -math.log(self._eras[-1].number + 1)  # of the shares that have not begun
        log = _log_sum([rest, *map(self._log_share, self._eras)])
        return math.exp(min(log, math.log(MAX_E_VALUE)))

    def _log_share(self, era: _Era) -> float:
        pairs = zip(self._bets, era.starts, strict=True)
        logs = [bets.log_e_value(start) for bets, start in pairs]
        return _log_sum(logs) - math.log(len(logs) * era.number * (era.number + 1))

    def _begin_era(self, number: int) -> None:
        self._eras.append(_Era(number, tuple(tuple(bets.log_wealth) for bets in self._bets)))


def _log_sum(logs: Sequence[float]) -> float:
    peak = max(logs)
    return peak + math.log(math.fsum(math.exp(log - peak) for log in logs))
