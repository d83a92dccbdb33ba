"""Lookups of classes that are worth nothing: who does without, and who tries."""

from itertools import pairwise

import pytest

from paceline.protocol.lookahead import (
    AcceptanceClass,
    LookaheadLimits,
    LookaheadPolicy,
    PassRecord,
    SequenceLookahead,
    Window,
)
from paceline.protocol.lookup_rests import (
    FIRST_REST,
    MAX_REST,
    MAX_REST_CLASSES,
    MAX_SCOUTS,
    TRIAL_PASSES,
    LookupRests,
)
from paceline.protocol.profit import DealState
from paceline.sampling.params import VerificationMode

GREEDY = VerificationMode.GREEDY


def lookup(*, temperature=0.0, is_fixed=False):
    key = AcceptanceClass.of("suffix", GREEDY, temperature)
    return SequenceLookahead(key, None, is_fixed)


class Target:
    """Sequences of one class; a row takes a third of a pass. All guesses are right or wrong."""

    def __init__(self, num_sequences=1, num_right=0):
        self.policy = LookaheadPolicy(LookaheadLimits())
        self.policy.profit.record = lambda *_: None
        self.rests = LookupRests(self.policy)
        self.sources = [lookup() for _ in range(num_sequences)]
        self.num_right, self.num_passes = num_right, 0
        self.looked, self.counts = [], []

    def run(self, num_passes, **kwargs):
        for _ in range(num_passes):
            policy, have = self.policy, []
            for number, source in enumerate(self.sources):
                may = self.rests.may_look(source, number, self.num_passes, True)
                have.append(4 if may else 0)
                if may:
                    self.rests.look(source)
                policy.aim(source)
            windows = [
                Window(source, num, is_local=True)
                for source, num in zip(self.sources, have, strict=True)
            ]
            counts = policy.plan(windows, 0, 1000)
            for source, num in zip(self.sources, have, strict=True):
                if num:
                    policy.learn(source, 1, min(1, self.num_right))
                    self.rests.learn(source, self.num_right)
            size, total = len(have), sum(counts)
            took = 900 + 300 * total
            now = 10_000 * self.num_passes
            policy.end_pass(PassRecord(size, size + total, 0, total, size, now, now + took, 0))
            self.num_passes += 1
            self.looked.append([i for i, num in enumerate(have) if num])
            self.counts.append(total)

    def trials(self):
        """The first passes of each stretch of passes with lookups."""
        looked = [False, *map(bool, self.looked)]
        return [i for i, (was, now) in enumerate(pairwise(looked)) if now and not was]


def rest_deal(target, state=DealState.OPEN):
    target.policy.profit.deal.state = state


def test_trials_become_rare():
    target = Target()
    rest_deal(target)
    target.run(1500)
    trials = target.trials()
    assert trials[0] == FIRST_REST - 1
    gaps = [later - earlier - TRIAL_PASSES for earlier, later in pairwise(trials)]
    assert gaps[:4] == [32, 64, 128, 256]
    assert set(gaps[3:]) == {MAX_REST}
    assert target.rests.num_trials == len(trials)
    assert sum(map(len, target.looked)) == TRIAL_PASSES * len(trials)


def test_a_few_sequences_try():
    target = Target(num_sequences=40)
    rest_deal(target)
    target.run(200)
    assert max(map(len, target.looked)) == MAX_SCOUTS
    assert len(target.trials()) == 3


def test_a_scout_that_has_gone_gives_its_place_up():
    target = Target(num_sequences=2 * MAX_SCOUTS)
    rest_deal(target)
    target.run(FIRST_REST + 2)
    assert target.looked[-1] == list(range(MAX_SCOUTS))
    rests, passes = target.rests, target.num_passes
    others = range(MAX_SCOUTS, 2 * MAX_SCOUTS)
    rests.may_look(target.sources[0], 0, passes, True)
    for number in others:
        assert not rests.may_look(target.sources[number], number, passes, True)
    assert rests.may_look(target.sources[0], 0, passes + 1, True)
    answers = [rests.may_look(target.sources[n], n, passes + 2, True) for n in others]
    assert answers == [True] * (MAX_SCOUTS - 1) + [False]


def test_a_class_that_is_worth_nothing_rests_and_is_found_again():
    target = Target(num_sequences=3)
    target.run(300)
    assert len(target.looked[0]) == 3
    assert sum(map(len, target.looked[-64:])) <= 3 * 2 * TRIAL_PASSES
    assert target.rests.num_trials >= 2
    target.num_right = 4
    target.run(2 * MAX_REST)
    assert min(map(len, target.looked[-20:])) == 3
    assert min(target.counts[-20:]) >= 3


def test_a_class_that_pays_does_not_rest():
    target = Target(num_right=4)
    target.run(200)
    assert all(target.looked)
    assert target.rests.num_trials == 0


def test_when_the_deal_goes_on_all_look_again():
    target = Target(num_sequences=8, num_right=4)
    target.run(40)
    rest_deal(target)
    target.run(20)
    assert sum(map(len, target.looked[-20:])) <= MAX_SCOUTS * 5
    rest_deal(target, DealState.HALF_OPEN)
    target.run(10)
    assert min(map(len, target.looked[-10:])) == 8
    assert min(target.counts[-5:]) > 0


def test_a_trial_waits_for_who_has_to_learn_its_text_first():
    target = Target()
    rest_deal(target)
    source, rests = target.sources[0], target.rests
    answers = [rests.may_look(source, 0, number, True) for number in range(60)]
    assert answers == [number >= FIRST_REST - 1 for number in range(60)]


@pytest.mark.parametrize(("is_fixed", "can_scout"), [(True, False), (False, False)])
def test_a_fixed_k_looks_always_and_a_prompt_never_tries(is_fixed, can_scout):
    target = Target()
    rest_deal(target)
    source = lookup(is_fixed=is_fixed)
    answers = {target.rests.may_look(source, 0, number, can_scout) for number in range(100)}
    assert answers == {is_fixed}


def test_classes_are_few():
    target = Target()
    for number in range(3 * MAX_REST_CLASSES):
        target.rests.may_look(lookup(temperature=number / 4), number, 0, True)
        assert len(target.rests._rests) <= MAX_REST_CLASSES
