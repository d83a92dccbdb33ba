"""A lone pass may wait for its draft though a lookup has proposals, if that gains more."""

import pytest

from paceline.protocol.acceptance_model import Survivals
from paceline.protocol.lone_wait import AcceptanceEstimate, LocalOffer
from paceline.protocol.lookahead import AcceptanceClass, SequenceLookahead
from paceline.sampling.params import VerificationMode
from paceline.target.lone_hold import local_offer
from paceline.target.scheduler import Hold, PassPlan
from paceline.target.sources import Source
from tests.unit.target.test_local_drafts import PROMPT, Guess, guess

KEY = AcceptanceClass.of("", VerificationMode.GREEDY, 0.0)


def source(name, have, cap=4, *, rate=0.5, survivals=None):
    estimate = AcceptanceEstimate(prior=rate)
    lookahead = SequenceLookahead(KEY, cap=cap, posterior=estimate, survivals=survivals)
    return Source(name, lookahead, have)


class TestOffer:
    def test_of_a_source_what_is_worth_its_rows(self):
        assert local_offer([source("suffix", 3, 2)]) == LocalOffer(2, 0.75)
        assert local_offer([source("suffix", 1)]) == LocalOffer(1, 0.5)

    def test_of_several_the_best(self):
        many, sure = source("ngram", 4, rate=0.3), source("suffix", 2, rate=0.9)
        assert local_offer([many, sure]) == LocalOffer(2, pytest.approx(1.71))

    def test_its_own_survivals_say_more_than_its_class(self):
        offer = local_offer(
            [source("suffix", 2, survivals=Survivals((-0.9, -0.6), (0.0, 0.9, 1.5), 0.9))]
        )
        assert offer == LocalOffer(2, pytest.approx(1.5))

    def test_no_draft_and_nothing_that_is_not_worth_a_row(self):
        assert local_offer([source("model", 3), source("suffix", 0), source("ngram", 2, 0)]) is None


@pytest.fixture
def ready(make_rig):
    """One sequence after its prompt pass, its draft due; it has a lookup of this acceptance."""

    def prepare(method, rate, num_drafted=0, num_right=1):
        rig = make_rig(speculation={"max_lone_wait_ms": 50.0})
        rig.add_draft(1)
        rig.deliver()
        guess(rig, 60, kind=lambda text: Guess(text, num_right))
        session_id = rig.add(PROMPT, 60, method=method)
        rig.deliver()
        rig.step()
        rig.deliver()
        rig.draft(num_drafted)
        sequence = rig.scheduler._sequences[session_id]
        for each in sequence.sources.sources:
            if each.is_local:
                each.lookahead.posterior.prior = rate
        lone = rig.scheduler.policy.lone
        lone.num_draft_tokens.value = lone.row_us = 0.0
        lone.pass_us.value, lone.draft_token_us.value = 10_000.0, 1_000.0
        return rig, session_id

    return prepare


@pytest.mark.parametrize("method", ["hybrid", "auto"])
@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_a_bad_lookup_does_not_end_the_wait(ready, method, rate):
    rig, _ = ready(method, rate)
    assert isinstance(rig.scheduler.plan(rig.now), Hold)
    assert rig.scheduler.stats.num_holds == 1


@pytest.mark.parametrize("method", ["hybrid", "auto"])
@pytest.mark.parametrize("rate", [0.6, 0.9])
def test_no_wait_gains_more_than_a_good_lookup(ready, method, rate):
    rig, _ = ready(method, rate)
    plan = rig.scheduler.plan(rig.now)
    assert isinstance(plan, PassPlan)
    assert plan.has_drafts
    assert rig.scheduler.stats.num_holds == 0


@pytest.mark.parametrize("method", ["hybrid", "auto"])
def test_a_wait_that_was_in_vain_verifies_what_is_at_hand(ready, method):
    rig, session_id = ready(method, 0.1)
    hold = rig.scheduler.plan(rig.now)
    rig.now = hold.until_us
    rig.step()
    assert rig.deltas[session_id][-1].source == "suffix"


def test_a_lookup_that_hybrid_would_not_verify_ends_no_wait(ready):
    """One proposal of the draft is here, and a pass that starts now takes that."""
    rig, _ = ready("hybrid", 0.9, num_drafted=1)
    lone = rig.scheduler.policy.lone
    lone.draft_token_us.value, lone.arrival_us.value = 1_000.0, None
    assert rig.scheduler._sequences[1].session.window_len == 1
    assert isinstance(rig.scheduler.plan(rig.now), Hold)


def test_waiting_instead_of_a_lookup_changes_no_text(ready):
    rig, session_id = ready("auto", 0.1, num_right=0)
    while rig.scheduler.num_running:
        plan = rig.step()
        if isinstance(plan, Hold):
            rig.now = min(plan.until_us, rig.now + 1_000)
            rig.draft(1)
        rig.deliver()
    assert rig.out[session_id] == rig.oracle(PROMPT, 60)
    assert {delta.source for delta in rig.deltas[session_id]} >= {"model"}
    rig.check_clean()
