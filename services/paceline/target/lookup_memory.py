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
    """Since start. `num_unlearnt` outputs came while too many waited to be learnt. For the limit:
    `num_recent` trees of recent outputs, and lookups of sequences, by source; `num_full`: times
    that it was reached."""

    num_unlearnt: int = 0
    num_recent: int = 0
    num_ngram: int = 0
    num_suffix: int = 0
    num_full: int = 0


class LookupMemory:
    """Of one target. `num_bytes`: what is in use, at most."""

    def __init__(self, speculation: SpeculationConfig) -> None:
        self._speculation = speculation
        self.recent = _recent_outputs(speculation)
        self.drops = LookupDrops()
        self._recent_bytes = 0
        # By session and source; their sum is `_held_bytes`.
        self._held: dict[tuple[int, ProposalSource], tuple[Sequence, int]] = {}
        self._held_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._held_bytes + self._recent_bytes

    @property
    def max_bytes(self) -> int:
        return self._speculation.max_lookup_memory_mib * _MIB

    def set_speculation(self, speculation: SpeculationConfig) -> None:
        """A smaller limit holds from the next token on."""
        old, self._speculation = self._speculation, speculation
        if _recent_limits(old) != _recent_limits(speculation):
            self.recent, self._recent_bytes = _recent_outputs(speculation), 0

    # -- recent outputs -----------------------------------------------------------------------

    def put_off(self, sequence: Sequence) -> None:
        """Its text is whole: to be learnt when there is time."""
        session, request, before = sequence.session, sequence.request, self.recent.num_given_up
        output = session.log.slice(session.prompt_len, session.committed_len)
        self.recent.put_off(output, str(request.cache_salt), request.adapter)
        self.drops.num_unlearnt += self.recent.num_given_up - before

    def learn(self, max_tokens: int) -> int:
        """At most so many tokens of outputs that were put off; returns how many. They take no
        memory away but from older outputs."""
        wanted = min(max_tokens, self.recent.num_pending)
        if wanted < 1:
            return 0
        self._forget(wanted * MAX_TOKEN_BYTES)
        room = (self.max_bytes - self.num_bytes) // MAX_TOKEN_BYTES
        num_learnt = self.recent.learn(min(wanted, max(0, room)))
        self._count_recent()
        self._forget(0)  # ends of outputs take a token, too
        return num_learnt

    def _forget(self, num_bytes: int) -> None:
        """Recent outputs, until there is room for so much or none of them is left."""
        if self.num_bytes + num_bytes <= self.max_bytes:
            return
        self.drops.num_full += 1
        while self.num_bytes + num_bytes > self.max_bytes and self.recent.forget_oldest():
            self.drops.num_recent += 1
            self._count_recent()

    def _count_recent(self) -> None:
        self._recent_bytes = self.recent.num_tokens * MAX_TOKEN_BYTES

    # -- sequences ----------------------------------------------------------------------------

    def grow(self, sequence: Sequence, source: Source, num_tokens: int) -> bool:
        """Its proposer is about to be told so many; False: it has been dropped instead."""
        num_bytes = num_tokens * self._token_bytes(source.name)
        key = (sequence.session.session_id, source.name)
        self._hold(key, sequence, num_bytes)
        self._forget(0)
        while self.num_bytes > self.max_bytes:
            largest = max(self._held, key=lambda each: self._held[each][1])
            self._drop(largest)
            if largest == key:
                return False
        return True

    def release(self, session_id: int, name: ProposalSource) -> None:
        """The sequence has that lookup no more."""
        _, num_bytes = self._held.pop((session_id, name), (None, 0))
        self._held_bytes -= num_bytes

    def _hold(self, key: tuple[int, ProposalSource], sequence: Sequence, num_bytes: int) -> None:
        self._held[key] = (sequence, num_bytes + self._held.get(key, (sequence, 0))[1])
        self._held_bytes += num_bytes

    def _drop(self, key: tuple[int, ProposalSource]) -> None:
        """Proposals that it has made for the next pass stay."""
        sequence, name = self._held[key][0], key[1]
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


def _recent_outputs(speculation: SpeculationConfig) -> RecentOutputs:
    return RecentOutputs(*_recent_limits(speculation))
