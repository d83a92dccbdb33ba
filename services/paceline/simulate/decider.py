"""Who decides K and credits for one simulated target: the real policy, or another target's.

`PolicyDecider` calls `LookaheadPolicy` as `target/scheduler.py` and `target/draft_desk.py` do, for
every sequence. That is the exact way. In large fleets only some targets have one; the others have
a `FollowerDecider`, which does what its leader does with sequences of the same class, on average.
A target without drafts has nothing to decide.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from paceline.config import SpeculationConfig
from paceline.protocol.lone_wait import LonePolicy
from paceline.protocol.lookahead import (
    AcceptanceClass,
    Guidance,
    LookaheadPolicy,
    PassRecord,
    SequenceLookahead,
    Window,
)
from paceline.sampling.params import VerificationMode
from paceline.simulate.line import Delivery
from paceline.simulate.places import Floats, Ints, Places
from paceline.simulate.traffic_config import ClassConfig
from paceline.target.lookahead import lookahead_limits

# All sessions of a step say the same of it: so many of them are told to the policy.
MAX_TOLD_PER_STEP = 8
_GOLDEN = 0.6180339887498949


class Decider(Protocol):
    """`index` are decoding sequences' places, `have` their windows."""

    @property
    def lone(self) -> LonePolicy | None: ...

    def plan(self, index: Ints, have: Ints, num_other_rows: int, max_rows: int) -> Ints: ...

    def add(self, place: int) -> None: ...

    def grant(self, index: Ints) -> None:
        """Sets credits and fan-outs of these places."""

    def end_round(self, index: Ints, counts: Ints, accepted: Ints) -> None: ...

    def end_pass(self, record: PassRecord) -> None: ...

    def learn_rtt(self, rtt_us: float) -> None: ...

    def guide(self, guidance: Guidance) -> None: ...

    def lookahead(self, place: int) -> SequenceLookahead | None: ...


def verification_mode(temperature: float) -> VerificationMode:
    return VerificationMode.COUPLED if temperature else VerificationMode.GREEDY


def share_rows(counts: Ints, max_rows: int) -> Ints:
    """`counts` cut so that they fit, evenly."""
    if int(counts.sum()) <= max_rows:
        return counts
    low, high = 0, int(counts.max())
    while low < high:  # the largest even cap that fits
        middle = (low + high + 1) // 2
        if int(np.minimum(counts, middle).sum()) <= max_rows:
            low = middle
        else:
            high = middle - 1
    return np.minimum(counts, low)


class PolicyDecider:
    """The real policy of one target."""

    def __init__(
        self, places: Places, low: int, config: SpeculationConfig, classes: tuple[ClassConfig, ...]
    ) -> None:
        self.policy = LookaheadPolicy(lookahead_limits(config))
        self._places, self._low = places, low
        self._high = low + places.max_num_seqs
        # As a real target knows them: it cannot tell what a request is about.
        self._keys = [
            AcceptanceClass.of("draft", verification_mode(c.temperature), c.temperature)
            for c in classes
        ]
        self._lookaheads: dict[int, SequenceLookahead] = {}
        self._num_planned = 0
        count = len(classes)
        # What followers do: means by class, of the last pass that had such sequences.
        self.caps: Floats = np.zeros(count)
        self.credits: Floats = np.zeros(count)
        self.fan_outs: Floats = np.zeros(count)
        self.mean_cap = 0.0  # over the sequences that the last grants were for
        # Since the start: what a target says with its heartbeats.
        self.num_passes, self.busy_us = 0, 0
        for class_id, key in enumerate(self._keys):
            lookahead = SequenceLookahead(key)
            self.policy.add(lookahead)
            grant = self.policy.grant(lookahead)
            self.caps[class_id] = lookahead.cap
            self.credits[class_id] = grant.draft_ahead
            self.fan_outs[class_id] = grant.fan_out

    @property
    def lone(self) -> LonePolicy | None:
        return self.policy.lone

    def add(self, place: int) -> None:
        lookahead = SequenceLookahead(self._keys[int(self._places.class_id[place])])
        self._lookaheads[place] = lookahead
        self.policy.add(lookahead)

    def plan(self, index: Ints, have: Ints, num_other_rows: int, max_rows: int) -> Ints:
        """In turn, as the scheduler: who came first has no more claim to rows."""
        first = self._num_planned % max(1, len(index))
        self._num_planned += 1
        turn = np.roll(np.arange(len(index)), -first)
        windows = [
            Window(self._lookaheads[place], count)
            for place, count in zip(index[turn].tolist(), have[turn].tolist(), strict=True)
        ]
        counts = np.empty(len(index), dtype=np.int64)
        counts[turn] = self.policy.plan(windows, num_other_rows, max_rows)
        return counts

    def grant(self, index: Ints) -> None:
        """Publishes the means for followers, too."""
        places, policy = self._places, self.policy
        by_class: dict[int, list[tuple[int, int, int]]] = {}
        for place in index.tolist():
            lookahead = self._lookaheads[place]
            grant = policy.grant(lookahead)
            places.credit[place] = grant.draft_ahead
            places.fan_out[place] = grant.fan_out
            seen = by_class.setdefault(int(places.class_id[place]), [])
            seen.append((lookahead.cap, grant.draft_ahead, grant.fan_out))
        all_caps = [cap for values in by_class.values() for cap, _, _ in values]
        self.mean_cap = sum(all_caps) / max(1, len(all_caps))
        for class_id, values in by_class.items():
            caps, credits, fan_outs = zip(*values, strict=True)
            self.caps[class_id] = sum(caps) / len(caps)
            self.credits[class_id] = sum(credits) / len(credits)
            self.fan_outs[class_id] = sum(fan_outs) / len(fan_outs)

    def end_round(self, index: Ints, counts: Ints, accepted: Ints) -> None:
        for place, count, good in zip(
            index.tolist(), counts.tolist(), accepted.tolist(), strict=True
        ):
            self.policy.end_round(self._lookaheads[place], count, good)

    def end_pass(self, record: PassRecord) -> None:
        self.num_passes += 1
        self.busy_us += record.ended_us - record.started_us
        self.policy.end_pass(record)

    def learn_rtt(self, rtt_us: float) -> None:
        self.policy.learn_rtt(rtt_us)

    def guide(self, guidance: Guidance) -> None:
        self.policy.guide(guidance)

    def lookahead(self, place: int) -> SequenceLookahead | None:
        return self._lookaheads[place]

    def hear(self, delivery: Delivery) -> None:
        """Proposals arrive: what the draft desk tells the policy of them."""
        places, index = self._places, delivery.places
        fits = (index >= self._low) & (index < self._high)
        fits &= delivery.chains == places.chain[index]
        fits &= delivery.lengths > places.committed[index] + places.windows(index)
        mine = index[fits]
        if not len(mine):
            return
        now_us = delivery.arrives_us
        goes_on = (places.windows(mine) > 0) & (places.last_draft_us[mine] > places.last_us[mine])
        for place, is_next in zip(mine[:MAX_TOLD_PER_STEP], goes_on, strict=False):
            self.policy.learn_draft_step(delivery.step_us, 1)
            if is_next:
                self.policy.learn_arrival(now_us - float(places.last_draft_us[place]), 1)
        places.last_draft_us[mine] = now_us


class FollowerDecider:
    """Decides for each class what `leader` decides on average; fractions fall to places in turn."""

    def __init__(self, places: Places, leader: PolicyDecider) -> None:
        self._places, self._leader = places, leader
        self._turn: Floats = np.mod(np.arange(places.size) * _GOLDEN, 1.0).astype(np.float64)

    def _rounded(self, means: Floats, index: Ints) -> Ints:
        return (means[self._places.class_id[index]] + self._turn[index]).astype(np.int64)

    def plan(self, index: Ints, have: Ints, num_other_rows: int, max_rows: int) -> Ints:
        return share_rows(np.minimum(have, self._rounded(self._leader.caps, index)), max_rows)

    def grant(self, index: Ints) -> None:
        self._places.credit[index] = self._rounded(self._leader.credits, index)
        self._places.fan_out[index] = self._rounded(self._leader.fan_outs, index)

    @property
    def lone(self) -> LonePolicy | None:
        return None

    def lookahead(self, place: int) -> SequenceLookahead | None:
        return None

    def add(self, place: int) -> None:
        """Nothing: nobody here remembers sequences."""

    def end_round(self, index: Ints, counts: Ints, accepted: Ints) -> None:
        """Nothing: the leader learns."""

    def end_pass(self, record: PassRecord) -> None:
        """Nothing: the leader learns."""

    def learn_rtt(self, rtt_us: float) -> None:
        """Nothing: the leader learns."""

    def guide(self, guidance: Guidance) -> None:
        """Nothing: the leader is told."""


class PlainDecider(FollowerDecider):
    """No draft: nothing to verify, no credit."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def plan(self, index: Ints, have: Ints, num_other_rows: int, max_rows: int) -> Ints:
        return np.zeros(len(index), dtype=np.int64)

    def grant(self, index: Ints) -> None:
        self._places.credit[index] = 0
        self._places.fan_out[index] = 0
