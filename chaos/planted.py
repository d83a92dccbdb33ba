"""All planted bugs, and how many seeds the simulation needs to find one.

"Found" is an `InvariantError`, or the code noticing by itself that a rule is broken.
"""

from dataclasses import dataclass

from chaos import planted_branches, planted_local, planted_protocol, planted_recovery
from paceline.testing.draw import draw_scenario
from paceline.testing.shrink import broken_rule
from paceline.testing.world import Parts

MAX_SEEDS = 2_000
BUGS: dict[str, Parts] = {
    **planted_protocol.BUGS,
    **planted_branches.BUGS,
    **planted_local.BUGS,
    **planted_recovery.BUGS,
}


@dataclass(frozen=True, slots=True)
class Find:
    """`num_seeds` were needed, the last of which broke `rule`."""

    num_seeds: int
    rule: str


def find(bug: str, max_seeds: int = MAX_SEEDS) -> Find | None:
    for seed in range(max_seeds):
        rule = broken_rule(draw_scenario(seed), BUGS[bug])
        if rule is not None:
            return Find(seed + 1, rule)
    return None
