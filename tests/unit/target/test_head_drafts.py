"""Medusa heads at the target: when they are asked, what is made of it, and when it is dropped."""

from collections import Counter
from dataclasses import replace

import pytest

from paceline.engine.toy import ToyEngine
from paceline.generation import SpeculationRequest
from paceline.proposers.base import LocalProposal
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.target.head_drafts import MAX_HEAD_CLASSES
from paceline.target.head_stats import (
    FIRST_QUIET,
    MAX_HEAD_CANDIDATES,
    MAX_LOSSES,
    MAX_QUIET,
    HeadStats,
    node_survivals,
)
from tests.unit.target.conftest import INFO, PlantedError

HEADS = replace(INFO, num_heads=3)
PROMPT = (1, 2, 3)
HEAD_IDS = ((10, 20), (11, 21), (12, 22))


def rig_with(make_rig, error_rate=0.0, engine=ToyEngine, **settings):
    info = settings.pop("info", HEADS)
    rig = make_rig(info=info, **settings)
    rig.engine = engine(info, head_error_rate=error_rate)
    return rig


def items(rig):
    return [entry.item for plan in rig.plans for entry in plan.entries]


class TestAsking:
    def test_only_who_may_use_them_asks(self, make_rig):
        rig = rig_with(make_rig)
        ids = {method: rig.add(PROMPT, 12, method=method) for method in ("model", "medusa", "auto")}
        rig.run()
        asked = Counter()
        for item in items(rig):
            asked[item.sequence_id] += item.num_head_candidates > 0
        assert asked[ids["model"]] == 0
        assert asked[ids["medusa"]] == len(rig.deltas[ids["medusa"]])  # the prompt's pass, too
        assert asked[ids["auto"]] == len(rig.deltas[ids["auto"]])

    def test_right_heads_give_four_tokens_a_pass(self, make_rig):
        rig = rig_with(make_rig, speculation={"medusa_max_nodes": 3})
        session_id = rig.add(PROMPT, 41, method="medusa")
        rig.run()
        assert rig.out[session_id] == rig.oracle(PROMPT, 41)
        num_rounds = len(rig.deltas[session_id])
        assert 1 + 10 <= num_rounds <= 2 + 10  # one for trees that nothing was known of
        rig.check_clean()

    def test_second_candidates_are_worth_a_branch(self, make_rig):
        """Half of the wrong heads have the right one in second place: a tree finds it."""
        plain, branching = (
            rig_with(
                make_rig, 0.8, speculation={"medusa_max_nodes": n, "num_speculative_tokens": 8}
            )
            for n in (3, 8)
        )
        for rig in (plain, branching):
            session_id = rig.add(PROMPT, 100, method="medusa")
            rig.run()
            assert rig.out[session_id] == rig.oracle(PROMPT, 100)
            rig.check_clean()
        assert any(item.tree_parents for item in items(branching))
        for rig in (plain, branching):  # nodes that were refused are rows, too
            assert rig.scheduler.stats.num_rows == rig.engine.stats().num_rows
        num_rounds = [len(rig.deltas[session_id]) for rig in (plain, branching)]
        assert num_rounds[1] < 0.85 * num_rounds[0]

    @pytest.mark.parametrize(
        ("sampling", "mode", "can_branch"),
        [
            (SamplingParams(temperature=0.0), None, True),
            (SamplingParams(temperature=0.8, seed=1, top_p=0.9, min_p=0.01), None, True),
            (SamplingParams(temperature=0.0, logit_bias=((3, 1.0),)), None, True),
            (SamplingParams(temperature=0.0, frequency_penalty=0.5), None, False),
            (SamplingParams(temperature=0.0, repetition_penalty=1.1), None, False),
            (SamplingParams(temperature=0.0, min_tokens=5), None, False),
            (SamplingParams(temperature=0.8, seed=1), VerificationMode.REJECTION, False),
            (SamplingParams(temperature=0.8, seed=1), VerificationMode.BLOCK, False),
        ],
    )
    def test_a_tree_only_where_logits_alone_decide(self, make_rig, sampling, mode, can_branch):
        rig = rig_with(make_rig, 0.5)
        request = rig.request(PROMPT, 60)
        asked = SpeculationRequest("medusa", mode=mode)
        [session_id] = rig.submit(replace(request, sampling=sampling, speculation=asked))
        rig.run()
        assert any(item.tree_parents for item in items(rig)) is can_branch
        assert {item.num_head_candidates for item in items(rig)} == {8 if can_branch else 1}
        assert sum(delta.num_accepted_tokens for delta in rig.deltas[session_id]) > 5

    def test_a_block_of_logprobs_follows_the_path(self, make_rig):
        rig = rig_with(make_rig, 0.5)
        request = replace(rig.request(PROMPT, 40, method="medusa"), num_logprobs=1)
        [session_id] = rig.submit(request)
        rig.run()
        assert any(item.tree_parents for item in items(rig))
        scored = [entry.token_id for delta in rig.deltas[session_id] for entry in delta.logprobs]
        assert scored == rig.out[session_id] == rig.oracle(PROMPT, 40)

    @pytest.mark.parametrize(("nodes", "asked"), [(1, 1), (4, 4), (64, MAX_HEAD_CANDIDATES)])
    def test_no_more_candidates_than_can_be_verified(self, make_rig, nodes, asked):
        rig = rig_with(make_rig, speculation={"medusa_max_nodes": nodes})
        rig.add(PROMPT, 8, method="medusa")
        rig.run()
        assert {item.num_head_candidates for item in items(rig)} == {asked}
        assert max(len(item.tree_parents) for item in items(rig)) <= nodes


class TestStale:
    def test_candidates_are_for_the_places_behind_their_pass(self, make_rig):
        rig = rig_with(make_rig)
        session_id = rig.add(PROMPT, 40, method="medusa")
        rig.step()
        found = rig.scheduler._sequences[session_id].sources
        length = len(PROMPT) + 1
        assert found.heads_behind(length) != ()
        assert found.heads_behind(length - 1) == found.heads_behind(length + 1) == ()

    def test_a_preempted_sequence_begins_without_candidates(self, make_rig):
        rig = rig_with(make_rig, info=replace(HEADS, num_blocks=6))
        ids = [rig.add(tuple(range(1, 30 + i)), 30, method="medusa") for i in range(2)]
        while not rig.scheduler.stats.num_preemptions:
            rig.step()
        [waiting] = rig.scheduler._roster.waiting
        sequence = rig.scheduler._sequences[waiting]
        assert sequence.sources.heads_behind(sequence.session.committed_len) == ()
        rig.run()
        texts = [rig.oracle(tuple(range(1, 30 + i)), 30) for i in range(2)]
        assert [rig.out[session_id] for session_id in ids] == texts
        rig.check_clean()

    def test_a_pass_that_fails_ends_them(self, make_rig):
        class Fails(ToyEngine):
            def step(self, items):
                if any(item.num_head_candidates and item.start > 5 for item in items):
                    raise PlantedError
                return super().step(items)

        rig = rig_with(make_rig, engine=Fails)
        ids = [rig.add(PROMPT, 20, method="medusa") for _ in range(2)]
        rig.run()
        assert (rig.ended, rig.scheduler.stats.num_failed_passes) == ([], 1)
        assert all(rig.out[session_id] == rig.oracle(PROMPT, 20) for session_id in ids)
        assert rig.plans[-1].entries[0].item.num_head_candidates == 0

    def test_a_lone_text_that_heads_fail_goes_on_without(self, make_rig):
        class Fails(ToyEngine):
            def step(self, items):
                if any(item.num_head_candidates for item in items):
                    raise PlantedError
                return super().step(items)

        rig = rig_with(make_rig, engine=Fails)
        session_id = rig.add(PROMPT, 20, method="medusa")
        rig.run()
        assert (rig.ended, rig.out[session_id]) == ([], rig.oracle(PROMPT, 20))


class TestStats:
    def test_ranks_are_learnt_from_the_text(self):
        stats = HeadStats(3)
        for _ in range(63):
            stats.learn(HEAD_IDS, (20, 11, 99))
        table = stats.table
        assert table[0][1] > 0.8 > 0.2 > table[0][0]
        assert table[1][0] > 0.8
        assert table[2][0] < 0.2

    def test_places_behind_the_text_teach_nothing(self):
        stats = HeadStats(3)
        before = stats.table[1]
        for _ in range(64):
            stats.learn(HEAD_IDS, (10,))
        assert stats.table[1] == before

    def test_they_are_left_alone_when_they_lose_and_asked_again_less_often(self):
        stats, quiet = HeadStats(1), []
        for _ in range(8):
            for number in range(MAX_LOSSES):
                assert not stats.is_quiet, number
                for _ in range(32):  # sequences
                    stats.lose()
                assert not stats.end_pass()
            count, is_over = 0, False
            while not is_over:
                for _ in range(32):
                    stats.rest()
                is_over = stats.end_pass()
                count += 1
            quiet.append(count)
        assert quiet[:3] == [FIRST_QUIET, 2 * FIRST_QUIET, 4 * FIRST_QUIET]
        assert quiet[-1] == MAX_QUIET

    def test_a_win_counts_anew(self):
        stats = HeadStats(1)
        for _ in range(3 * MAX_LOSSES):
            stats.lose()
            stats.end_pass()
            stats.win()
            stats.end_pass()
        assert not stats.is_quiet

    def test_a_pass_with_one_winner_is_won(self):
        stats = HeadStats(1)
        for _ in range(3 * MAX_LOSSES):
            stats.win()
            stats.lose()
            stats.end_pass()
        assert not stats.is_quiet

    def test_survivals_are_those_of_paths(self):
        table = ((0.6, 0.2), (0.5, 0.25))
        tree = LocalProposal((10, 11, 20, 21), (-1, 0, -1, 0))
        survivals = node_survivals(tree, HEAD_IDS, table)
        assert survivals.negatives == pytest.approx((-0.6, -0.3, -0.2, -0.15))
        assert survivals.sums == pytest.approx((0.0, 0.6, 0.9, 1.1, 1.25))
        chain = node_survivals(LocalProposal((10, 11)), HEAD_IDS, table)
        assert chain.negatives == pytest.approx((-0.6, -0.3))

    def test_classes_are_few(self, make_rig):
        rig = rig_with(make_rig)
        heads = rig.scheduler.local._heads
        for number in range(3 * MAX_HEAD_CLASSES):
            heads.stats(number)
            assert len(heads._stats) <= MAX_HEAD_CLASSES


def test_useless_heads_are_asked_seldom_and_counted(make_rig):
    """All candidates wrong: in 400 rounds a few tries are left, of four passes each."""

    class Wrong(ToyEngine):
        def _guess(self, item, state, depth):
            return ((63,),) * 3

    rig = rig_with(make_rig, engine=Wrong, speculation={"lookahead": "adaptive"})
    rig.scheduler.policy.profit.record = lambda *_: None
    rig.add(PROMPT, 400, method="auto")
    rig.run()
    tail = items(rig)[100:]
    assert 0 < sum(item.num_head_candidates > 0 for item in tail) < 0.15 * len(tail)
    assert 2 <= rig.scheduler.stats.by_source["medusa"].num_explored <= 6


class TestNoVerdict:
    """Passes that verify nothing, whatever heads say."""

    def run(self, make_rig, num_passes, **settings):
        rig = rig_with(make_rig, speculation={"lookahead": "adaptive"}, **settings)
        for number in range(32):
            rig.add((1 + number, 2, 3), 200, method="medusa")
        asked, rig.losses = [], []
        for _ in range(num_passes):
            plan, results = rig.begin()
            asked.append(sum(entry.item.num_head_candidates > 0 for entry in plan.entries))
            rig.end(plan, results)
            rig.losses += [
                stats._num_losses for stats in rig.scheduler.local._heads._stats.values()
            ]
        return rig, asked

    def test_control_passes_do_not_silence_good_heads(self, make_rig):
        target = {"max_num_seqs": 32, "max_rows_per_pass": 2048}
        rig, asked = self.run(make_rig, 40, target=target, info=replace(HEADS, num_blocks=4096))
        assert 4 <= asked.count(0) <= 12  # the control stretch, and nothing behind it
        assert asked[-1] == 32
        assert max(rig.losses[asked.index(0, 3) :]) == 0
        assert rig.scheduler.stats.by_source["medusa"].num_explored == 0

    def test_nor_do_passes_that_are_short_of_rows(self, make_rig):
        target = {"max_num_seqs": 32, "max_rows_per_pass": 32}
        rig, asked = self.run(make_rig, 38, target=target, info=replace(HEADS, num_blocks=4096))
        assert not any(entry.draft_token_ids for plan in rig.plans[-20:] for entry in plan.entries)
        assert asked[-20:] == [32] * 20
