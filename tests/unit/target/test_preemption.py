"""When KV blocks run out: proposals go first, then the newest sequence; nothing of a text is lost.

4 blocks of 16 tokens, where nothing else is said.
"""

from dataclasses import replace

import pytest

from paceline.engine.base import EngineInfo, OutOfBlocks
from paceline.engine.toy import ToyEngine
from paceline.errors import OverloadedError
from paceline.protocol.link import LinkState
from paceline.protocol.messages import CloseReason, CloseSession, OpenSession
from paceline.target.scheduler import Hold

INFO = EngineInfo("toy", 64, 512, 16, 4)
FIRST, SECOND, THIRD = (1,) * 10, (2,) * 10, (3,) * 10


class OneByOne(ToyEngine):
    """Never has room for two sequences in a pass."""

    num_tries = 0

    def step(self, items):
        self.num_tries += 1
        if len(items) > 1:
            raise OutOfBlocks
        return super().step(items)


def preempt(rig):
    """Plan a pass and say that it does not fit, until somebody has given way."""
    count = rig.scheduler.stats.num_preemptions
    while rig.scheduler.stats.num_preemptions == count:
        plan = rig.scheduler.plan(rig.now)
        assert rig.scheduler.make_room(plan)


def sequence(rig, session_id):
    return rig.scheduler._sequences[session_id]


class TestNothingIsLost:
    @pytest.mark.parametrize("num_draft_passes", [0, 5])
    def test_two_that_outgrow_the_cache(self, make_rig, num_draft_passes):
        rig = make_rig(info=INFO)
        rig.add_draft(1, error_rate=0.1)
        first, second = rig.add(FIRST, 40), rig.add(SECOND, 40, seed=3)
        assert rig.scheduler.num_running == 2
        rig.run(num_draft_passes)
        assert rig.out[first] == rig.oracle(FIRST, 40)
        assert rig.out[second] == rig.oracle(SECOND, 40, seed=3)
        assert rig.scheduler.stats.num_preemptions >= 1
        rig.check_clean()

    def test_the_oldest_never_gives_way(self, make_rig):
        rig = make_rig(info=INFO)
        ids = [rig.add(prompt, 50, seed=1) for prompt in (FIRST, SECOND, THIRD)]
        order = []
        while rig.scheduler.num_running:
            for session_id, delta in rig.step().items():
                if delta.finish_reason:
                    order.append(session_id)
        assert order == ids
        assert [len(rig.deltas[i]) for i in ids] == [50, 50, 50], "a token a pass, none twice"
        assert sum(ids[0] in {e.session_id for e in plan.entries} for plan in rig.plans) == 50
        rig.check_clean()

    def test_logprobs_of_a_preempted_sequence(self, make_rig):
        """seen in peers, no. 19, with a preemption in between."""
        entries = {}
        for info in (INFO, replace(INFO, num_blocks=64)):
            rig = make_rig(info=info)
            rig.add(FIRST, 40)
            asked = replace(rig.request(SECOND, 40, seed=1), num_logprobs=2)
            [session_id] = rig.submit(replace(asked, num_prompt_logprobs=1))
            rig.run()
            deltas = rig.deltas[session_id]
            entries[info.num_blocks] = [e for d in deltas for e in d.logprobs]
            assert [len(d.prompt_logprobs) for d in deltas] == [9] + [0] * 39
            assert bool(rig.scheduler.stats.num_preemptions) == (info is INFO)
        assert entries[4] == entries[64]
        assert len(entries[4]) == 40

    def test_prompt_logprobs_begin_again(self, make_rig):
        """Preempted in the middle of its prompt, whose first part was scored already."""
        rig = make_rig(info=INFO, target={"max_rows_per_pass": 16, "max_num_seqs": 4})
        rig.add((1,), 20)
        prompt = tuple(range(1, 41))
        [session_id] = rig.submit(replace(rig.request(prompt, 5), num_prompt_logprobs=0))
        rig.step()
        assert len(sequence(rig, session_id).prompt_logprobs) == 15
        preempt(rig)
        rig.free()
        rig.run()
        [delta, *others] = rig.deltas[session_id]
        assert [e.token_id for e in delta.prompt_logprobs] == list(prompt[1:])
        assert not any(d.prompt_logprobs for d in others)
        assert rig.out[session_id] == rig.oracle(prompt, 5)

    def test_its_own_blocks_are_no_cached_prompt(self, make_rig):
        """What it had computed itself before it gave way was not found in the cache."""
        rig = make_rig(info=INFO, target={"max_rows_per_pass": 17, "max_num_seqs": 4})
        rig.add((1,), 20)
        session_id = rig.add(tuple(range(1, 41)), 5)
        rig.step()
        preempt(rig)
        rig.free()
        rig.run()
        assert rig.scheduler.stats.num_prefix_tokens == 16
        assert rig.deltas[session_id][0].num_cached_tokens == 0


class TestProposalsGoFirst:
    def test_and_come_back(self, make_rig):
        rig = make_rig()
        rig.add_draft(1)
        rig.add(FIRST, 40)
        rig.step()
        rig.draft(6)
        plan = rig.scheduler.plan(rig.now)
        assert [len(e.draft_token_ids) for e in plan.entries] == [4]
        assert rig.scheduler.make_room(plan)
        plan, results = rig.begin()
        assert [len(e.draft_token_ids) for e in plan.entries] == [0]
        rig.end(plan, results)
        plan, results = rig.begin()
        assert [len(e.draft_token_ids) for e in plan.entries] == [4], "they were kept meanwhile"
        rig.end(plan, results)
        rig.run(4)
        assert rig.out[1] == rig.oracle(FIRST, 40)
        assert rig.scheduler.stats.num_preemptions == 0
        rig.check_clean()

    @pytest.mark.parametrize(("num_blocks", "num_tokens"), [(1, 3), (2, 4)])
    def test_they_take_no_more_than_is_free(self, make_rig, num_blocks, num_tokens):
        """13 tokens: 3 more fit into the block that is there anyway."""
        rig = make_rig(info=replace(INFO, num_blocks=num_blocks + 1))
        rig.add_draft(1)
        rig.add((1,) * 12, 8 + 16 * (num_blocks - 1))
        rig.add((2,) * 12, 4, method="off")
        rig.step()
        rig.draft(6)
        plan, results = rig.begin()
        assert [len(e.draft_token_ids) for e in plan.entries] == [num_tokens, 0]
        rig.end(plan, results)
        assert rig.scheduler.stats.num_preemptions == 0

    def test_the_last_block_goes_by_turns(self, make_rig):
        """One block is free: the proposals of the sequence whose turn it is reach into it."""
        rig = make_rig(info=replace(INFO, num_blocks=3))
        rig.add_draft(1)
        for prompt in (1, 2):
            rig.add((prompt,) * 13, 20)
        rig.step()
        rig.draft(6)
        plan, results = rig.begin()
        assert rig.scheduler.stats.num_passes == 1
        assert [len(e.draft_token_ids) for e in plan.entries] == [2, 4]
        rig.end(plan, results)
        rig.run(6)
        assert [rig.out[i] for i in (1, 2)] == [rig.oracle((p,) * 13, 20) for p in (1, 2)]
        rig.check_clean()

    def test_no_lone_wait_for_what_has_no_room(self, make_rig):
        rig = make_rig(speculation={"max_lone_wait_ms": 50.0})
        rig.add_draft(1)
        rig.add(FIRST, 40)
        rig.deliver()
        rig.step()
        rig.draft(1)
        plan = rig.scheduler.plan(rig.now)
        rig.scheduler.make_room(plan)
        rig.scheduler.policy.lone.pass_us.value = 10_000
        rig.scheduler.policy.lone.draft_token_us.value = 100
        assert not isinstance(rig.scheduler.plan(rig.now), Hold)


class TestWhoGivesWay:
    def test_the_newest_to_the_front_of_the_queue(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 3})
        ids = [rig.add(prompt, 20) for prompt in (FIRST, SECOND, THIRD)]
        later = rig.add((4,), 20)
        rig.step()
        preempt(rig)
        preempt(rig)
        assert rig.scheduler._running == [ids[0]]
        assert list(rig.scheduler._roster.waiting) == [ids[1], ids[2], later]
        assert rig.scheduler.take_released() == [ids[2], ids[1]]
        assert rig.scheduler.stats.num_preemptions == 2

    def test_who_was_aborted_in_the_pass_comes_first(self, make_rig):
        rig = make_rig()
        first, second = rig.add(FIRST, 20), rig.add(SECOND, 20)
        plan = rig.scheduler.plan(rig.now)
        rig.scheduler.abort(first)
        assert rig.scheduler.make_room(plan)
        assert rig.scheduler._running == [second]
        assert rig.scheduler.stats.num_preemptions == 0
        rig.run()
        assert rig.out[second] == rig.oracle(SECOND, 20)
        rig.check_clean()

    def test_alone_there_is_nobody(self, make_rig):
        """It would be a bug of the engine or of ours: the pass fails, and with it the sequence."""
        rig = make_rig()
        session_id = rig.add(FIRST, 20)
        plan = rig.scheduler.plan(rig.now)
        assert not rig.scheduler.make_room(plan)
        [(failed, error)] = rig.scheduler.fail_pass(plan)
        assert (failed, error.code) == (session_id, "engine_error")
        rig.check_clean()

    def test_aborted_while_it_waits(self, make_rig):
        rig = make_rig()
        first, second = rig.add(FIRST, 20), rig.add(SECOND, 20)
        rig.step()
        preempt(rig)
        assert rig.scheduler.abort(second)
        assert rig.scheduler.take_released() == [second], "once"
        rig.engine.free(second)
        rig.run()
        assert rig.out[first] == rig.oracle(FIRST, 20)
        rig.check_clean()

    def test_new_requests_are_not_refused_because_of_it(self, make_rig):
        """The queue limit is for those that have never run."""
        rig = make_rig(target={"max_num_seqs": 2, "max_queued_seqs": 1})
        rig.add(FIRST, 20)
        rig.add(SECOND, 20)
        preempt(rig)
        assert rig.scheduler.num_waiting == 1
        rig.add(THIRD, 20)
        with pytest.raises(OverloadedError, match="1 sequences are queued"):
            rig.add((4,), 20)
        rig.run()
        rig.check_clean()


class TestComingBack:
    def test_not_before_a_pass_has_been_done(self, make_rig):
        """By the engine's last word all blocks are free: it must not come back at once."""
        rig = make_rig()
        rig.add(FIRST, 20)
        second = rig.add(SECOND, 20)
        preempt(rig)
        plan, results = rig.begin()
        assert [e.session_id for e in plan.entries] == [1]
        rig.end(plan, results)
        plan, _ = rig.begin()
        assert [e.session_id for e in plan.entries] == [1, second]

    @pytest.mark.parametrize(("num_blocks", "comes"), [(4, True), (3, False)])
    def test_not_without_room_for_its_text_and_a_block(self, make_rig, num_blocks, comes):
        """The first has 1 block; the other's 17 tokens take 2, and a third is to grow into."""
        rig = make_rig(info=replace(INFO, num_blocks=num_blocks))
        rig.add(FIRST, 20)
        second = rig.add((2,) * 15, 20)
        rig.step()
        rig.step()
        assert sequence(rig, second).session.committed_len == 17
        preempt(rig)
        rig.step()
        assert sequence(rig, second).is_running == comes

    def test_no_more_than_it_can_ever_need(self, make_rig):
        """Its 33 tokens are all it will write, but for 15: 3 blocks, and no fourth to wait for."""
        rig = make_rig(info=INFO)
        rig.add(FIRST, 6)
        second = rig.add((2,) * 33, 15)
        rig.step()
        preempt(rig)
        rig.step()
        assert sequence(rig, second).is_running

    def test_an_engine_that_never_has_room_for_two(self, make_rig):
        """One after the other, and no plan is tried without end."""
        rig = make_rig()
        ids = [rig.add(prompt, 5) for prompt in (FIRST, SECOND, THIRD)]
        rig.engine = OneByOne(rig.info)
        rig.run()
        assert [rig.out[i] for i in ids] == [rig.oracle(p, 5) for p in (FIRST, SECOND, THIRD)]
        assert rig.engine.num_tries < 3 * len(rig.plans) + 3
        rig.check_clean()


class TestItsDraft:
    def test_is_free_for_others_and_asked_again(self, make_rig):
        rig = make_rig()
        draft = rig.add_draft(1)
        rig.add(FIRST, 30)
        second = rig.add(SECOND, 30, seed=2)
        rig.draft(4)
        rig.step()
        rig.draft(4)
        preempt(rig)
        sent = rig.take_sent()
        assert sent == [(1, CloseSession(second, 1, CloseReason.REPLACED))]
        for link_id, message in sent:
            draft.table.receive(link_id, message, rig.now)
        assert len(draft.table) == 1
        assert sequence(rig, second).session.link is LinkState.LOST
        rig.step()
        rig.step()
        opens = [m for _, m in rig.take_sent() if isinstance(m, OpenSession)]
        assert [(m.session_id, m.epoch) for m in opens] == [(second, 2)]
        rig.desk.detach(1)
        rig.drafts.clear()
        rig.run()
        assert rig.out[second] == rig.oracle(SECOND, 30, seed=2)
        rig.check_clean()

    def test_the_same_draft_is_no_last_resort(self, make_rig):
        """It may still have the prefix: being the last one must not count against it."""
        rig = make_rig()
        rig.add_draft(1)
        rig.add(FIRST, 30)
        second = rig.add(SECOND, 30)
        rig.deliver()
        preempt(rig)
        assert sequence(rig, second).last_draft_id is None
