"""How the heads of engines without weights guess: right, in second place, or not at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def guesses(best: Sequence[int], chance: int, error_rate: float, count: int) -> tuple[int, ...]:
    """`count` candidates for a place whose ids in order are `best` (fewer if there are fewer).

    `chance`: a u64 of the place and the head. At most a share `error_rate` of the heads' first
    candidates are wrong: half of those have the right one behind it, half do not have it.
    """
    bound = int(error_rate * 2**64)
    if chance >= bound or len(best) < 2:
        return tuple(best[:count])
    if chance >= bound // 2:
        return (best[1], best[0], *best[2:])[:count]
    return tuple(best[1 : 1 + count])
