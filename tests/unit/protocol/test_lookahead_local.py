"""Sources inside the target: K without a credit, what they are worth, and the breaker over them."""

from itertools import groupby

import pytest

from paceline.protocol.acceptance_model import AcceptanceModel, Survivals
from paceline.protocol.lookahead import (
    AcceptanceClass,
    Grant,
    LookaheadLimits,
    LookaheadPolicy,
    PassRecord,
    SequenceLookahead,
    Window,
)
from paceline.sampling.params import VerificationMode

GREEDY = VerificationMode.GREEDY
SECOND = 1_000_000


def local(asked=None, *, name="suffix", is_fixed=False):
    return SequenceLookahead(AcceptanceClass.of(name, GREEDY, 0.0), asked, is_fixed)


class Target:
    """One sequence whose proposals all come from inside; `drafting_us` is what a pass takes while
    it is tried to verify some, whether it does or not: a cost that no row explains."""

    def __init__(self, drafting_us=1000, plain_us=1000, num_right=1, have=8):
        self.policy = LookaheadPolicy(LookaheadLimits())
        self.source = local()
        self.drafting_us, self.plain_us = drafting_us, plain_us
        self.num_right, self.have = num_right, have
        self.now = 0
        self.counts, self.states = [], []

    def run(self, num_passes):
        policy = self.policy
        for _ in range(num_passes):
            is_resting = policy.profit.deal.is_resting
            policy.aim(self.source)
            window = Window(self.source, self.have, is_local=True)
            [count] = policy.plan([window], 0, 64)
            took = (self.plain_us if is_resting else self.drafting_us) + 30 * count
            right = min(count, self.num_right)
            seen = count or min(self.have, 1)
            policy.learn(self.source, seen, right if count else min(self.num_right, seen))
            record = PassRecord(1, 1 + count, 0, count, 1 + right, self.now, self.now + took, 0)
            self.now += took
            policy.end_pass(record)
            self.counts.append(count)
            self.states.append(policy.profit.deal.state.value)

    @property
    def moves(self):
        return [state for state, _ in groupby(self.states)]


class TestTheBreaker:
    def test_control_passes_are_without_local_proposals(self):
        target = Target(num_right=8)
        target.run(60)
        assert target.moves == ["drafting", "control", "drafting"]
        pairs = zip(target.states[:-1], target.counts[1:], strict=True)
        assert all((count == 0) == (state == "control") for state, count in pairs if state)

    def test_it_opens_when_they_do_not_pay_and_tries_again(self):
        """Three tokens a pass that takes four times as long."""
        target = Target(drafting_us=4000, num_right=2)
        target.run(80)
        assert target.moves[:3] == ["drafting", "control", "open"]
        assert (target.counts[-1], target.source.cap) == (0, 0)
        opened = target.now
        target.now += 5 * SECOND
        target.run(60)
        assert "half_open" in target.moves
        assert target.moves[-1] == "open"
        assert sum(target.counts[80:]) > 0
        deal = target.policy.profit.deal
        assert deal.retry_us - opened > 10 * SECOND  # the pause has doubled

    def test_it_closes_when_they_pay_again(self):
        target = Target(drafting_us=4000, num_right=2)
        target.run(80)
        target.now += 5 * SECOND
        target.drafting_us, target.num_right = 1000, 8
        target.run(60)
        assert target.moves[-2:] == ["half_open", "drafting"]

    def test_without_a_match_nothing_is_compared(self):
        """A text that never repeats itself has no proposals: that is not drafting."""
        target = Target(drafting_us=4000, have=0)
        target.run(400)
        assert target.moves == ["drafting"]


class TestK:
    def test_what_is_always_wrong_gets_none(self):
        target = Target(num_right=0)
        target.policy.profit.record = lambda *_: None
        target.run(150)
        assert sum(target.counts[:20]) > 0
        assert sum(target.counts[100:]) <= 3

    def test_it_has_some_again_by_comparison_alone(self):
        target = Target(num_right=0)
        target.policy.profit.record = lambda *_: None
        target.run(150)
        target.num_right = 8
        target.run(60)
        assert min(target.counts[-10:]) >= 4

    @pytest.mark.parametrize(("asked", "is_fixed", "cap"), [(0, False, 0), (3, True, 3)])
    def test_what_is_asked_holds(self, asked, is_fixed, cap):
        policy, source = LookaheadPolicy(LookaheadLimits()), local(asked, is_fixed=is_fixed)
        assert policy.aim(source) == source.cap == cap
        assert policy.plan([Window(source, 8, is_local=True)], 0, 64) == [cap]

    def test_a_try_is_verified_whatever_is_expected(self):
        target = Target(num_right=0)
        target.policy.profit.record = lambda *_: None
        target.run(150)
        target.policy.try_once(target.source)
        target.run(1)
        assert target.counts[-1] == 2
        target.run(10)
        assert sum(target.counts[-10:]) <= 1


class TestSurvivalsOfTheirOwn:
    def test_a_pass_takes_the_nodes_that_are_worth_a_row(self):
        """The class of the source says that all are right; these nodes know better."""
        target = Target(num_right=8)
        target.run(40)
        values = (0.9, 0.6, 0.001, 0.001)
        own = Survivals(tuple(-value for value in values), (0.0, 0.9, 1.5, 1.501, 1.502), 0.9)
        policy = target.policy
        assert policy.aim(target.source, own) == 2
        assert policy.plan([Window(target.source, 4, own, is_local=True)], 0, 64) == [2]
        net, total = policy.gain(target.source, 4, own)
        assert 1.3 < net < 1.5 < total == 1.502

    def test_more_rows_than_they_have_are_not_wanted(self):
        target = Target(num_right=8)
        target.run(40)
        own = Survivals((-0.9,), (0.0, 0.9), 0.9)
        assert target.policy.aim(target.source, own) == 1
        assert target.policy.plan([Window(target.source, 8, own, is_local=True)], 0, 64) == [1]


class TestGain:
    def test_more_proposals_and_better_ones_are_worth_more(self):
        policy, good, bad = LookaheadPolicy(LookaheadLimits()), local(), local(name="ngram")
        for _ in range(50):
            policy.learn(good, 4, 4)
            policy.learn(bad, 4, 0)
        gains = [policy.gain(good, have) for have in range(5)]
        assert gains == sorted(gains)
        assert gains[0] == (0.0, 0.0)
        assert policy.gain(bad, 16) < gains[1]

    def test_beyond_the_ceiling_there_is_nothing(self):
        policy, source = LookaheadPolicy(LookaheadLimits()), local(2, is_fixed=True)
        assert policy.gain(source, 16) == policy.gain(source, 2)


def test_a_draft_that_nobody_knows_is_not_expected_to_be_like_a_lookup():
    model = AcceptanceModel(16)
    lookup, draft = (model.profile(AcceptanceClass.of(n, GREEDY, 0.0)) for n in ("suffix", "d"))
    assert model.profile(AcceptanceClass.of("", GREEDY, 0.0)) is draft
    model.profile(AcceptanceClass.of("suffix", GREEDY, 0.0))
    assert model.profile(AcceptanceClass.of("", GREEDY, 0.0)) is draft is not lookup


@pytest.mark.parametrize("adapter", ["", "a", "a" * 300])
def test_a_class_says_whether_it_is_of_a_draft(adapter):
    names = {name: AcceptanceClass.of(name, GREEDY, 0.0, adapter) for name in ("suffix", "drafts")}
    assert (names["suffix"].is_local, names["drafts"].is_local) == (True, False)
    assert max(len(key.draft_model) for key in names.values()) <= 256


def test_a_window_without_a_draft_makes_no_draft_wanted():
    policy, source = LookaheadPolicy(LookaheadLimits()), local()
    policy.aim(source)
    policy.plan([Window(source, 0, is_local=True)], 0, 64)
    assert policy.starvation().wanted == 0
    draft = local(name="draft")
    policy.grant(draft)
    policy.plan([Window(draft, 0)], 0, 64)
    assert policy.starvation().wanted > 0


def test_without_the_draft_among_its_sources_it_has_no_credit():
    policy, draft = LookaheadPolicy(LookaheadLimits()), local(0, name="")
    assert policy.grant(draft) == Grant(0)
