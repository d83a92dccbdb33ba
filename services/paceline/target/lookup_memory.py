"""What a target remembers in order to look texts up, and how much of it. Pure.

One limit holds for all of it, `speculation.max_lookup_memory_mib`, counted by what a token takes at
most. What is over goes politely: recent outputs first, the oldest of them; then the lookup of the
sequence whose own takes most, which goes on without it. It knows sequences and their sources, no
token and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import SpeculationConfig
from paceline.methods import ProposalSource
from paceline.proposers.ngram import MAX_RUN_BYTES
from paceline.proposers.recent_outputs import RecentOutputs
from paceline.proposers.suffix import MAX_TOKEN_BYTES
from paceline.target.sequence import Sequence
from paceline.target.sources import Source

_MIB = 1 << 20


@dataclass(slots=True)
class LookupDrops:
    """Since start. `num_unlearnt` outputs, or their ends: too many waited, or what was learnt of
    one was dropped. For the limit: `num_recent` trees of recent outputs, and lookups of sequences,
    by source; `num_full`: times that something had to go."""

    num_unlearnt: int = 0
    num_recent: int = 0
    num_ngram: int = 0
    num_suffix: int = 0
    num_full: int = 0


@dataclass(slots=True)
class _Held:
    """By a lookup of a sequence, whose proposer takes `token_bytes` a token as it was made."""

    sequence: Sequence
    token_bytes: int
    num_bytes: int = 0


class LookupMemory:
    """Of one target. `num_bytes`: what is in use, at most; outputs that wait are not in it."""

    def __init__(self, speculation: SpeculationConfig) -> None:
        self._speculation = speculation
        self.recent = RecentOutputs(*_recent_limits(speculation))
        self.drops = LookupDrops()
        self._recent_bytes = 0
        # By session and source; their sum is `_held_bytes`.
        self._held: dict[tuple[int, ProposalSource], _Held] = {}
        self._held_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._held_bytes + self._recent_bytes

    @property
    def max_bytes(self) -> int:
        return self._speculation.max_lookup_memory_mib * _MIB

    def set_speculation(self, speculation: SpeculationConfig) -> None:
        """A smaller limit wants an `enforce`, once sequences have given back what they may not
        have any more. Nobody looks into recent outputs where speculation is off."""
        old, self._speculation = self._speculation, speculation
        limits = _recent_limits(speculation)
        if limits != _recent_limits(old) or speculation.method == "off":
            self.recent.restart(*limits)
            self._count_recent()

    def enforce(self) -> None:
        """The limit: recent outputs go, the oldest first, then the largest of sequences."""
        if self.num_bytes <= self.max_bytes:
            return
        self.drops.num_full += 1
        while self.num_bytes > self.max_bytes and self.recent.forget_oldest():
            self._count_recent()
        while self.num_bytes > self.max_bytes:
            self._drop(max(self._held, key=lambda key: self._held[key].num_bytes))

    # -- recent outputs -----------------------------------------------------------------------

    def put_off(self, sequence: Sequence) -> None:
        """Its text is whole: to be learnt when there is time."""
        session, request = sequence.session, sequence.request
        output = session.log.slice(session.prompt_len, session.committed_len)
        self.recent.put_off(output, str(request.cache_salt), request.adapter)
        self._count_recent()

    def learn(self, max_tokens: int) -> int:
        """At most so many tokens of outputs that were put off; returns how many. They take no
        memory away but from older outputs."""
        if not self.recent.num_pending:
            return 0
        num_recent = self.drops.num_recent
        room = (self.max_bytes - self._held_bytes) // MAX_TOKEN_BYTES
        num_learnt = self.recent.learn(max_tokens, room)
        self._count_recent()
        self.drops.num_full += self.drops.num_recent > num_recent
        return num_learnt

    def _count_recent(self) -> None:
        self._recent_bytes = self.recent.num_tokens * MAX_TOKEN_BYTES
        self.drops.num_recent = self.recent.num_forgotten
        self.drops.num_unlearnt = self.recent.num_unlearnt

    # -- sequences ----------------------------------------------------------------------------

    def grow(self, sequence: Sequence, source: Source, num_tokens: int) -> bool:
        """Its proposer is about to be told so many; False: it has been dropped instead."""
        key = (sequence.session.session_id, source.name)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(sequence, self._token_bytes(source.name))
        held.num_bytes += num_tokens * held.token_bytes
        self._held_bytes += num_tokens * held.token_bytes
        self.enforce()
        return key in self._held

    def release(self, session_id: int, name: ProposalSource) -> None:
        """The sequence has that lookup no more."""
        held = self._held.pop((session_id, name), None)
        if held is not None:
            self._held_bytes -= held.num_bytes

    def _drop(self, key: tuple[int, ProposalSource]) -> None:
        """Proposals that it has made for the next pass stay."""
        sequence, name = self._held[key].sequence, key[1]
        self.release(*key)
        self.drops.num_ngram += name == "ngram"
        self.drops.num_suffix += name == "suffix"
        sequence.barred_sources.add(name)
        found = sequence.sources
        source = None if found is None else found.get(name)
        if found is not None and source is not None:
            source.proposer = None
            found.drop(name)

    def _token_bytes(self, name: ProposalSource) -> int:
        speculation = self._speculation
        if name == "suffix":
            return MAX_TOKEN_BYTES
        return MAX_RUN_BYTES * (speculation.prompt_lookup_max - speculation.prompt_lookup_min + 1)


def _recent_limits(speculation: SpeculationConfig) -> tuple[int, int]:
    depth = speculation.suffix_decoding_max_tree_depth
    return speculation.suffix_decoding_max_cached_tokens, depth
