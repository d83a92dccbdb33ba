"""When sequences rest, are watched, are probed, and come back. Driven as in `test_lookahead`."""

from itertools import pairwise

import pytest

from paceline.protocol.lookahead import AcceptanceClass, Grant, SequenceLookahead
from paceline.sampling.params import VerificationMode
from tests.unit.protocol.test_lookahead import GREEDY, KEY, Rig, caps


class TestRest:
    def test_a_draft_that_is_always_wrong_rests(self):
        rig = Rig(2).passes(120, 0.0)
        assert rig.counts == [0, 0]
        assert rig.grants == [Grant(0), Grant(0)]

    def test_it_is_probed_more_and_more_seldom(self):
        rig = Rig(2).passes(80, 0.0)
        probes = []
        for number in range(2000):
            rig.passes(1, 0.0)
            if sum(rig.counts):
                probes.append(number)
        assert 10 < len(probes) < 80
        assert {b - a for a, b in pairwise(probes)} >= {48}

    def test_one_sequence_at_a_time(self):
        rig = Rig(8).passes(300, 0.0)
        for _ in range(400):
            rig.passes(1, 0.0)
            assert sum(grant.draft_ahead > 0 for grant in rig.grants) <= 2

    def test_it_comes_back_when_the_draft_is_right_again(self):
        rig = Rig(2).passes(300, 0.0)
        assert caps(rig) == [0, 0]
        rig.passes(600, 0.9)
        assert min(caps(rig)) > 2

    def test_a_draft_that_did_well_is_watched_for_a_while(self):
        """Nothing is verified; a proposal comes for each pass and is compared."""
        rig = Rig(2, row_us=2_000).passes(40, 0.9)
        rig.have = 0
        rig.passes(40, foreseen=False)
        assert caps(rig) == [0, 0]
        assert rig.grants == [Grant(2), Grant(2)]
        rig.passes(6, foreseen=True)
        assert min(caps(rig)) > 0

    def test_but_not_for_ever(self):
        rig = Rig(2, row_us=2_000).passes(40, 0.9)
        rig.have = 0
        rig.passes(2 * 80, foreseen=False)
        assert Grant(0) in rig.grants

    def test_at_most_256_passes(self):
        rig = Rig(2, row_us=2_000).passes(400, 0.9)
        rig.have = 0
        rig.passes(256 + 60, foreseen=False)
        assert Grant(0) in rig.grants

    def test_one_that_never_did_well_is_not_watched_for_long(self):
        rig = Rig(2, row_us=2_000).passes(60, 0.0)
        assert rig.grants == [Grant(0), Grant(0)]

    @pytest.mark.parametrize(("rate", "is_watched"), [(0.0, False), (0.3, True)])
    def test_watched_beside_others_at_work_unless_hopeless(self, rate, is_watched):
        rig = Rig(2, row_us=2_000).passes(40, 0.9)
        other = SequenceLookahead(AcceptanceClass("other", GREEDY, 0.0))
        other.posterior.accepted, other.posterior.rejected = 48 * rate, 48 * (1 - rate)
        other.posterior.prior = rate
        rig.policy._book.profile(other).recent_reached = 96.0
        rig.policy._book.profile(other).recent_accepted = 96.0 * rate
        rig.policy._book.profile(other).refresh()
        rig.policy._price.survival = 0.5
        assert rig.policy.grant(other) == (Grant(2) if is_watched else Grant(0))

    def test_nothing_is_compared_in_the_rejection_modes(self):
        rig = Rig(row_us=2_000)
        rig.sequences[0].key = AcceptanceClass("draft", VerificationMode.REJECTION, 0.0)
        rig.passes(40, 0.9)
        while caps(rig) != [0]:
            rig.passes(1, 0.0)
        assert rig.grants == [Grant(0)]

    def test_a_probe_that_is_right_wakes_the_class(self):
        rig = Rig(8, row_us=1_000).passes(300, 0.0)
        assert caps(rig) == [0] * 8
        rig.passes(80, 1.0, foreseen=None)
        assert min(caps(rig)) > 0

    def test_proposals_that_nobody_verified_count(self):
        """Passes never wait: all that is ever seen is that the pass made another token."""
        rig = Rig().passes(12, 0.75)
        rig.have = 0
        rig.passes(200, foreseen=False)
        assert caps(rig) == [0]
        assert rig.policy.class_counts()[KEY].reached[0] >= 30

    def test_another_draft_starts_afresh(self):
        rig = Rig().passes(300, 0.0)
        rig.sequences[0].key = AcceptanceClass("other", GREEDY, 0.0)
        rig.passes(8, 0.7)
        assert rig.sequences[0].cap > 2
        assert rig.sequences[0].posterior.rate > 0.6

    def test_new_sequences_start_from_the_class(self):
        rig = Rig().passes(300, 0.0)
        lookahead = SequenceLookahead(AcceptanceClass("", GREEDY, 0.0))
        rig.policy.add(lookahead)
        assert lookahead.cap == 0, "borrowed while it has no draft"
