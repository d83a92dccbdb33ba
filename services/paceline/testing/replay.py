"""How many passes a known text takes with a local proposer, without any model.

Exact for greedy and for seeded texts: under sample and match the text does not depend on what is
proposed. Every pass may check proposals, the one behind the prompt, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.proposers.base import Proposer


@dataclass(frozen=True, slots=True)
class Replay:
    """Counts of one text, or of several added up."""

    num_tokens: int = 0
    num_passes: int = 0
    num_proposed: int = 0
    num_accepted: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per pass, the target's own included."""
        return self.num_tokens / max(1, self.num_passes)

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted / max(1, self.num_proposed)

    def __add__(self, other: Replay) -> Replay:
        return Replay(
            self.num_tokens + other.num_tokens,
            self.num_passes + other.num_passes,
            self.num_proposed + other.num_proposed,
            self.num_accepted + other.num_accepted,
        )


def replay(
    proposer: Proposer, prompt: Sequence[int], output: Sequence[int], max_tokens: int
) -> Replay:
    """`max_tokens`: proposals of one pass (K), none of them behind the text's last token."""
    proposer.extend(prompt)
    total = Replay()
    while total.num_tokens < len(output):
        rest = output[total.num_tokens :]
        proposal = proposer.propose(min(max_tokens, len(rest) - 1))
        num_accepted = 0
        while num_accepted < len(proposal) and proposal[num_accepted] == rest[num_accepted]:
            num_accepted += 1
        proposer.extend(rest[: num_accepted + 1])
        total += Replay(num_accepted + 1, 1, len(proposal), num_accepted)
    return total
