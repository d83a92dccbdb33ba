"""Which sources of proposals a sequence has, and which of them its next pass takes. Pure.

It knows what each source has to offer and what that is expected to bring, and no token: in the
rejection modes a choice may depend on counts and on the committed text, never on what a draft's
proposals are (C2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.config import SpeculationConfig
from paceline.methods import LOCAL_SOURCES, LOOKUPS, ProposalSource, SpeculationMethod
from paceline.proposers.base import NOTHING, LocalProposal, Proposer
from paceline.protocol.acceptance_model import Survivals
from paceline.protocol.lookahead import SequenceLookahead

# Rounds in which a source has something to offer and nothing is learnt of it, until it is tried
# all the same; twice as many after each try, as long as it is not the best.
FIRST_TRIAL, MAX_TRIAL = 16, 256


@dataclass(slots=True)
class Source:
    """One source of one sequence: what the policy knows of it, and what it offers for the next
    pass. `have`: so many proposals; `proposal`: which, if it is local, made when so many tokens as
    `offered_at` were committed. `told_len`: of these `proposer` knows.

    `is_asleep`: texts are not looked up for the next pass. `num_unlearnt`: rounds since something
    was learnt of it.
    """

    name: ProposalSource
    lookahead: SequenceLookahead
    have: int = 0
    proposal: LocalProposal = NOTHING
    survivals: Survivals | None = None
    offered_at: int = -1
    proposer: Proposer | None = None
    told_len: int = 0
    is_asleep: bool = False
    num_unlearnt: int = 0
    _interval: int = field(default=FIRST_TRIAL, repr=False)

    @property
    def is_local(self) -> bool:
        return self.name in LOCAL_SOURCES

    @property
    def looks_up(self) -> bool:
        """Whether it has a proposer that is told the text."""
        return self.name in LOOKUPS

    def is_due(self) -> bool:
        """It loses once more; whether it is time to try it."""
        self.num_unlearnt += 1
        if self.num_unlearnt < self._interval:
            return False
        self.num_unlearnt, self._interval = 0, min(MAX_TRIAL, 2 * self._interval)
        return True

    def win(self) -> None:
        self.num_unlearnt, self._interval = 0, FIRST_TRIAL


@dataclass(slots=True)
class SourceSet:
    """The sources of a sequence that has a local one; `chosen` is that of the open pass, and
    `is_trying` that another one was expected to be better. `heads`: candidates of the target's
    heads for the places behind `heads_at` committed tokens."""

    sources: list[Source]
    is_auto: bool
    chosen: Source | None = None
    is_trying: bool = False
    heads: tuple[tuple[int, ...], ...] = ()
    heads_at: int = 0

    def get(self, name: ProposalSource) -> Source | None:
        return next((source for source in self.sources if source.name == name), None)

    def drop(self, name: ProposalSource) -> None:
        """It may have that source no more."""
        self.sources = [source for source in self.sources if source.name != name]

    def heads_behind(self, committed_len: int) -> tuple[tuple[int, ...], ...]:
        """Candidates for exactly these places; () if there are none."""
        return self.heads if self.heads_at == committed_len else ()

    def drop_heads(self) -> None:
        """The pass behind the last candidates is not the next one."""
        self.heads = ()


def sources_of(
    asked: SpeculationMethod | None, speculation: SpeculationConfig, num_heads: int
) -> tuple[ProposalSource, ...]:
    """Of a request that asks for this method (None: the deployment's), the preferred one first."""
    if speculation.method == "off":
        return ()
    heads: tuple[ProposalSource, ...] = ("medusa",) if num_heads else ()
    match speculation.method if asked is None else asked:
        case "model":
            return ("model",)
        case "ngram":
            return ("ngram",)
        case "suffix":
            return ("suffix",)
        case "medusa":
            return heads
        case "hybrid":
            return ("model", speculation.hybrid_lookup)
        case "auto":
            return ("model", "suffix", "ngram", *heads)
        case "off":
            return ()


def first_with_any(sources: Sequence[Source]) -> Source:
    """The first that has something to offer, else the first."""
    return next((source for source in sources if source.have), sources[0])


def choose(
    sources: Sequence[Source], gain: Callable[[Source], tuple[float, float]]
) -> tuple[Source, bool]:
    """The source that is expected to gain most, and False; or one that is tried, and True.

    The first of equals wins. Only sources that have something to offer are compared.
    """
    offering = [source for source in sources if source.have]
    if not offering:
        return sources[0], False
    best = max(offering, key=gain)
    best.win()
    for source in offering:
        if source is not best and source.is_due():
            return source, True
    return best, False


def match(proposal: LocalProposal, token_ids: Sequence[int]) -> tuple[int, int]:
    """How many of a proposal's places a text that came to these tokens speaks about, and how many
    of them it agrees with: a path from the root of a tree."""
    num = len(proposal.token_ids)
    parents = proposal.parents or range(-1, num - 1)
    node = -1
    for place, token_id in enumerate(token_ids):
        children = [child for child in range(num) if parents[child] == node]
        if not children:
            return place, place
        taken = next((child for child in children if proposal.token_ids[child] == token_id), None)
        if taken is None:
            return place + 1, place
        node = taken
    return len(token_ids), len(token_ids)
