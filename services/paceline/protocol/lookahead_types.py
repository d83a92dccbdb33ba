"""What goes into the lookahead policy and comes out of it. Pure, and nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.protocol.acceptance_model import (
    AcceptanceClass,
    ClassCounts,
    ClassProfile,
    RestProbes,
    Survivals,
)
from paceline.protocol.lone_wait import AcceptanceEstimate


@dataclass(frozen=True, slots=True)
class LookaheadLimits:
    """What a deployment allows. `num_speculative_tokens`: K where `is_adaptive` is False, and
    before anything was measured; `max_num_speculative_tokens` 0: off. `max_draft_ahead`: positions
    beyond the committed text."""

    is_adaptive: bool = True
    num_speculative_tokens: int = 4
    max_num_speculative_tokens: int = 16
    max_draft_ahead: int = 16
    max_fan_out: int = 0
    max_lone_wait_us: int = 50_000


@dataclass(frozen=True, slots=True)
class Guidance:
    """What the Controller tells a target: the fleet's knowledge, and what is scarce.

    `priors`: counts of classes pooled over the fleet, this target's own not counted twice.
    Ceilings hold beside the deployment's; None: no ceiling.
    """

    priors: Mapping[AcceptanceClass, ClassCounts] = field(default_factory=dict)
    max_draft_ahead: int | None = None
    max_num_speculative_tokens: int | None = None
    max_fan_out: int | None = None


@dataclass(slots=True)
class SequenceLookahead:
    """What the policy knows of one sequence; it belongs to the sequence, only the policy writes.

    `asked`: most proposals to verify in a pass that the request wants (0: no drafting for it; None:
    it leaves that to us); `is_fixed`: always so many, whatever is predicted. `cap` is the K in
    force: what a full window would be cut to now. `key` changes when another draft takes over.

    The rest is derived: `profile` of the class `profile_key`, `survivals` of `version`; it probes
    for its class until pass `probe_until` (0: it does not). It has had a K since pass
    `active_since` (0: it has none), and its draft is watched until pass `watch_until`.
    """

    key: AcceptanceClass
    asked: int | None = None
    is_fixed: bool = False
    cap: int = 0
    posterior: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    profile: ClassProfile | None = field(default=None, repr=False, compare=False)
    profile_key: AcceptanceClass | None = field(default=None, repr=False, compare=False)
    survivals: Survivals | None = field(default=None, repr=False, compare=False)
    version: int = field(default=-1, repr=False, compare=False)
    probe_until: int = field(default=0, repr=False, compare=False)
    probes: RestProbes = field(default_factory=lambda: RestProbes(8), repr=False, compare=False)
    active_since: int = field(default=0, repr=False, compare=False)
    watch_until: int = field(default=0, repr=False, compare=False)
    is_corrected: bool = field(default=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Window:
    """One decoding sequence when a pass is planned: `have` proposals are here and would fit.

    `survivals`: of exactly these, where their class does not tell (the nodes of a tree, each with
    the probability that it is on the accepted path). `is_local`: no draft is late with them.
    """

    lookahead: SequenceLookahead
    have: int
    survivals: Survivals | None = None
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """How far a draft may run for a sequence: `draft_ahead` positions beyond the committed text
    (0: it rests), with branches for `fan_out` runner-ups of each."""

    draft_ahead: int
    fan_out: int = 0


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass that was done. `num_rows` were computed, `num_prefill_rows` of them for prompts;
    `num_sequences` are the decoding ones, `num_draft_tokens` the proposals among the rows,
    `num_committed` all tokens that came out. `idle_us`: how long the engine had stood still
    before, while there was work; None when there was none (then nothing can be said)."""

    num_sequences: int
    num_rows: int
    num_prefill_rows: int
    num_draft_tokens: int
    num_committed: int
    started_us: int
    ended_us: int
    idle_us: int | None


@dataclass(frozen=True, slots=True)
class StarvationCounts:
    """Since start. `wanted`: accepted tokens expected of the windows that the policy would have
    verified; `missing`: those of them that had not arrived (both weighted by acceptance)."""

    wanted: float = 0.0
    missing: float = 0.0
