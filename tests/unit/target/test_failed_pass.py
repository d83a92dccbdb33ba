"""A pass that fails: one request at most pays for it, and only when it was alone in it."""

from dataclasses import replace

import pytest
from llguidance import LLMatcher

from paceline import grammars
from paceline.engine.base import EngineInfo
from paceline.engine.toy import ToyEngine
from paceline.metrics import target_catalog as catalog
from paceline.protocol.link import LinkState
from paceline.protocol.messages import CloseReason, CloseSession, OpenSession
from paceline.sampling.params import SamplingParams
from paceline.target.metrics import target_snapshot
from tests.unit.target.conftest import INFO, PlantedError

PROMPT = tuple(range(1, 41))


class Failing(ToyEngine):
    """Fails as `is_bad` says of a pass's items."""

    def __init__(self, is_bad, info=INFO):
        super().__init__(info)
        self.is_bad = is_bad
        self.tried = []

    def step(self, items):
        self.tried.append([item.sequence_id for item in items])
        if self.is_bad(items):
            raise PlantedError("planted")
        return super().step(items)


class Planting(ToyEngine):
    """Its own failures are the ones that the rig expects."""

    def step(self, items):
        try:
            return super().step(items)
        except ValueError as error:
            raise PlantedError("a grammar") from error


def once(num_good):
    """Fails in one pass and never again."""
    counter = iter(range(10**6))
    return lambda items: next(counter) == num_good


def poisoned(*session_ids):
    return lambda items: any(item.sequence_id in session_ids for item in items)


def rig_with(make_rig, is_bad, **settings):
    rig = make_rig(**settings)
    rig.engine = Failing(is_bad, rig.info)
    return rig


def planned(plans):
    return [[entry.session_id for entry in plan.entries] for plan in plans]


def ended_counts(rig):
    """What `paceline_sequences_ended_total` says."""
    snapshot = target_snapshot(rig.scheduler, {}, None)
    counts = {reason: snapshot.get(catalog.ENDED, reason) for reason in catalog.ENDINGS}
    return {reason: count for reason, count in counts.items() if count}


class TestWhoEnds:
    def test_only_the_one_whose_grammar_grows_too_costly(self, make_rig, monkeypatch):
        """It compiles, and after four tokens the next mask costs more than one may."""
        monkeypatch.setattr(grammars, "STEP_FUEL", 100)
        toy = EngineInfo("toy", 257, 512, 16, 64, "", (256,), grammars.load_grammars("toy"))
        rig = make_rig(info=toy)
        rig.engine = Planting(toy)
        cheap = LLMatcher.grammar_from_regex("[1-9]{3}")
        words = "|".join(f"k{i}[a-z]{{1,{i}}}" for i in range(1, 60))
        costly = LLMatcher.grammar_from_lark(f'start: "xyz" word\nword: /{words}/')
        laws = [SamplingParams(0.0, grammar=each) for each in (cheap, costly, cheap, "")]
        requests = [
            replace(rig.request((start,), 31), sampling=law) for start, law in enumerate(laws, 1)
        ]
        ids = [session_id for each in requests for session_id in rig.submit(each)]
        rig.run()
        assert [(i, error.code, error.status) for i, error in rig.ended] == [
            (ids[1], "engine_error", 500)
        ]
        assert [len(rig.out[i]) for i in ids] == [4, 4, 4, 31]
        rig.check_clean()

    @pytest.mark.parametrize("num_draft_passes", [0, 4])
    @pytest.mark.parametrize("bad", range(1, 6))
    def test_only_the_poisoned_one(self, make_rig, bad, num_draft_passes):
        rig = rig_with(make_rig, poisoned(bad))
        rig.add_draft(1, error_rate=0.2)
        ids = [rig.add((start, 2, 3), 30, seed=start) for start in range(1, 6)]
        rig.run(num_draft_passes)
        assert [(i, error.code, error.status) for i, error in rig.ended] == [
            (bad, "engine_error", 500)
        ]
        assert ended_counts(rig) == {"finished": 4, "failed": 1}
        for start, session_id in enumerate(ids, 1):
            whole = rig.oracle((start, 2, 3), 30, seed=start)
            assert rig.out[session_id] == ([] if session_id == bad else whole)
        assert rig.scheduler.stats.num_failed_passes == len(rig.failed_plans) == 2
        rig.check_clean()

    @pytest.mark.parametrize("num_draft_passes", [0, 4])
    @pytest.mark.parametrize("num_good", range(0, 7))
    def test_nobody_when_it_happens_once(self, make_rig, num_good, num_draft_passes):
        rig = rig_with(make_rig, once(num_good))
        rig.add_draft(1, error_rate=0.2)
        ids = [rig.add((start, 2, 3), 30, seed=start) for start in range(1, 5)]
        rig.run(num_draft_passes)
        assert rig.ended == []
        assert [len(plan.entries) for plan in rig.failed_plans] == [4]
        for start, session_id in enumerate(ids, 1):
            assert rig.out[session_id] == rig.oracle((start, 2, 3), 30, seed=start)
        rig.check_clean()

    def test_it_may_come_late(self, make_rig):
        """The poison is a token of its own text: those before it are delivered."""
        rig = make_rig()
        text = rig.oracle((1, 2, 3), 30)
        rig.engine = Failing(lambda items: any(text[6] in i.token_ids for i in items))
        others = [tuple(p) for p in ((9, 8), (4, 4), (11, 2)) if text[6] not in p]
        good = [p for p in others if text[6] not in rig.oracle(p, 20)]
        assert len(good) > 1
        ids = [rig.add(prompt, 20) for prompt in good]
        bad = rig.add((1, 2, 3), 30)
        rig.run()
        assert rig.out[bad] == text[:7]
        assert [i for i, _ in rig.ended] == [bad]
        assert [rig.out[i] for i in ids] == [rig.oracle(prompt, 20) for prompt in good]
        rig.check_clean()

    def test_an_engine_that_fails_every_batch_serves_one_by_one(self, make_rig):
        rig = rig_with(make_rig, lambda items: len(items) > 1)
        ids = [rig.add((start, 2, 3), 8, seed=start) for start in range(1, 4)]
        rig.run()
        assert rig.ended == []
        assert [rig.out[i] for i in ids] == [
            rig.oracle((start, 2, 3), 8, seed=start) for start in range(1, 4)
        ]
        assert rig.scheduler.stats.num_failed_passes <= 8, "each cycle brings a token to everybody"
        rig.check_clean()

    @pytest.mark.parametrize("num_draft_passes", [0, 3])
    def test_it_serves_them_in_turn(self, make_rig, num_draft_passes):
        """A suspect that fails again goes behind those that still wait to run alone."""
        rig = rig_with(make_rig, lambda items: len(items) > 1)
        rig.add_draft(1)
        ids = [rig.add((start, 2, 3), 40, seed=start) for start in range(1, 6)]
        for _ in range(40):
            rig.draft(num_draft_passes)
            rig.step()
        lengths = [len(rig.out[i]) for i in ids]
        assert min(lengths) >= 4, lengths
        assert rig.ended == []

    @pytest.mark.parametrize("num_others", [0, 2])
    def test_nobody_when_it_is_the_proposals(self, make_rig, num_others):
        """What a draft says may cost time, never a request, whatever it does to an engine."""
        rig = rig_with(make_rig, lambda items: any(item.num_samples > 1 for item in items))
        rig.add_draft(1)
        ids = [rig.add((start, 2, 3), 25) for start in range(1, 2 + num_others)]
        rig.run(4)
        assert rig.ended == []
        assert [rig.out[i] for i in ids] == [
            rig.oracle((start, 2, 3), 25) for start in range(1, 2 + num_others)
        ]
        assert all(failed.has_drafts for failed in rig.failed_plans)
        rig.check_clean()

    def test_a_draft_whose_proposals_fail_alone_is_barred(self, make_rig):
        rig = rig_with(make_rig, lambda items: any(item.num_samples > 1 for item in items))
        rig.add_draft(1)
        rig.add((1, 2, 3), 25)
        rig.run(4)
        assert len(rig.failed_plans) == 1
        assert [m.epoch for _, m in rig.sent if isinstance(m, OpenSession)] == [1]

    def test_two_poisoned_ones(self, make_rig):
        rig = rig_with(make_rig, poisoned(1, 4))
        ids = [rig.add((start, 2, 3), 12, seed=start) for start in range(1, 5)]
        rig.run()
        assert [i for i, _ in rig.ended] == [1, 4]
        for start in (2, 3):
            assert rig.out[ids[start - 1]] == rig.oracle((start, 2, 3), 12, seed=start)
        rig.check_clean()

    def test_alone_it_is_the_cause(self, make_rig):
        rig = rig_with(make_rig, once(3))
        session_id = rig.add(max_tokens=20)
        rig.run()
        assert [i for i, _ in rig.ended] == [session_id]
        assert len(rig.out[session_id]) == 3
        rig.check_clean()

    def test_a_sequence_outside_of_the_pass_is_no_suspect(self, make_rig):
        """No row was left for the second prompt: the failure is none of its business."""
        rig = rig_with(make_rig, once(0), target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        first, second = rig.add(range(1, 30), 5), rig.add((9, 8, 7), 40, seed=5)
        rig.run()
        assert [i for i, _ in rig.ended] == [first]
        assert rig.out[second] == rig.oracle((9, 8, 7), 40, seed=5)

    def test_choices_of_one_request(self, make_rig):
        rig = rig_with(make_rig, once(1))
        ids = rig.submit(replace(rig.request(PROMPT, 10, seed=1), n=3))
        rig.run()
        assert rig.ended == []
        assert [rig.out[i] for i in ids] == [
            rig.oracle(PROMPT, 10, seed=1, choice=choice) for choice in range(3)
        ]
        rig.check_clean()


class TestTurns:
    def test_suspects_and_the_others_in_turn(self, make_rig):
        rig = rig_with(make_rig, once(2))
        a, b = rig.add((1,), 9), rig.add((2,), 9)
        rig.step()
        rig.step()
        rig.step()  # fails, and then a alone
        c = rig.add((3,), 9)
        for _ in range(5):
            rig.step()
        assert planned(rig.failed_plans) == [[a, b]]
        assert planned(rig.plans[2:]) == [[a], [a, c], [b], [a, b, c], [a, b, c], [a, b, c]]
        rig.run()
        assert [rig.out[i] for i in (a, b, c)] == [rig.oracle((p,), 9) for p in (1, 2, 3)]

    def test_nobody_starves_while_suspects_fail(self, make_rig):
        rig = rig_with(make_rig, poisoned(1, 2, 3))
        for start in range(1, 4):
            rig.add((start,), 5)
        assert rig.scheduler.fail_pass(rig.scheduler.plan(rig.now)) == []
        good = rig.add((9,), 9)
        rig.run()
        assert planned(rig.failed_plans) == [[1], [2], [3]]
        assert [i for i, _ in rig.ended] == [1, 2, 3]
        assert planned(rig.plans) == [[good]] * 9
        assert rig.engine.tried[:6] == [[1], [good], [2], [good], [3], [good]]

    def test_a_long_text_runs_alone_to_its_end(self, make_rig):
        """Chunks are no token: it could still be the cause."""
        rig = rig_with(
            make_rig, once(2), target={"max_rows_per_pass": 16, "max_num_seqs": 4}, info=INFO
        )
        a, b = rig.add((1,), 20), rig.add(PROMPT, 20)
        rig.run()
        assert planned(rig.failed_plans) == [[a, b]]
        assert planned(rig.plans[2:8]) == [[a], [a], [b], [a], [b], [a, b]]
        assert [plan.num_rows for plan in rig.plans[2:8]] == [3, 1, 16, 1, 8, 2]
        assert [rig.out[i] for i in (a, b)] == [rig.oracle((1,), 20), rig.oracle(PROMPT, 20)]
        rig.check_clean()

    def test_a_full_cache(self, make_rig):
        """Suspects are preempted and come back as suspects; all texts are whole."""
        info = replace(INFO, num_blocks=7)
        rig = rig_with(make_rig, once(20), info=info)
        prompts = [(start, *range(2, 20)) for start in range(5)]
        ids = [rig.add(prompt, 40, seed=1) for prompt in prompts]
        rig.run()
        assert len(rig.failed_plans) == 1
        assert rig.scheduler.stats.num_preemptions > 0
        assert [rig.out[i] for i in ids] == [rig.oracle(p, 40, seed=1) for p in prompts]
        rig.check_clean()


class TestSuspects:
    def rig(self, make_rig):
        rig = rig_with(make_rig, once(2))
        rig.add_draft(1)
        first, second = rig.add(max_tokens=40), rig.add((9, 8, 7), 40)
        for _ in range(2):
            rig.draft(6)
            rig.step()
        rig.draft(6)
        sequences = [rig.scheduler._sequences[i] for i in (first, second)]
        assert all(s.session.window_len > 0 for s in sequences)
        return rig, first, second, sequences

    def test_keep_neither_kv_nor_proposals_nor_draft(self, make_rig):
        rig, first, second, sequences = self.rig(make_rig)
        plan = rig.scheduler.plan(rig.now)
        assert plan.has_drafts
        before = [list(rig.out[i]) for i in (first, second)]
        assert rig.scheduler.fail_pass(plan) == []
        for sequence in sequences:
            session = sequence.session
            assert (sequence.cached_len, session.window_len) == (0, 0)
            assert (sequence.is_running, sequence.is_suspect) == (True, True)
            assert (session.link, sequence.draft_id) == (LinkState.LOST, None)
        assert [rig.out[i] for i in (first, second)] == before
        closes = [m for _, m in rig.take_sent() if isinstance(m, CloseSession)]
        assert [(c.session_id, c.reason) for c in closes] == [
            (first, CloseReason.REPLACED),
            (second, CloseReason.REPLACED),
        ]
        assert sorted(rig.scheduler.take_released()) == [first, second]

    def test_get_a_draft_again(self, make_rig):
        rig, first, second, _ = self.rig(make_rig)
        rig.run(6)
        opens = [m for _, m in rig.sent if isinstance(m, OpenSession)]
        assert sorted((m.session_id, m.epoch) for m in opens) == [
            (first, 1),
            (first, 2),
            (second, 1),
            (second, 2),
        ]
        for session_id, prompt in ((first, (1, 2, 3)), (second, (9, 8, 7))):
            assert rig.out[session_id] == rig.oracle(prompt, 40)
        rig.check_clean()

    def test_an_abort_ends_a_suspect(self, make_rig):
        rig, first, second, _ = self.rig(make_rig)
        rig.scheduler.fail_pass(rig.scheduler.plan(rig.now))
        rig.engine.is_bad = poisoned()
        assert rig.scheduler.abort(first)
        rig.run(6)
        assert rig.out[second] == rig.oracle((9, 8, 7), 40)
        rig.check_clean()


class TestBrokenEngine:
    def test_who_was_in_the_pass_is_told(self, make_rig):
        """One choice in it is enough for all of its request."""
        rig = make_rig(target={"max_num_seqs": 3})
        a = rig.submit(replace(rig.request((1,), 9, seed=1), n=2))
        b = rig.submit(replace(rig.request((2,), 9, seed=1), n=2))
        c = rig.submit(replace(rig.request((3,), 9, seed=1), n=2))
        rig.step()
        ended = rig.scheduler.break_pass(rig.scheduler.plan(rig.now))
        assert [i for i, _ in ended] == [*a, *b, *c]
        assert [e.code for _, e in ended] == ["engine_broken"] * 4 + ["target_lost"] * 2
        assert {(e.status, e.retry_after_s) for _, e in ended} == {(503, 1)}
        assert ended_counts(rig) == {"failed": 6}
        rig.check_clean()

    def test_a_running_request_that_was_not_in_the_pass(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        first, second = rig.add(PROMPT, 5), rig.add((9, 8), 5)
        ended = rig.scheduler.break_pass(rig.scheduler.plan(rig.now))
        assert [(i, e.code) for i, e in ended] == [
            (first, "engine_broken"),
            (second, "target_lost"),
        ]
        rig.check_clean()

    def test_who_was_aborted_amid_it_is_counted_once(self, make_rig):
        rig = make_rig()
        first, _ = rig.add(), rig.add((9, 8))
        plan = rig.scheduler.plan(rig.now)
        assert rig.scheduler.abort(first)
        rig.scheduler.break_pass(plan)
        assert ended_counts(rig) == {"aborted": 1, "failed": 1}
        rig.check_clean()

    def test_drafts_are_told(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        rig.add()
        rig.step()
        rig.draft(2)
        rig.scheduler.break_pass(rig.scheduler.plan(rig.now))
        closes = [m for _, m in rig.take_sent() if isinstance(m, CloseSession)]
        assert [c.reason for c in closes] == [CloseReason.ABORTED]
