"""When the requests of an open loop are due. Pure: the same seed gives the same times."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning, without end, `rate` of them a second on average.

    The gaps are gamma distributed, with vLLM's `burstiness` as their shape: 1 is a Poisson
    process, less comes in bursts, more is steadier. ValueError for what is not above 0.
    """
    if not (rate > 0 and burstiness > 0):
        raise ValueError(f"rate and burstiness must be above 0, not {rate} and {burstiness}")
    random, due_s = Random(seed), 0.0
    while True:
        due_s += random.gammavariate(burstiness, 1 / (rate * burstiness))
        yield due_s
