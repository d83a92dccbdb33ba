"""How many proposals to verify, how far a draft may run, and how often to do without. Pure.

`LookaheadPolicy` is the controller of one target (math.md 2g, 2h). The scheduler tells it what it
sees and asks how many of the proposals that are here the next pass should verify (`plan`), how far
a draft may run from now on (`grant`), and whether a lone sequence should wait (`lone`). It does
not know tokens, links, threads or clocks; times are arguments in microseconds. Nothing here can
change what is committed. In the rejection modes caps must not depend on the values of proposals
(C2, B1): everything used here is known before they are drawn (past rounds, times, counts).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from paceline.protocol import decision
from paceline.protocol.acceptance_model import AcceptanceClass, ClassCounts, Survivals
from paceline.protocol.decision import Choice, Explanation
from paceline.protocol.draft_cost import DraftCost
from paceline.protocol.forecast import Forecast
from paceline.protocol.lone_wait import Average, LonePolicy
from paceline.protocol.lookahead_types import (
    Grant,
    Guidance,
    LookaheadLimits,
    PassRecord,
    SequenceLookahead,
    StarvationCounts,
    Window,
)
from paceline.protocol.pass_cost import PassCost
from paceline.protocol.profit import DealState, Profit
from paceline.protocol.row_explorer import PROBE_TOKENS, RowExplorer
from paceline.protocol.row_price import RowPrice, full_windows
from paceline.protocol.sequence_book import SequenceBook

__all__ = [
    "AcceptanceClass",
    "Choice",
    "ClassCounts",
    "DealState",
    "Explanation",
    "Grant",
    "Guidance",
    "LookaheadLimits",
    "LookaheadPolicy",
    "PassRecord",
    "SequenceLookahead",
    "StarvationCounts",
    "Window",
]

_ACTIVE_PASSES = 32  # without a proposal, and the drafts are taken to be gone
_REST = Grant(0)


class LookaheadPolicy:
    """The controller of one target."""

    def __init__(self, limits: LookaheadLimits) -> None:
        self.limits = limits
        self.lone = LonePolicy(limits.max_lone_wait_us)
        self.profit = Profit()
        self.forecast = Forecast()
        self._guidance = Guidance()
        self._book = SequenceBook(limits.max_num_speculative_tokens)
        self._price = RowPrice()
        self._cost = PassCost()
        self._draft = DraftCost(self.lone)
        self._idle_us = Average(weight=0.05)
        self._num_passes = 0
        self._batch = 1  # decoding sequences of the last pass
        self._explorer = RowExplorer()
        self._last_active = -_ACTIVE_PASSES  # the last pass that had, or could have had, proposals
        self._is_drafting = False  # somebody had a K > 0 when the last pass was planned
        self._max_ahead = 0  # the largest credit since the last look at K
        self._grants: dict[tuple[int, int], Grant] = {}  # <= (draft-ahead + 1) x (fan-out + 1)
        self._last: tuple[Sequence[Window], int, int] | None = None

    # -- what is decided --------------------------------------------------------------------

    def plan(self, windows: Sequence[Window], num_other_rows: int, max_rows: int) -> list[int]:
        """Proposals to verify in the next pass, one number per window, each <= its `have`.

        `num_other_rows` are in the pass anyway (prompts); at most `max_rows` proposals fit.
        """
        if not windows:
            return []
        self._batch = len(windows)
        self._last = (windows, num_other_rows, max_rows)
        self._is_drafting = self._book.count_wanted(windows)
        if self.limits.is_adaptive and self._cost.is_measured:
            if self._price.is_due(self._batch, self._num_passes):
                self._set_price(windows, max_rows)
            return self._plan_best(windows, num_other_rows, max_rows)
        return self._plan_evenly(windows, max_rows)

    def _plan_evenly(self, windows: Sequence[Window], max_rows: int) -> list[int]:
        is_resting = self.profit.deal.is_resting
        wanted = [
            min(window.have, self._first_count(window.lookahead))
            if not is_resting or self.is_fixed(window.lookahead)
            else 0
            for window in windows
        ]
        return decision.share_evenly(wanted, max_rows)

    def _plan_best(
        self, windows: Sequence[Window], num_other_rows: int, max_rows: int
    ) -> list[int]:
        """Who has a fixed K gets it first; the rest is the argmax of 2g.5."""
        counts, left = [0] * len(windows), max_rows
        adaptive: list[tuple[Survivals, int]] = []
        places: list[int] = []
        negatives: list[float] = []
        is_resting = self.profit.deal.is_resting
        for index, window in enumerate(windows):
            lookahead, have = window.lookahead, window.have
            if not have:
                continue
            if lookahead.is_fixed:
                share = -(-left // (len(windows) - index))
                counts[index] = max(0, min(have, self.ceiling(lookahead), share))
                left -= counts[index]
            elif not is_resting:
                room = min(have, self.ceiling(lookahead))
                survivals = window.survivals or self._book.survivals(lookahead)
                room = min(room, len(survivals.negatives))
                negatives += survivals.negatives[:room]
                adaptive.append((survivals, room))
                places.append(index)
        negatives.sort()
        num_fixed = max_rows - left
        del negatives[max(0, left) :]
        cost_us = self._cost.curve(len(windows), num_other_rows, num_fixed + len(negatives))
        if not negatives or cost_us is None:
            self.forecast.plan(len(windows), cost_us[0] if cost_us and not num_fixed else None)
            return counts
        costs, idle_us = cost_us[num_fixed:] if num_fixed else cost_us, self._idle
        num_rows, rate = decision.best_rows(negatives, len(windows), costs, idle_us)
        tokens = rate * (costs[num_rows] + idle_us)
        self.forecast.plan(tokens, None if num_fixed else costs[num_rows])
        shares = decision.share_rows(adaptive, negatives, num_rows)
        for index, count in zip(places, shares, strict=True):
            counts[index] = count
        self._explorer.add(windows, counts, left - num_rows, self.ceiling)
        return counts

    def ceiling(self, lookahead: SequenceLookahead) -> int:
        """Most proposals that a pass may verify for the sequence, whatever is predicted; 0: it
        needs no draft. The K itself where that is fixed."""
        wanted, limits = lookahead.asked, self.limits
        most = limits.max_num_speculative_tokens
        if wanted is None:
            wanted = limits.num_speculative_tokens if self.is_fixed(lookahead) else most
        given = self._guidance.max_num_speculative_tokens
        return min(wanted, most) if given is None else min(wanted, most, given)

    def is_fixed(self, lookahead: SequenceLookahead) -> bool:
        return lookahead.is_fixed or not self.limits.is_adaptive

    def _first_count(self, lookahead: SequenceLookahead) -> int:
        """K where it is fixed, or as long as nothing is measured."""
        ceiling = self.ceiling(lookahead)
        if lookahead.asked is None:
            return min(ceiling, self.limits.num_speculative_tokens)
        return ceiling

    def grant(self, lookahead: SequenceLookahead) -> Grant:
        """How far the sequence's draft may run from now on: asked before each open and verdict.

        A credit that was given is never taken back; a smaller one holds for what comes after.
        """
        if self.is_fixed(lookahead):
            lookahead.cap = self.ceiling(lookahead)
            return self._grant(lookahead, 2 * lookahead.cap + 1) if lookahead.cap else _REST
        lookahead.cap = 0
        if not self.profit.deal.may_grant:
            return _REST
        lookahead.cap = count = self._best_count(lookahead)
        if count:
            lookahead.active_since = lookahead.active_since or max(1, self._num_passes)
            is_lone = self._batch == 1 and lookahead.is_corrected
            return self._grant(lookahead, self._draft.credit(count, is_lone))
        if lookahead.probe_until and self.ceiling(lookahead):
            return self._grant(lookahead, PROBE_TOKENS + self._draft.depth)
        if lookahead.active_since:
            self._book.stop(lookahead, self._num_passes)
        if self._is_watched(lookahead):
            return self._grant(lookahead, 1 + self._draft.depth)
        return _REST

    def _is_watched(self, lookahead: SequenceLookahead) -> bool:
        if not self.ceiling(lookahead):
            return False
        return self._book.is_watched(lookahead, self._num_passes, self._is_drafting)

    def _grant(self, lookahead: SequenceLookahead, ahead: int) -> Grant:
        ahead = min(ahead, self.limits.max_draft_ahead)
        if self._guidance.max_draft_ahead is not None:
            ahead = min(ahead, self._guidance.max_draft_ahead)
        fan_out = 0
        if self.limits.max_fan_out:
            most = self._guidance.max_fan_out
            fan_out = self._draft.fan_out(lookahead.key.mode, self.limits.max_fan_out, self._batch)
            fan_out = fan_out if most is None else min(fan_out, most)
        self._max_ahead = max(self._max_ahead, ahead)
        return self._grants.setdefault((ahead, fan_out), Grant(ahead, fan_out))

    def _best_count(self, lookahead: SequenceLookahead) -> int:
        """K of a full window."""
        survival = self._price.survival
        if survival is None:
            return self._first_count(lookahead)
        negatives = self._book.survivals(lookahead).negatives
        return bisect_right(negatives, -survival, 0, self.ceiling(lookahead))

    def aim(self, lookahead: SequenceLookahead, own: Survivals | None = None) -> int:
        """Sets K of a source inside the target, which needs no credit. `own`: its survivals."""
        most = self.ceiling(lookahead)
        if not self.is_fixed(lookahead):
            most = 0 if self.profit.deal.is_resting else self._worth(lookahead, own, most)
        lookahead.cap = most
        return most

    def gain(
        self, lookahead: SequenceLookahead, have: int, own: Survivals | None = None
    ) -> tuple[float, float]:
        """What `have` proposals are expected to bring in accepted tokens: those that are worth a
        row, less what their rows cost, and all that may be verified."""
        sums = (own or self._book.survivals(lookahead)).sums
        most = min(have, self.ceiling(lookahead), len(sums) - 1)
        if self.is_fixed(lookahead):
            return sums[most], sums[most]
        count = min(most, self._worth(lookahead, own, most))
        return sums[count] - count * (self._price.row_tokens or 0.0), sums[most]

    def _worth(self, lookahead: SequenceLookahead, own: Survivals | None, most: int) -> int:
        count = self._price.worth((own or self._book.survivals(lookahead)).negatives, most)
        return min(most, self._first_count(lookahead)) if count is None else count

    # -- what is told -----------------------------------------------------------------------

    def add(self, lookahead: SequenceLookahead) -> None:
        """A sequence has come; sets its first `cap`."""
        self.grant(lookahead)

    def end_round(
        self,
        lookahead: SequenceLookahead,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        was_foreseen: bool | None = None,
    ) -> None:
        """A sequence's share of a pass: `num_draft_tokens` were verified.

        `was_foreseen`: whether the pass's own token behind a full acceptance (or a plain round's)
        equals the proposal that has come for its place meanwhile; None: none has, or the mode does
        not compare. Where passes never wait, that is all that shows a draft to be always wrong.
        """
        lookahead.is_corrected = num_accepted_tokens < num_draft_tokens or was_foreseen is False
        if was_foreseen is not None:
            num_draft_tokens += 1
            num_accepted_tokens += was_foreseen
        if num_draft_tokens:
            self._book.learn(lookahead, num_draft_tokens, num_accepted_tokens)
        if self._price.survival is None or lookahead.is_fixed:
            return
        if lookahead.probe_until:
            has_won, was_right = self._best_count(lookahead) > 0, num_accepted_tokens > 0
            self._book.probe(lookahead, self._num_passes, has_won, was_right, self._draft.depth)
        elif lookahead.cap or not self.profit.deal.may_grant or not self.ceiling(lookahead):
            return
        elif not self._is_watched(lookahead):
            self._book.rest(lookahead, self._price.survival, self._num_passes, self._draft.depth)

    def learn(
        self, lookahead: SequenceLookahead, num_draft_tokens: int, num_accepted_tokens: int
    ) -> None:
        """The same for a source inside the target: there is nobody to rest or to be watched."""
        lookahead.probe_until = 0
        if num_draft_tokens:
            self._book.learn(lookahead, num_draft_tokens, num_accepted_tokens)

    def try_once(self, lookahead: SequenceLookahead) -> None:
        """The next pass verifies some of its proposals, whatever is expected of them."""
        lookahead.probe_until = max(lookahead.probe_until, self._num_passes + 1)

    def end_pass(self, record: PassRecord) -> None:
        self._num_passes += 1
        pass_us = record.ended_us - record.started_us
        was_held = self.lone.take_held()
        self.forecast.end(record)
        if not record.num_prefill_rows:
            self.lone.learn_pass(pass_us, record.num_draft_tokens)
            self.lone.row_us = self._cost.row_us(1)
        if not self.limits.is_adaptive:
            return
        if not self.profit.deal.is_resting:
            num_rows = (record.num_sequences, record.num_rows, record.num_prefill_rows)
            self._cost.record(*num_rows, pass_us)
        idle_us = record.idle_us or 0
        if idle_us and not was_held:
            self._idle_us.update(min(idle_us, pass_us))
        self._last_active = self._num_passes if record.num_draft_tokens else self._last_active
        if not record.num_prefill_rows and pass_us > 0:
            is_active = self._num_passes - self._last_active < _ACTIVE_PASSES
            self.profit.record(
                record.num_sequences,
                record.num_committed,
                pass_us + idle_us,
                record.ended_us,
                self._is_drafting and is_active,
                self._draft.run_down_us(self._max_ahead),
            )

    def learn_draft_step(self, step_us: float, num_tokens: int) -> None:
        """A draft says that `num_tokens` took it `step_us` of computing."""
        self._last_active = self._num_passes
        self.lone.draft_token_us.update(step_us / num_tokens)

    def learn_arrival(self, since_last_us: float, num_tokens: int) -> None:
        """Proposals of one window came so long after those before them."""
        self.lone.arrival_us.update(since_last_us / num_tokens)

    def learn_rtt(self, rtt_us: float) -> None:
        self._draft.learn_rtt(rtt_us)

    def guide(self, guidance: Guidance) -> None:
        """The Controller's word; the last one holds until there is another."""
        self._guidance = replace(guidance, priors={})
        self._book.model.set_priors(guidance.priors)

    def set_limits(self, limits: LookaheadLimits) -> None:
        """The configuration has changed; holds from the next decision on."""
        self.limits = limits
        self.lone.max_wait_us = limits.max_lone_wait_us
        self._book.model.set_length(limits.max_num_speculative_tokens)
        self._price.expire()
        self._grants.clear()

    # -- what is known ----------------------------------------------------------------------

    @property
    def _idle(self) -> float:
        return self._idle_us.value or 0.0

    def _set_price(self, windows: Sequence[Window], max_rows: int) -> None:
        self._cost.refresh()
        groups = full_windows(windows, self._book.survivals, self.ceiling)
        wanted = sum(ceiling * count for (_, ceiling), count in groups.items())
        total = max(0, min(wanted, max_rows))
        cost_us = self._cost.curve(len(windows), 0, total)
        if not groups or cost_us is None:
            return
        self._price.update(groups, total, len(windows), cost_us, self._idle)
        self._draft.update_fan_out(self._num_passes)

    # -- what can be seen -------------------------------------------------------------------

    def class_counts(self) -> dict[AcceptanceClass, ClassCounts]:
        """What this target itself has seen: for the Controller's pool."""
        return self._book.model.counts()

    def starvation(self) -> StarvationCounts:
        return self._book.starvation

    def explain(self) -> Explanation | None:
        """The last decision; None before the first that rests on measurements."""
        if self._last is None or self._price.survival is None:
            return None
        windows, num_other_rows, max_rows = self._last
        num_sequences = len(windows)
        lookaheads = [window.lookahead for window in windows]
        alpha = sum(self._book.survivals(a).alpha for a in lookaheads) / num_sequences
        ceiling = min(max(map(self.ceiling, lookaheads)), max(0, max_rows) // num_sequences)
        cost_us = self._cost.curve(num_sequences, num_other_rows, num_sequences * ceiling)
        if cost_us is None:
            return None
        chosen = min(ceiling, round(sum(a.cap for a in lookaheads) / num_sequences))
        inputs = {
            "num_sequences": num_sequences,
            "num_prefill_rows": num_other_rows,
            "acceptance_rate": alpha,
            "min_survival": self._price.survival,
            "pass_us": cost_us[0],
            "row_us": self._cost.row_us(num_sequences),
            "idle_us": self._idle,
            "max_num_speculative_tokens": ceiling,
            "max_draft_ahead": self.limits.max_draft_ahead,
            "predicted_tokens_per_s": self.forecast.tokens_per_s,
            **self._draft.inputs(),
            **self.profit.inputs(),
        }
        mean = self._book.profile(lookaheads[0]).survivals(alpha)
        options = decision.choices(mean, num_sequences, cost_us, self._idle, ceiling)
        reason = decision.reason(options, chosen, self.profit.deal.state)
        return Explanation(inputs, options, chosen, reason)
