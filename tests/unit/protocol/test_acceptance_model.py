"""Acceptance by class and position: counts by hand, priors, and that no table grows for ever."""

from itertools import pairwise

import pytest

from paceline.protocol.acceptance_model import (
    MAX_CLASSES,
    MAX_POSITIONS,
    MAX_PROBE_INTERVAL,
    MIN_PROBE_INTERVAL,
    REFRESH_ROUNDS,
    AcceptanceClass,
    AcceptanceModel,
    ClassCounts,
    RestProbes,
)
from paceline.sampling.params import VerificationMode

GREEDY = VerificationMode.GREEDY
KEY = AcceptanceClass("draft", GREEDY, 0.0)


def model(length=8):
    return AcceptanceModel(length)


def learnt(*rounds, length=8):
    made = model(length)
    profile = made.profile(KEY)
    for num_draft, num_accepted in rounds:
        profile.update(num_draft, num_accepted)
    return profile


class TestCounts:
    def test_positions_behind_a_rejection_teach_nothing(self):
        """1 of 4: position 0 was right, 1 was wrong, nobody knows about 2 and 3."""
        counts = learnt((4, 1)).counts()
        assert counts.reached[:4] == (1, 1, 0, 0)
        assert counts.accepted[:4] == (1, 0, 0, 0)

    def test_full_acceptance_is_censored(self):
        counts = learnt((2, 2)).counts()
        assert counts.reached[:3] == (1, 1, 0)
        assert counts.accepted[:3] == (1, 1, 0)

    def test_only_so_many_positions(self):
        counts = learnt((40, 40), length=64).counts()
        assert len(counts.reached) == MAX_POSITIONS == sum(counts.reached)

    def test_half_is_gone_after_2000_rounds(self):
        profile = learnt(*[(2, 2)] * 32)
        before = profile.reached[1]
        for _ in range(2016):
            profile.update(1, 1)
        assert profile.reached[1] == pytest.approx(before / 2, rel=0.02)

    def test_own_counts_leave_priors_out(self):
        made = model()
        made.set_priors({KEY: ClassCounts((100.0,), (10.0,))})
        made.profile(KEY).update(1, 1)
        assert made.counts()[KEY].reached[0] == 1

    def test_classes_of_which_nothing_is_known_are_left_out(self):
        made = model()
        made.profile(KEY)
        assert made.counts() == {}


class TestSurvivals:
    def test_products_and_their_sums(self):
        survivals = model(3).profile(KEY).survivals(0.5)
        assert survivals.negatives == pytest.approx((-0.5, -0.25, -0.125))
        assert survivals.sums == pytest.approx((0, 0.5, 0.75, 0.875))

    def test_a_position_that_fares_worse(self):
        """Position 0 is always right, position 1 never: the class's mean is about a half."""
        profile = learnt(*[(2, 1)] * 200)
        first, second = profile.survivals(0.5).negatives[:2]
        assert -first > 0.8
        assert second / first < 0.15

    def test_good_sequences_do_not_make_deep_positions_easy(self):
        """Half of the sequences get .9, half .1, and both are expected to."""
        profile = model(8).profile(KEY)
        for number in range(1000):
            accepted = 8 if number % 10 else number // 10 % 8
            profile.update(8, accepted, 0.98 if accepted == 8 else 0.5)
            profile.update(8, number % 10 == 0, 0.1)
        ratio = 10 * profile.survivals(0.5).negatives[5] / profile.survivals(0.5).negatives[4]
        assert 4.0 < ratio < 5.5

    def test_made_only_when_the_shape_is_looked_at_again(self):
        profile = learnt(*[(4, 2)] * REFRESH_ROUNDS)
        old = profile.survivals(0.5)
        for _ in range(511):
            profile.update(4, 2)
        assert profile.survivals(0.5) is old
        profile.update(4, 2)
        assert profile.survivals(0.5) is not old

    def test_clipped(self):
        profile = model(2).profile(KEY)
        assert profile.survivals(1.0).negatives[0] == -0.99
        assert profile.survivals(0.0).negatives[0] == -0.005

    def test_shared_by_about_equal_rates(self):
        profile = model().profile(KEY)
        assert profile.survivals(0.5001) is profile.survivals(0.4999)

    def test_new_ones_after_something_was_learnt(self):
        profile = learnt((4, 4))
        old, version = profile.survivals(0.5), profile.version
        profile.update(4, 0)
        assert profile.version > version
        assert profile.survivals(0.5) is not old


class TestMean:
    def test_prior(self):
        assert model().profile(KEY).mean == pytest.approx(0.7)

    def test_a_draft_that_is_always_wrong_is_known_soon(self):
        """2 positions of .7 against 16 rejections."""
        assert learnt(*[(4, 0)] * 16).mean == pytest.approx(2 * 0.7 / 18)

    def test_the_fleet_is_believed_at_first(self):
        made = model()
        made.set_priors({KEY: ClassCounts((900.0, 100.0), (90.0, 10.0))})
        assert made.profile(KEY).mean == pytest.approx((64 * 0.1 + 2 * 0.7) / 66)

    def test_but_not_for_ever(self):
        made = model()
        made.set_priors({KEY: ClassCounts((900.0, 100.0), (90.0, 10.0))})
        profile = made.profile(KEY)
        for _ in range(320):
            profile.update(4, 4)
        assert profile.mean > 0.88

    def test_long_windows_do_not_make_it_slow(self):
        profile = learnt(*[(8, 8)] * 500)
        for _ in range(100):
            profile.update(1, 0)
        assert profile.mean < 0.5

    def test_who_learns_nothing_hears_of_it(self):
        profile = learnt(*[(4, 2)] * 100)
        version = profile.version
        for _ in range(16):
            profile.update(4, 0)
        assert profile.version > version

    def test_new_priors_reach_known_classes_and_old_ones_go(self):
        made = model()
        profile = made.profile(KEY)
        made.set_priors({KEY: ClassCounts((64.0,), (0.0,))})
        assert profile.mean < 0.1
        made.set_priors({})
        assert profile.mean == pytest.approx(0.7)

    def test_a_resting_class_can_be_overruled_by_a_few_probes(self):
        profile = learnt(*[(1, 0)] * 320)
        profile.forget()
        for _ in range(8):
            profile.update(2, 2)
        profile.refresh()
        assert profile.mean > 0.4


class TestClasses:
    def test_at_most_so_many_and_the_least_recently_used_goes(self):
        made = model()
        keys = [AcceptanceClass(str(i), GREEDY, 0.0) for i in range(MAX_CLASSES)]
        for key in keys:
            made.profile(key).update(1, 1)
        made.profile(keys[0])
        made.profile(AcceptanceClass("one more", GREEDY, 0.0)).update(1, 1)
        assert len(made) == MAX_CLASSES
        assert keys[0] in made.counts()
        assert keys[1] not in made.counts()

    def test_at_most_so_many_priors(self):
        made = model()
        counts = ClassCounts((64.0,), (0.0,))
        made.set_priors({AcceptanceClass(str(i), GREEDY, 0.0): counts for i in range(200)})
        assert made.profile(AcceptanceClass("0", GREEDY, 0.0)).mean < 0.1
        assert made.profile(AcceptanceClass("199", GREEDY, 0.0)).mean == pytest.approx(0.7)

    def test_without_a_draft_the_last_class_like_it_is_borrowed(self):
        made = model()
        profile = made.profile(KEY)
        nobody = AcceptanceClass("", GREEDY, 0.0)
        assert made.profile(nobody) is profile
        assert made.profile(AcceptanceClass("", VerificationMode.COUPLED, 0.0)) is not profile

    def test_temperatures_are_rounded(self):
        assert AcceptanceClass.of("d", GREEDY, 0.71).temperature == 0.75


class TestRestProbes:
    @staticmethod
    def starts(count, probes=None):
        """Passes in which one of `count` sequences begins to probe."""
        probes = probes or RestProbes()
        return [n for n in range(1, 300) for _ in range(count) if probes.rest(n)]

    def test_one_round_in_16_then_more_and_more_seldom(self):
        """16 and 32 rounds, then 48 passes."""
        assert self.starts(1) == [16, 48, 96, 144, 192, 240, 288]

    def test_many_sequences_are_probed_sooner(self):
        """16, 32, 64, 128, then 192 rounds of 8."""
        assert self.starts(8)[:7] == [2, 6, 14, 30, 54, 78, 102]

    def test_but_a_large_batch_not_all_the_time(self):
        starts = self.starts(64)
        assert {b - a for a, b in pairwise(starts[6:])} == {16}

    def test_a_rest_begins_anew(self):
        probes = RestProbes()
        assert not any(probes.rest(n) for n in range(15))
        assert not probes.rest(20)

    def test_a_win_makes_them_frequent_again(self):
        probes = RestProbes()
        self.starts(1, probes)
        assert probes.interval == MAX_PROBE_INTERVAL
        probes.win()
        assert probes.interval == MIN_PROBE_INTERVAL
