"""What chance decides: lengths of texts, and how long a draft's guesses stay right."""

from __future__ import annotations

import math
from random import Random

import numpy as np

from paceline.simulate.places import Floats, Ints
from paceline.simulate.traffic_config import Acceptance, ClassConfig, LengthConfig

MAX_RUN = 1 << 30
_SURE = -1e-12  # the logarithm of an acceptance of 1, so that nothing is divided by 0


def draw_length(config: LengthConfig, random: Random) -> int:
    """One length of a prompt or an answer, in tokens."""
    match config.distribution:
        case "fixed":
            value = config.mean
        case "uniform":
            value = float(random.randint(config.min, config.max))
        case "exponential":
            value = random.expovariate(1 / config.mean)
        case "lognormal":
            mu = math.log(config.mean) - config.sigma**2 / 2
            value = random.lognormvariate(mu, config.sigma)
    return max(config.min, min(config.max, round(value)))


class RunLengths:
    """Draws how many guesses of a chain are right before the first wrong one, by class.

    P(run >= k) = acceptance_1 * ... * acceptance_k, so one draw stands for as many verdicts as
    the chain lives. `set_time` moves the classes that drift; chains that live keep their length.
    """

    def __init__(self, classes: tuple[ClassConfig, ...], seed: int) -> None:
        self._classes = classes
        self._rng = np.random.default_rng(seed)
        self._log_last: Floats = np.zeros(len(classes))
        self._survival: list[Floats | None] = [None] * len(classes)
        most = max(len(item.runner_up) for item in classes)
        self._runner_up: Floats = np.zeros((len(classes), most))
        for index, item in enumerate(classes):
            ups = (*item.runner_up, *(item.runner_up[-1:] * most))[:most]
            self._runner_up[index, : len(ups)] = ups
        self._num_listed = 0
        self.has_drift = any(item.drift is not None for item in classes)
        self.set_time(0.0)

    def set_time(self, now_us: float) -> None:
        for index, item in enumerate(self._classes):
            self._set(index, _acceptance_at(item, now_us / 1e6))
        self._num_listed = sum(item is not None for item in self._survival)

    def _set(self, index: int, acceptance: tuple[float, ...]) -> None:
        last = acceptance[-1]
        log_last = -math.inf if last == 0 else math.log(last)
        self._log_last[index] = min(log_last, _SURE)
        is_one = len(acceptance) == 1
        self._survival[index] = None if is_one else np.cumprod(np.asarray(acceptance))

    def draw(self, class_ids: Ints) -> tuple[Ints, Ints]:
        """For each chain: its run of right guesses, and the rank of the token behind it among
        the draft's next guesses (1 = the runner-up; 0 = none of those that are configured)."""
        count = len(class_ids)
        uniforms = 1.0 - self._rng.random((2, count))  # in (0, 1]
        runs = np.log(uniforms[0]) / self._log_last[class_ids]
        if self._num_listed:
            self._follow_lists(class_ids, uniforms[0], runs)
        chances = self._runner_up[class_ids]
        hits = (uniforms[1][:, None] <= chances).sum(axis=1)
        ranks = np.where(hits > 0, chances.shape[1] - hits + 1, 0)
        return np.minimum(runs, MAX_RUN).astype(np.int64), ranks

    def _follow_lists(self, class_ids: Ints, uniforms: Floats, runs: Floats) -> None:
        for index, survival in enumerate(self._survival):
            if survival is None:
                continue
            mine = np.flatnonzero(class_ids == index)
            chance = uniforms[mine]
            # As many positions as have survivals >= the draw.
            known = len(survival) - np.searchsorted(survival[::-1], chance, side="left")
            last = survival[-1]
            if last > 0:
                beyond = np.log(np.minimum(chance / last, 1.0)) / self._log_last[index]
            else:
                beyond = np.zeros(len(mine))
            runs[mine] = known + np.where(known == len(survival), np.floor(beyond), 0.0)

    def draw_one(self, class_id: int) -> tuple[int, int]:
        """`draw` for one chain."""
        if self._num_listed:
            runs, ranks = self.draw(np.array([class_id]))
            return int(runs[0]), int(ranks[0])
        first, second = (1.0 - self._rng.random(2)).tolist()
        run = int(min(math.log(first) / float(self._log_last[class_id]), MAX_RUN))
        chances = enumerate(self._runner_up[class_id].tolist(), 1)
        return run, next((rank for rank, chance in chances if second <= chance), 0)


def _acceptance_at(item: ClassConfig, now_s: float) -> tuple[float, ...]:
    near = _values(item.acceptance)
    if item.drift is None:
        return near
    far = _values(item.drift.acceptance)
    phase = (now_s / item.drift.period_s) % 1.0
    if item.drift.shape == "square":
        return near if phase < 0.5 else far
    weight = 2 * phase if phase < 0.5 else 2 - 2 * phase
    depth = max(len(near), len(far))
    pairs = zip(_padded(near, depth), _padded(far, depth), strict=True)
    return tuple(low + weight * (high - low) for low, high in pairs)


def _values(acceptance: Acceptance) -> tuple[float, ...]:
    return acceptance if isinstance(acceptance, tuple) else (float(acceptance),)


def _padded(values: tuple[float, ...], depth: int) -> tuple[float, ...]:
    return (*values, *values[-1:] * (depth - len(values)))
