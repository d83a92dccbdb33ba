"""Passes with proposals: never-wait, shared rows, several drafts, and always the same text."""

from dataclasses import replace

import pytest

from paceline.generation import SpeculationRequest, TokenOrigin
from paceline.protocol.link import LinkState

LONG = tuple(range(1, 41))
PROMPTS = [(1, 2, 3), LONG[:20], (9,), LONG]


def submit(rig, max_tokens=30, **speculation):
    """Four prompts, greedy and coupled; returns what each must say."""
    expected = {}
    for number, prompt in enumerate(PROMPTS):
        seed = number or None
        session_id = rig.add(prompt, max_tokens, seed=seed, **speculation)
        expected[session_id] = rig.oracle(prompt, max_tokens, seed=seed)
    return expected


def drafted_rows(plan):
    return {entry.session_id: len(entry.draft_token_ids) for entry in plan.entries}


def accepted(rig):
    return rig.scheduler.stats.num_accepted_tokens


class TestSameText:
    @pytest.mark.parametrize(("k", "num_draft_passes"), [(1, 3), (4, 1), (4, 6), (8, 5)])
    @pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
    def test_whatever_the_draft(self, make_rig, error_rate, k, num_draft_passes):
        rig = make_rig(speculation={"num_speculative_tokens": k})
        rig.add_draft(1, error_rate=error_rate)
        expected = submit(rig)
        rig.run(num_draft_passes)
        assert rig.out == expected
        assert accepted(rig) > 0 or error_rate == 1.0
        rig.check_clean()

    def test_a_perfect_draft_is_accepted_whole(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        expected = submit(rig, 60)
        rig.run(6)
        stats = rig.scheduler.stats
        assert rig.out == expected
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 150
        assert rig.drafts[1].table.stats.num_rewinds == 0
        deltas = rig.deltas[1]
        assert [d.num_draft_tokens for d in deltas] == [0] + [4] * 11 + [3]
        assert deltas[1].origins == (TokenOrigin.ACCEPTED,) * 4 + (TokenOrigin.BONUS,)

    @pytest.mark.parametrize("max_rows", [16, 20, 45])
    def test_whatever_the_rows(self, make_rig, max_rows):
        rig = make_rig(target={"max_rows_per_pass": max_rows, "max_num_seqs": 4})
        rig.add_draft(1, error_rate=0.2)
        expected = submit(rig)
        rig.run(5)
        assert rig.out == expected
        assert max(plan.num_rows for plan in rig.plans) <= max_rows
        rig.check_clean()

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 7])
    def test_usage_is_exact(self, make_rig, max_tokens):
        """seen in peers, no. 26."""
        rig = make_rig()
        rig.add_draft(1)
        session_id = rig.add(max_tokens=max_tokens)
        rig.run(6)
        assert rig.out[session_id] == rig.oracle((1, 2, 3), max_tokens)
        assert rig.deltas[session_id][-1].finish_reason == "length"
        rig.check_clean()

    def test_eos_inside_a_block(self, make_rig):
        """seen in peers, no. 24: the stop id is the third token of an accepted block."""
        rig = make_rig()
        rig.add_draft(1)
        text = rig.oracle((1, 2, 3), 20)
        assert text.index(text[3]) == 3
        session_id = rig.add((1, 2, 3), 20, stop=(text[3],))
        rig.run(6)
        assert rig.out[session_id] == text[:4]
        assert rig.deltas[session_id][-1].num_draft_tokens == 4
        assert rig.deltas[session_id][-1].num_accepted_tokens == 3
        assert rig.deltas[session_id][-1].finish_reason == "stop"
        rig.check_clean()

    def test_context_limit(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        session_id = rig.add((1,) * 500, 100)
        rig.run(6)
        assert rig.out[session_id] == rig.oracle((1,) * 500, 100)
        assert len(rig.out[session_id]) == 12
        rig.check_clean()

    def test_short_draft_context(self, make_rig):
        """seen in peers, no. 28: draft 64, prompt 60, 150 tokens; drafting stops by itself."""
        rig = make_rig()
        rig.add_draft(1, max_len=64)
        session_id = rig.add(tuple(range(60)), 150)
        rig.run(5)
        assert rig.out[session_id] == rig.oracle(range(60), 150)
        assert 0 < rig.scheduler.stats.num_draft_tokens <= 4
        rig.check_clean()

    def test_a_text_that_outgrows_its_draft_gives_the_place_back(self, make_rig):
        """A draft of 8 blocks whose contexts end at 64: two long texts must not pin it."""
        rig = make_rig()
        draft = rig.add_draft(1, max_len=64, num_blocks=8, block_size=16)
        texts = [rig.add(tuple(range(50 + i)), 100) for i in range(2)]
        while min(len(rig.out[t]) for t in texts) < 30:
            rig.draft(2)
            rig.step()
        rig.deliver()
        assert len(draft.table) == 0
        assert rig.desk.counts["outgrown"] == 2
        late = rig.add((5,) * 20, 20)
        rig.run(4)
        assert sum(d.num_accepted_tokens for d in rig.deltas[late]) > 10
        rig.check_clean()

    def test_a_draft_that_joins_late(self, make_rig):
        rig = make_rig()
        expected = submit(rig)
        for _ in range(5):
            rig.step()
        rig.add_draft(1)
        rig.run(4)
        assert rig.out == expected
        assert accepted(rig) > 50
        rig.check_clean()


class TestNeverWait:
    def test_every_sequence_is_in_every_pass_with_what_has_arrived(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        expected = submit(rig, 40)
        arrivals = [0, 2, 1, 0, 0, 3, 1, 6, 0]
        while rig.scheduler.num_running:
            rig.draft(arrivals[len(rig.plans) % len(arrivals)])
            running = list(rig.scheduler._running)
            windows = {i: rig.scheduler._sequences[i].session.window_len for i in running}
            plan, results = rig.begin()
            assert set(drafted_rows(plan)) == set(running)
            if len(rig.plans) > 1:
                assert drafted_rows(plan) == {i: min(4, windows[i]) for i in running}
            rig.end(plan, results)
        assert rig.out == expected

    def test_with_every_draft_silent_it_is_plain_decoding(self, make_rig):
        rig, alone = make_rig(), make_rig()
        rig.desk.attach(1, rig.hello(1))
        expected = submit(rig)
        submit(alone)
        rig.run()
        alone.run()
        assert rig.out == expected
        assert [p.num_rows for p in rig.plans] == [p.num_rows for p in alone.plans]

    def test_k_of_the_request(self, make_rig):
        rig = make_rig(speculation={"num_speculative_tokens": 4, "max_num_speculative_tokens": 6})
        rig.add_draft(1)
        ids = []
        for asked in (None, 0, 2, 50):
            speculation = SpeculationRequest(max_tokens=asked)
            request = replace(rig.request((1, 2), 30), speculation=speculation)
            ids.append(rig.scheduler.add(request, 0))
            rig.out[ids[-1]], rig.deltas[ids[-1]] = [], []
        rig.run(8)
        most = [max(d.num_draft_tokens for d in rig.deltas[i]) for i in ids]
        caps = [rig.deltas[i][0].num_speculative_tokens for i in ids]
        assert most == caps == [4, 0, 2, 6]

    def test_off_by_request_opens_nothing(self, make_rig):
        rig = make_rig()
        draft = rig.add_draft(1)
        expected = submit(rig, method="off")
        rig.run(3)
        assert rig.out == expected
        assert draft.table.stats.num_opened == 0
        assert rig.scheduler.stats.num_draft_tokens == 0

    def test_off_by_deployment(self, make_rig):
        rig = make_rig(speculation={"method": "off"})
        draft = rig.add_draft(1)
        expected = submit(rig)
        rig.run(3)
        assert rig.out == expected
        assert draft.table.stats.num_opened == 0

    def test_one_token_needs_no_draft(self, make_rig):
        rig = make_rig()
        draft = rig.add_draft(1)
        rig.add(max_tokens=1)
        rig.run(3)
        assert draft.table.stats.num_opened == 0


class TestSharedRows:
    """max_rows 16: every decode row is certain, proposals and prompts share the rest."""

    def rig(self, make_rig, num_decoding):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 8})
        rig.add_draft(1)
        for number in range(num_decoding):
            rig.add((number,), 60)
        rig.step()
        rig.draft(8)
        return rig

    def test_proposals_never_push_a_decode_row_out(self, make_rig):
        rig = self.rig(make_rig, 6)
        plan, _ = rig.begin()
        assert len(plan.entries) == 6
        assert sorted(drafted_rows(plan).values(), reverse=True) == [2, 2, 2, 2, 1, 1]
        assert plan.num_rows == 16

    def test_scarce_rows_are_shared_evenly_over_time(self, make_rig):
        """8 decode rows leave 8 for proposals; a perfect draft would fill 32."""
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 8})
        rig.add_draft(1)
        sessions = [rig.add((number,), 60) for number in range(8)]
        rig.step()
        for _ in range(16):
            rig.draft(8)
            rig.step()
        lengths = [len(rig.out[session_id]) for session_id in sessions]
        assert max(lengths) - min(lengths) <= 2
        assert sum(lengths) > 8 * 30

    def test_proposals_leave_half_to_a_waiting_prompt(self, make_rig):
        """3 decode rows; of the other 13 the prompt gets 7, proposals 6."""
        rig = self.rig(make_rig, 3)
        prompt = rig.add(LONG, 5)
        plan, _ = rig.begin()
        assert drafted_rows(plan) == {1: 2, 2: 2, 3: 2, prompt: 0}
        assert [e.max_rows for e in plan.entries] == [3, 3, 3, 7]

    def test_a_prompt_takes_no_more_than_it_needs(self, make_rig):
        rig = self.rig(make_rig, 3)
        prompt = rig.add((1, 2), 5)
        plan, _ = rig.begin()
        assert sorted(drafted_rows(plan).items()) == [(1, 3), (2, 4), (3, 4), (prompt, 0)]

    def test_a_prompt_takes_what_proposals_leave(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 16, "max_num_seqs": 8})
        rig.add((1,), 60)
        rig.step()
        prompt = rig.add(LONG, 5)
        plan, _ = rig.begin()
        assert [e.session_id for e in plan.entries] == [1, prompt]
        assert plan.num_rows == 16

    def test_busy_drafts_do_not_starve_a_prompt(self, make_rig):
        """Windows that are always full must not keep a prompt out of every pass."""
        rig = self.rig(make_rig, 4)
        prompt = rig.add(LONG, 5)
        for _ in range(20):
            rig.draft(8)
            rig.step()
            if rig.out[prompt]:
                break
        # 12 rows beside the decodes, 6 of them for the prompt: 40 tokens are 7 passes.
        assert len(rig.plans) - 1 == 7


class TestSeveralDrafts:
    def test_balanced(self, make_rig):
        rig = make_rig()
        for link_id in (1, 2, 3):
            rig.add_draft(link_id)
        for number in range(7):
            rig.add((number,), 20)
        links = rig.desk.pool.links()
        assert sorted(len(link.sessions) for link in links.values()) == [2, 2, 3]
        rig.run(4)
        assert all(draft.table.stats.num_opened >= 2 for draft in rig.drafts.values())
        rig.check_clean()

    @pytest.mark.parametrize("lost_after", [0, 1, 2, 5])
    def test_one_lost_and_another_takes_over(self, make_rig, lost_after):
        rig = make_rig()
        rig.add_draft(1, error_rate=0.1)
        rig.add_draft(2, error_rate=0.1)
        expected = submit(rig, 60)
        for _ in range(lost_after):
            rig.draft(5)
            rig.step()
        rig.lose_draft(1)
        before = accepted(rig)
        rig.run(5)
        assert rig.out == expected
        assert rig.desk.counts["reopened"] == 2
        assert rig.drafts[2].table.stats.num_opened == 4
        assert accepted(rig) - before > 40
        rig.check_clean()

    def test_lost_in_the_middle_of_a_pass(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        rig.add_draft(2)
        expected = submit(rig, 60)
        for _ in range(3):
            rig.draft(5)
            plan, results = rig.begin()
            rig.lose_draft(1)
            rig.end(plan, results)
            rig.add_draft(1)
        rig.run(5)
        assert rig.out == expected
        rig.check_clean()

    def test_all_lost(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        rig.add_draft(2)
        expected = submit(rig, 40)
        rig.draft(5)
        rig.step()
        rig.lose_draft(1)
        rig.lose_draft(2)
        rig.run()
        assert rig.out == expected
        rig.check_clean()

    def test_proposals_of_a_lost_draft_are_still_verified(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        session_id = rig.add((1, 2), 20)
        rig.step()
        rig.draft(5)
        rig.lose_draft(1)
        assert rig.step()[session_id].num_accepted_tokens == 4

    def test_the_draft_that_comes_back(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        expected = submit(rig, 60)
        rig.draft(5)
        rig.step()
        rig.lose_draft(1)
        rig.step()
        assert {s.session.link for s in rig.scheduler._sequences.values()} == {LinkState.LOST}
        rig.add_draft(1)
        rig.run(5)
        assert rig.out == expected
        assert rig.drafts[1].table.stats.num_opened == 4
        rig.check_clean()
