"""How many proposals to verify, how far a draft may run, and how often to do without. Pure.

`LookaheadPolicy` is the controller of one target (math.md 2g, 2h). The scheduler tells it what it
sees (rounds, passes, draft steps, round trips) and asks three things: how many of the proposals
that are here the next pass should verify (`plan`), how far the draft of a sequence may run from
now on (`grant`), and whether a lone sequence should wait (`lone`). It does not know tokens, links,
threads or clocks; times are arguments in microseconds. Nothing here can change what is committed.

In the rejection modes caps must not depend on the values of proposals (C2, B1): everything used
here is known before they are drawn (past rounds, times, counts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.protocol.lone_wait import AcceptanceEstimate, LonePolicy
from paceline.sampling.params import VerificationMode


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
class AcceptanceClass:
    """Sequences whose proposals are expected to fare alike: same draft, mode and temperature.

    `temperature` is rounded by `of`, so that there are few classes.
    """

    draft_model: str
    mode: VerificationMode
    temperature: float

    @staticmethod
    def of(draft_model: str, mode: VerificationMode, temperature: float) -> AcceptanceClass:
        return AcceptanceClass(draft_model, mode, round(4 * temperature) / 4)


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Discounted counts of one class: proposals at position k (0-based) of a window that were
    verified with all before them accepted (`reached`), and those that were `accepted`."""

    reached: tuple[float, ...]
    accepted: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Guidance:
    """What the Controller tells a target: the fleet's knowledge, and what is scarce.

    `priors`: counts of classes pooled over the fleet, this target's own not counted twice.
    Ceilings hold beside the deployment's; None: no ceiling.
    """

    priors: Mapping[AcceptanceClass, ClassCounts] = field(default_factory=dict)
    max_draft_ahead: int | None = None
    max_num_speculative_tokens: int | None = None


@dataclass(slots=True)
class SequenceLookahead:
    """What the policy knows of one sequence; it belongs to the sequence, only the policy writes.

    `asked`: most proposals to verify in a pass that the request wants (0: no drafting for it; None:
    it leaves that to us); `is_fixed`: always so many, whatever is predicted. `cap` is the K in
    force: what a full window would be cut to now. `key` changes when another draft takes over.
    """

    key: AcceptanceClass
    asked: int | None = None
    is_fixed: bool = False
    cap: int = 0
    posterior: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)


@dataclass(frozen=True, slots=True)
class Window:
    """One decoding sequence when a pass is planned: `have` proposals are here and would fit."""

    lookahead: SequenceLookahead
    have: int


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
class Choice:
    """One candidate of a decision: so many proposals per sequence (mean), and what is predicted."""

    num_speculative_tokens: float
    rows: int
    tokens_per_pass: float
    pass_us: float

    @property
    def tokens_per_s(self) -> float:
        return 1e6 * self.tokens_per_pass / self.pass_us if self.pass_us else 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The last decision: what it was made from (names to figures, units in the names), the
    candidates in order of K, the chosen one, and why in a sentence."""

    inputs: Mapping[str, float]
    choices: tuple[Choice, ...]
    chosen: int
    reason: str


@dataclass(frozen=True, slots=True)
class StarvationCounts:
    """Since start. `wanted`: accepted tokens expected of the windows that the policy would have
    verified; `missing`: those of them that had not arrived (both weighted by acceptance)."""

    wanted: float = 0.0
    missing: float = 0.0


class LookaheadPolicy:
    """The controller of one target."""

    def __init__(self, limits: LookaheadLimits) -> None:
        self.limits = limits
        self.lone = LonePolicy(limits.max_lone_wait_us)

    # -- what is decided --------------------------------------------------------------------

    def plan(self, windows: Sequence[Window], num_other_rows: int, max_rows: int) -> list[int]:
        """Proposals to verify in the next pass, one number per window, each <= its `have`.

        `num_other_rows` are in the pass anyway (prompts); at most `max_rows` proposals fit.
        Also sets the `cap` of each sequence.
        """
        left = max_rows
        counts = []
        for index, window in enumerate(windows):
            share = -(-left // (len(windows) - index))
            counts.append(max(0, min(window.have, self.ceiling(window.lookahead), share)))
            left -= counts[-1]
        return counts

    def ceiling(self, lookahead: SequenceLookahead) -> int:
        """Most proposals that a pass may verify for the sequence, whatever is predicted; 0: it
        needs no draft. The K itself where that is fixed."""
        wanted, limits = lookahead.asked, self.limits
        if wanted is None:
            wanted = limits.num_speculative_tokens
        return min(wanted, limits.max_num_speculative_tokens)

    def grant(self, lookahead: SequenceLookahead) -> Grant:
        """How far the sequence's draft may run from now on: asked before each open and verdict.

        A credit that was given is never taken back; a smaller one holds for what comes after.
        """
        lookahead.cap = self.ceiling(lookahead)
        if not lookahead.cap:
            return Grant(0)
        return Grant(min(self.limits.max_draft_ahead, 2 * lookahead.cap + 1))

    # -- what is told -----------------------------------------------------------------------

    def add(self, lookahead: SequenceLookahead) -> None:
        """A sequence has come; sets its first `cap`."""
        self.grant(lookahead)

    def end_round(
        self, lookahead: SequenceLookahead, num_draft_tokens: int, num_accepted_tokens: int
    ) -> None:
        """A sequence's share of a pass: `num_draft_tokens` were verified."""
        lookahead.posterior.update(num_draft_tokens, num_accepted_tokens)

    def end_pass(self, record: PassRecord) -> None:
        if not record.num_prefill_rows:
            self.lone.pass_us.update(record.ended_us - record.started_us)

    def learn_draft_step(self, step_us: float, num_tokens: int) -> None:
        """A draft says that `num_tokens` took it `step_us` of computing."""
        self.lone.draft_token_us.update(step_us / num_tokens)

    def learn_arrival(self, since_last_us: float, num_tokens: int) -> None:
        """Proposals of one window came so long after those before them."""
        self.lone.arrival_us.update(since_last_us / num_tokens)

    def learn_rtt(self, rtt_us: float) -> None:
        self.lone.rtt_us.update(rtt_us)

    def guide(self, guidance: Guidance) -> None:
        """The Controller's word; the last one holds until there is another."""

    def set_limits(self, limits: LookaheadLimits) -> None:
        """The configuration has changed; holds from the next decision on."""
        self.limits = limits
        self.lone.max_wait_us = limits.max_lone_wait_us

    # -- what can be seen -------------------------------------------------------------------

    def class_counts(self) -> dict[AcceptanceClass, ClassCounts]:
        """What this target itself has seen: for the Controller's pool."""
        return {}

    def starvation(self) -> StarvationCounts:
        return StarvationCounts()

    def explain(self) -> Explanation | None:
        """The last decision; None before the first."""
        return None
