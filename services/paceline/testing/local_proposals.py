"""Local proposers of the simulation: mostly right, often short or silent, sometimes broken.

They know the target's rule, as no proposer does, so that accepted, refused and useless proposals
all occur in texts of a few tokens. What they say is a function of the text, as it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.engine.toy import ToyEngine
from paceline.methods import LOCAL_SOURCES, ProposalSource
from paceline.proposers.base import Proposer
from paceline.protocol.messages import REJECTION_MODES
from paceline.protocol.token_log import TokenLog
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams
from paceline.target.local_drafts import LocalDrafts
from paceline.target.scheduler import Scheduler
from paceline.target.sequence import Sequence as TargetSequence

_SILENT, _SHORT, _WRONG, _BROKEN = 4, 3, 6, 90  # one in so many


class PlantedFailure(ValueError):
    """A proposer's bug."""


class GuessingProposer:
    """`engine` has the target's rule; `salt` makes its mistakes its own."""

    def __init__(
        self, engine: ToyEngine, sampling: SamplingParams, prompt_len: int, salt: int
    ) -> None:
        self._engine, self._sampling, self._salt = engine, sampling, salt
        self._prompt_len = prompt_len
        self._log = TokenLog()

    def extend(self, token_ids: Sequence[int]) -> None:
        self._log.extend(token_ids)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        chance = self._log.hash_at(len(self._log)) ^ self._salt
        if chance % _BROKEN == 0:
            raise PlantedFailure
        if chance % _SILENT == 0:
            return ()
        text = [*self._log.slice(0)]
        num = max_tokens if chance % _SHORT else 1 + chance % max_tokens
        for place in range(num):
            right = self._next(text)
            is_wrong = (chance >> place) % _WRONG == 0
            text.append((right + 1) % self._engine.info.vocab_size if is_wrong else right)
        return tuple(text[len(self._log) :])

    def _next(self, text: Sequence[int]) -> int:
        prompt, output = text[: self._prompt_len], text[self._prompt_len :]
        logits = self._engine.logits(text)
        return coupled_token(logits, self._sampling, len(output), prompt, output)


class SimulatedLocalDrafts(LocalDrafts):
    """`engine`: one of the target's kind, for nobody else."""

    engine: ToyEngine
    salt: int

    def _proposer(self, sequence: TargetSequence, name: ProposalSource) -> Proposer:
        session = sequence.session
        sampling = session.sampling
        if session.mode in REJECTION_MODES:
            sampling = replace(sampling, temperature=0.0)
        salt = self.salt * 2 + (name == "ngram")
        return GuessingProposer(self.engine, sampling, session.prompt_len, salt)


def take_over_proposers(scheduler: Scheduler, engine: ToyEngine, salt: int) -> None:
    """The scheduler of one life of a target proposes like this."""
    local = scheduler.local
    local.__class__ = _simulated(type(local))
    assert isinstance(local, SimulatedLocalDrafts)
    local.engine, local.salt = engine, salt
    local._failed.update(LOCAL_SOURCES)  # these failures are nobody's news


def _simulated(shipped: type[LocalDrafts]) -> type[LocalDrafts]:
    """A planted bug stays in place."""
    if shipped is LocalDrafts:
        return SimulatedLocalDrafts
    return type(shipped.__name__, (shipped, SimulatedLocalDrafts), {})
