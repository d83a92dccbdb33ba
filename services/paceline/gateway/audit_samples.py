"""What the audit has of a client's request, and what it counts. Pure.

Knows no target, no statistic and no event loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.generation import GenerateRequest, RoundDelta
from paceline.sampling.params import VerificationMode

REJECTION_MODES = (VerificationMode.REJECTION, VerificationMode.BLOCK)


class Skip(StrEnum):
    """Why a sampled request was not audited, or not to its end."""

    PLAIN = "plain"  # no draft had a part in it
    SEEDED = "seeded"  # a rejection mode with the client's seed
    LONG_PROMPT = "long_prompt"  # audit.max_prompt_tokens
    FULL = "full"  # audit.max_pending
    BUSY = "busy"  # clients needed the service
    ERROR = "error"  # the target failed on the re-run
    UNDECIDED = "undecided"  # texts part, and whether it is a tie cannot be asked


@dataclass(slots=True)
class AuditCounts:
    """Of one served model, since the start. A request that came to its audit is in `num_requests`
    or, once, in `skipped`. `num_alarms` is 0 or 1."""

    num_requests: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    num_mismatches: int = 0
    num_alarms: int = 0
    e_value: float = 1.0
    skipped: Counter[Skip] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Sample:
    """A request that is to be audited, as its tokens come. `ended`: choices that their target
    ended. `is_over`: nothing more comes."""

    model: str
    request: GenerateRequest
    mode: VerificationMode
    max_tokens: int
    texts: list[list[int]]
    ended: set[int] = field(default_factory=set)
    is_over: bool = False

    @property
    def is_of_law(self) -> bool:
        """Its texts have a law; otherwise each is the only one."""
        return self.mode in REJECTION_MODES

    def receive(self, delta: RoundDelta) -> None:
        text = self.texts[delta.choice]
        text += delta.token_ids[: self.max_tokens - len(text)]
        if delta.finish_reason:
            self.ended.add(delta.choice)
