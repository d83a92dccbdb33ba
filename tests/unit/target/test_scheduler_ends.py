"""Aborts at every stage and failed passes: nothing may be left, and nobody else is touched."""

import pytest

from paceline.protocol.messages import CloseReason, CloseSession, OpenSession, Verdict

OTHER = (9, 8, 7)


def with_company(make_rig, **kwargs):
    """A sequence to end early, and another that must not notice."""
    rig = make_rig(**kwargs)
    rig.add_draft(1)
    return rig, rig.add((1, 2, 3), 40), rig.add(OTHER, 40, seed=5)


def finish(rig, other):
    rig.run(4)
    assert rig.out[other] == rig.oracle(OTHER, 40, seed=5)
    rig.check_clean()


class TestAbort:
    def test_before_the_first_pass(self, make_rig):
        rig, session_id, other = with_company(make_rig)
        assert rig.scheduler.abort(session_id)
        assert rig.scheduler.take_released() == [session_id]
        finish(rig, other)
        assert rig.out[session_id] == []

    @pytest.mark.parametrize("num_passes", [1, 2, 3])
    def test_between_passes(self, make_rig, num_passes):
        rig, session_id, other = with_company(make_rig)
        for _ in range(num_passes):
            rig.draft(3)
            rig.step()
        assert rig.scheduler.abort(session_id)
        assert rig.scheduler.num_running == 1
        assert (1, CloseSession(session_id, 1, CloseReason.ABORTED)) in rig.take_sent()
        rig.desk.detach(1)  # its messages were taken away above
        rig.drafts.clear()
        finish(rig, other)

    @pytest.mark.parametrize("num_passes", [0, 1, 2])
    def test_in_a_pass(self, make_rig, num_passes):
        """Its rows are in the engine: it ends when the pass does, and commits nothing."""
        rig, session_id, other = with_company(make_rig)
        for _ in range(num_passes):
            rig.draft(3)
            rig.step()
        plan, results = rig.begin()
        before = list(rig.out[session_id])
        assert rig.scheduler.abort(session_id)
        assert rig.scheduler.num_running == 2
        assert rig.scheduler.take_released() == []
        assert not rig.scheduler.abort(session_id), "one abort is enough"
        assert list(rig.end(plan, results)) == [other]
        assert rig.out[session_id] == before
        finish(rig, other)
        assert rig.scheduler.stats.num_aborted == 1

    def test_in_a_pass_that_fails(self, make_rig):
        rig, session_id, other = with_company(make_rig)
        plan, _ = rig.begin()
        rig.scheduler.abort(session_id)
        assert rig.scheduler.fail_pass(plan) == []
        assert rig.scheduler._running == [other]
        finish(rig, other)

    def test_in_a_pass_of_a_prefill_chunk(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        session_id = rig.add(range(1, 41), 10)
        plan, results = rig.begin()
        rig.scheduler.abort(session_id)
        assert rig.end(plan, results) == {}
        rig.check_clean()

    def test_between_prefill_chunks(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        rig.add_draft(1)
        session_id = rig.add(range(1, 41), 10)
        rig.step()
        rig.draft(2)
        rig.scheduler.abort(session_id)
        rig.check_clean()

    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_while_waiting(self, make_rig, position):
        rig = make_rig(target={"max_num_seqs": 1})
        rig.add_draft(1)
        rig.add(max_tokens=5)
        waiting = [rig.add(OTHER, 40, seed=5) for _ in range(3)]
        gone = waiting.pop(position)
        assert rig.scheduler.abort(gone)
        assert rig.scheduler.num_waiting == 2
        assert rig.scheduler.take_released() == [], "the engine never saw it"
        rig.run(3)
        assert rig.out[gone] == []
        assert [rig.out[i] for i in waiting] == [rig.oracle(OTHER, 40, seed=5)] * 2
        rig.check_clean()

    def test_its_place_goes_to_the_next(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 1})
        first, second = rig.add(), rig.add(OTHER, 40, seed=5)
        rig.step()
        rig.scheduler.abort(first)
        assert set(rig.step()) == {second}
        finish(rig, second)

    def test_its_place_goes_to_the_next_when_it_ends_in_a_pass(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 1})
        first, second = rig.add(), rig.add(OTHER, 40, seed=5)
        plan, results = rig.begin()
        rig.scheduler.abort(first)
        rig.end(plan, results)
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 0)
        finish(rig, second)

    def test_unknown_or_ended(self, make_rig):
        rig = make_rig()
        session_id = rig.add(max_tokens=1)
        assert not rig.scheduler.abort(99)
        rig.run()
        assert not rig.scheduler.abort(session_id)
        assert rig.scheduler.stats.num_aborted == 0

    def test_every_stage_leaves_nothing(self, make_rig):
        """Abort one of 4 after each of 60 half-steps; then everything is back at zero."""
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 3})
        for link_id in (1, 2):
            rig.add_draft(link_id, error_rate=0.2)
        for number in range(60):
            for extra in range(4 - rig.scheduler.num_running - rig.scheduler.num_waiting):
                rig.add(range(1 + (number + extra) % 30), 30, seed=number + 1)
            rig.draft(number % 4)
            victims = sorted(rig.scheduler._sequences)
            victim = victims[number % len(victims)]
            if number % 3 == 0:
                rig.scheduler.abort(victim)
            plan, results = rig.begin()
            if number % 3 == 1:
                rig.scheduler.abort(victim)
            rig.end(plan, results)
            if number % 3 == 2:
                rig.scheduler.abort(victim)
        for victim in list(rig.scheduler._sequences):
            rig.scheduler.abort(victim)
        rig.check_clean()
        assert rig.scheduler.stats.num_aborted > 50


class TestWhatTheDraftHears:
    def test_finished(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        session_id = rig.add(max_tokens=10)
        rig.run(4)
        last = rig.sent[-1]
        assert last == (1, CloseSession(session_id, 1, CloseReason.FINISHED))
        assert [type(m) for _, m in rig.sent[:2]] == [OpenSession, Verdict]
        verdicts = [m for _, m in rig.sent if isinstance(m, Verdict)]
        assert [v.round for v in verdicts] == list(range(1, len(verdicts) + 1))
        assert len(verdicts) == len(rig.deltas[session_id]) - 1, "the last round needs none"

    def test_verdicts_say_how_long_the_pass_took(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        rig.add(max_tokens=10)
        rig.run(4)
        assert {m.verify_us for _, m in rig.sent if isinstance(m, Verdict)} == {500}
