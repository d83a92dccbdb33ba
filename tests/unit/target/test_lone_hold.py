"""The one wait there is: a lone sequence, a bounded time, only when it is predicted to pay.

Numbers by hand. Pass 10 ms, draft token 1 ms, acceptance .7 (the prior), K = 4. Passes of a chain
that starts with 0..4 proposals: 18.414, 15.890, 14.123, 12.886, 12.020 ms; the wait comes on top,
and the sum must be more than 2 % below the chain that starts at once.
"""

import pytest

from paceline.engine.base import EngineInfo
from paceline.target.scheduler import Hold, PassPlan

MS = 1000
PROMPT = (1, 2, 3)


def costs(rig, *, pass_us=10 * MS, token_us=1 * MS, rtt_us=None):
    policy = rig.scheduler.policy.lone
    policy.num_draft_tokens.value = policy.row_us = 0.0
    policy.pass_us.value, policy.draft_token_us.value = pass_us, token_us
    policy.rtt_us.value, policy.arrival_us.value = rtt_us, None


def lone(make_rig, *, wait_ms=50.0, target=None, num_tokens=60, **kwargs):
    """One sequence after its prompt pass; the draft has answered; now = ready = 500 us."""
    rig = make_rig(speculation={"max_lone_wait_ms": wait_ms}, target=target)
    rig.add_draft(1)
    rig.deliver()
    rig.add(PROMPT, num_tokens, **kwargs)
    rig.deliver()
    rig.step()
    rig.deliver()
    costs(rig)
    assert rig.now == 500
    return rig


def arrive(rig, count, now_us):
    rig.now = now_us
    rig.draft(count)
    costs(rig)


class TestHolds:
    def test_as_long_as_three_tokens_take(self, make_rig):
        """Half a token for a stale pass, then 1 each: 17.390, 16.623, 16.386, 16.520: three, that
        is 3.5 ms and a quarter, and 200 us."""
        rig = lone(make_rig)
        assert rig.scheduler.plan(500) == Hold(500 + 4375 + 200)
        assert rig.scheduler.stats.num_holds == 1

    def test_a_round_trip_is_due_after_a_correction(self, make_rig):
        """The plain first token: the draft must hear it. 17.386 is the best, below 18.053."""
        rig = lone(make_rig)
        costs(rig, rtt_us=1 * MS)
        assert rig.scheduler.plan(500) == Hold(500 + 5625 + 200)

    def test_no_second_round_trip_once_proposals_flow(self, make_rig):
        """One is here at 3.5 ms: 15.890 / 1.02, 15.123, 14.886, 15.020: two more, 2 ms from now."""
        rig = lone(make_rig)
        costs(rig, rtt_us=1 * MS)
        rig.scheduler.plan(500)
        arrive(rig, 1, 3500)
        costs(rig, rtt_us=1 * MS)
        assert rig.scheduler.plan(3500) == Hold(3500 + 2500 + 200)

    def test_a_branch_that_became_the_window_was_here_before(self, make_rig):
        """As above with a round trip of 10 ms: what comes next is behind the verdict."""
        rig = lone(make_rig)
        arrive(rig, 1, 3500)
        costs(rig, rtt_us=10 * MS)
        session = rig.scheduler._sequences[1].session
        assert isinstance(rig.scheduler.plan(3500), Hold)
        session.num_adopted = 1
        rig.scheduler._sequences[1].hold_until_us = 0
        plan = rig.scheduler.plan(3500)
        assert len(plan.entries[0].draft_token_ids) == 1

    def test_each_arrival_is_looked_at_anew(self, make_rig):
        rig = lone(make_rig)
        rig.scheduler.plan(500)
        arrive(rig, 1, 1500)
        assert rig.scheduler.plan(1500) == Hold(1500 + 2500 + 200)
        arrive(rig, 1, 2500)  # 14.123 / 1.02 = 13.846 < 12.886 + 1: the third gains less than 2 %
        assert len(rig.scheduler.plan(2500).entries[0].draft_token_ids) == 2
        assert rig.scheduler.stats.num_holds == 1, "one hold, prolonged"

    def test_a_bonus_that_agreed_needs_no_round_trip(self, make_rig):
        """7 were sent, 4 accepted and the bonus was the fifth: two are here, two more wanted."""
        rig = lone(make_rig)
        arrive(rig, 7, 1000)
        rig.step()
        costs(rig, rtt_us=50 * MS)
        sequence = rig.scheduler._sequences[1]
        posterior = sequence.lookahead.posterior
        posterior.accepted, posterior.rejected, posterior.prior = 0.0, 0.0, 0.7
        sequence.lookahead.survivals = None  # .7 everywhere, as at first
        # Drafting since 1000, now 1500: the third is due at 2000, the fourth at 3000.
        # 14.123 / 1.02 > 12.020 + 1.5 > 12.886 + .5: one more.
        assert rig.scheduler.plan(1500) == Hold(1500 + 625 + 200)

    def test_the_cap(self, make_rig):
        """4 ms from the end of the last pass, whatever is prolonged."""
        rig = lone(make_rig, wait_ms=4.0)
        assert rig.scheduler.plan(500) == Hold(4500)
        arrive(rig, 1, 4000)
        assert rig.scheduler.plan(4000) == Hold(4500)
        assert isinstance(rig.scheduler.plan(4500), PassPlan)

    def test_never_more_than_can_still_be_proposed(self, make_rig):
        """Three output tokens: one committed, one may be drafted, the last is the target's.
        full = 1: 23.725 / 1.02 against 19.608 + 1.5."""
        rig = lone(make_rig, num_tokens=3)
        assert rig.scheduler.plan(500) == Hold(500 + 1875 + 200)


class TestEndOfAHold:
    def test_by_its_deadline(self, make_rig):
        rig = lone(make_rig)
        assert rig.scheduler.plan(500) == Hold(5075)
        # Woken early for nothing: two should be here, the third is 0.5 ms away.
        assert rig.scheduler.plan(3500) == Hold(3500 + 625 + 200)
        assert rig.scheduler.policy.lone._hit_rate == 1.0
        plan = rig.scheduler.plan(4325)
        assert plan.entries[0].draft_token_ids == ()
        assert rig.scheduler.policy.lone._hit_rate == pytest.approx(0.8)

    def test_by_arrival(self, make_rig):
        rig = lone(make_rig)
        rig.scheduler.policy.lone._hit_rate = 0.5
        rig.scheduler.plan(500)
        arrive(rig, 4, 2000)
        assert isinstance(rig.scheduler.plan(2000), PassPlan)
        assert rig.scheduler.policy.lone._hit_rate == pytest.approx(0.6)

    def test_by_another_request(self, make_rig):
        rig = lone(make_rig)
        assert isinstance(rig.scheduler.plan(500), Hold)
        rig.add(PROMPT, 5)
        plan = rig.scheduler.plan(600)
        assert [entry.session_id for entry in plan.entries] == [1, 2]

    def test_by_the_loss_of_the_draft(self, make_rig):
        rig = lone(make_rig)
        rig.scheduler.plan(500)
        rig.lose_draft(1)
        assert isinstance(rig.scheduler.plan(600), PassPlan)

    def test_by_an_abort(self, make_rig):
        rig = lone(make_rig)
        rig.scheduler.plan(500)
        rig.scheduler.abort(1)
        assert rig.scheduler.plan(600) == Hold(None)
        rig.check_clean()

    def test_the_next_pass_is_judged_afresh(self, make_rig):
        rig = lone(make_rig)
        rig.scheduler.plan(500)
        rig.now = 5075
        rig.step()
        rig.deliver()
        costs(rig)
        assert rig.scheduler.plan(5575) == Hold(5575 + 4375 + 200)
        assert rig.scheduler.stats.num_holds == 2

    def test_until_somebody_else_came_it_was_no_queue(self, make_rig):
        rig = lone(make_rig)
        rig.scheduler.plan(500)
        rig.now = 3_000
        rig.add(PROMPT, 5)
        rig.step()
        last = rig.deltas[1][-1]
        assert (last.window_ms, last.queue_ms) == (2.5, 0.0)


class TestStartsAtOnce:
    def test_four_misses_in_a_row(self, make_rig):
        rig = lone(make_rig)
        for _ in range(4):
            hold = rig.scheduler.plan(rig.now)
            rig.now = hold.until_us
            rig.step()
            rig.deliver()
            costs(rig)
        assert isinstance(rig.scheduler.plan(rig.now), PassPlan)

    def test_does_not_pay(self, make_rig):
        """token 3 ms, full 3: 19.212 at once; 16.448 + 4.5 for one."""
        rig = lone(make_rig)
        costs(rig, token_us=3 * MS)
        assert isinstance(rig.scheduler.plan(500), PassPlan)

    def test_switched_off(self, make_rig):
        assert isinstance(lone(make_rig, wait_ms=0.0).scheduler.plan(500), PassPlan)

    def test_nothing_measured(self, make_rig):
        rig = lone(make_rig)
        costs(rig, token_us=None)
        assert isinstance(rig.scheduler.plan(500), PassPlan)

    def test_two_sequences(self, make_rig):
        rig = lone(make_rig)
        rig.add((5,), 5)
        rig.deliver()
        rig.step()
        rig.deliver()
        costs(rig)
        assert len(rig.scheduler.plan(rig.now).entries) == 2

    def test_somebody_waits(self, make_rig):
        rig = lone(make_rig, target={"max_num_seqs": 1})
        rig.add((5,), 5)
        assert isinstance(rig.scheduler.plan(500), PassPlan)

    def test_no_draft(self, make_rig):
        rig = make_rig(speculation={"max_lone_wait_ms": 50.0})
        rig.add(PROMPT, 60)
        rig.step()
        costs(rig)
        assert isinstance(rig.scheduler.plan(500), PassPlan)

    def test_the_draft_has_not_answered(self, make_rig):
        rig = make_rig(speculation={"max_lone_wait_ms": 50.0})
        rig.add_draft(1)
        rig.add(PROMPT, 60)
        rig.step()
        costs(rig)
        assert isinstance(rig.scheduler.plan(500), PassPlan)

    def test_prefill(self, make_rig):
        rig = make_rig(
            speculation={"max_lone_wait_ms": 50.0},
            target={"max_rows_per_pass": 16, "max_num_seqs": 4},
        )
        rig.add_draft(1)
        rig.add(range(40), 60)
        rig.deliver()
        rig.step()
        costs(rig)
        assert isinstance(rig.scheduler.plan(500), PassPlan)

    def test_drafting_is_off(self, make_rig):
        rig = lone(make_rig, method="off")
        assert isinstance(rig.scheduler.plan(500), PassPlan)

    def test_the_window_is_full(self, make_rig):
        rig = lone(make_rig)
        arrive(rig, 4, 500)
        assert len(rig.scheduler.plan(500).entries[0].draft_token_ids) == 4


class TestMeasuredCosts:
    def test_a_prompt_pass_says_nothing_about_decoding(self, make_rig):
        """Else the first hold would be sized by a prefill of hundreds of rows."""
        rig = make_rig()
        rig.add(PROMPT, 60)
        rig.step()
        assert rig.scheduler.policy.lone.pass_us.value is None
        rig.step()
        assert rig.scheduler.policy.lone.pass_us.value == 500

    def test_a_mixed_pass_neither(self, make_rig):
        rig = make_rig()
        rig.add((1,), 60)
        rig.step()
        rig.scheduler.policy.lone.pass_us.value = 7
        rig.add(PROMPT, 60)
        rig.step()
        assert rig.scheduler.policy.lone.pass_us.value == 7

    def test_a_verify_pass_does(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        rig.add((1,), 60)
        rig.step()
        rig.draft(4)
        rig.scheduler.policy.lone.pass_us.value = 1000
        rig.step()
        assert rig.scheduler.policy.lone.pass_us.value == pytest.approx(900)

    def test_draft_time_per_token(self, make_rig):
        """The toy draft charges 100 us a pass."""
        rig = make_rig()
        rig.add_draft(1)
        rig.add((1,), 60)
        rig.draft(1)
        assert rig.scheduler.policy.lone.draft_token_us.value == 100

    def test_how_far_apart_arrivals_are(self, make_rig):
        rig = lone(make_rig)
        arrival = rig.scheduler.policy.lone.arrival_us
        rig.now = 1000
        rig.draft(1)
        assert arrival.value is None, "the first of a window: before it was a round trip"
        rig.now = 1300
        rig.draft(1)
        assert arrival.value == 300
        rig.now = 1400
        rig.draft(1)
        assert arrival.value == pytest.approx(260)

    def test_two_tokens_in_one_message(self, make_rig):
        rig = lone(make_rig)
        arrive(rig, 1, 1000)
        rig.now = 1400
        rig.drafts[1].run_pass()
        rig.draft(1)
        assert rig.scheduler.policy.lone.arrival_us.value == pytest.approx(200)

    def test_a_pause_for_lack_of_credit_is_no_spacing(self, make_rig):
        """9 are here (2 K + 1), the draft must wait for the next verdict; then it goes on."""
        rig = lone(make_rig)
        arrive(rig, 20, 1000)
        rig.step()
        assert rig.scheduler._sequences[1].session.window_len == 9 - 5
        rig.now = 9000
        rig.draft(1)
        assert rig.scheduler.policy.lone.arrival_us.value is None
        rig.now = 9200
        rig.draft(1)
        assert rig.scheduler.policy.lone.arrival_us.value == 200

    def test_a_flush_is_no_spacing(self, make_rig):
        """A wrong token arrives after the pass has ended and before its result is applied."""
        rig = make_rig()
        rig.add_draft(1, error_rate=1.0)
        rig.add(PROMPT, 60)
        rig.deliver()
        rig.step()
        plan, results = rig.begin()
        rig.now += 600
        rig.draft(1)
        rig.now -= 600
        rig.end(plan, results)
        sequence = rig.scheduler._sequences[1]
        assert sequence.last_arrival_us > sequence.ready_us
        assert sequence.session.window_len == 0
        rig.now = 9000
        rig.draft(1)
        assert sequence.session.window_len == 1
        assert rig.scheduler.policy.lone.arrival_us.value is None


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_holds_change_no_text(make_rig, error_rate):
    info = EngineInfo("toy", 64, 512, 16, 64)
    rig = make_rig(info=info, speculation={"max_lone_wait_ms": 50.0})
    rig.add_draft(1, error_rate=error_rate)
    session_id = rig.add(PROMPT, 60, seed=3)
    while rig.scheduler.num_running:
        rig.deliver()
        costs(rig)
        plan = rig.step()
        if isinstance(plan, Hold):
            rig.now = min(plan.until_us, rig.now + 1 * MS)
            rig.draft(1)
    assert rig.out[session_id] == rig.oracle(PROMPT, 60, seed=3)
    assert rig.scheduler.stats.num_holds > 2
    rig.check_clean()
