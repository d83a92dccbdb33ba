"""What looking texts up costs before a pass: who is told how much, and when nobody is."""

from dataclasses import replace

import pytest

from paceline.protocol.profit import DealState
from paceline.target.local_drafts import MAX_OWED_TOKENS, MAX_TOLD_TOKENS, TURN_TOKENS
from paceline.target.sequence import PassTimes
from tests.unit.target.conftest import INFO

BIG = replace(INFO, num_blocks=20_000, max_model_len=20_000)
ROOM = {"max_num_seqs": 64, "max_rows_per_pass": 16_384}


class Counting:
    """Proposes one and the same token; `told` has what each call of `extend` brought."""

    def __init__(self, token=63):
        self.token, self.told, self.num_proposed = token, [], 0

    def extend(self, token_ids):
        self.told.append(len(token_ids))

    def propose(self, max_tokens):
        self.num_proposed += 1
        return (self.token,) * max_tokens


def counting(rig, token=63):
    """By session id, the proposers that were made."""
    made = {}

    def proposer(sequence, name):
        return made.setdefault(sequence.session.session_id, Counting(token))

    rig.scheduler.local._proposer = proposer
    return made


def total(made):
    return sum(sum(each.told) for each in made.values())


def prompt(length, first=1):
    return tuple(1 + (first + i) % 60 for i in range(length))


def drafting(rig):
    """Sessions that the next pass verifies proposals for; each row takes its time."""
    plan, results = rig.begin()
    started, rig.now = rig.now, rig.now + 500 + 200 * plan.num_rows
    times = PassTimes(started, rig.now)
    free = rig.engine.stats().num_free_blocks
    for session_id, delta in rig.scheduler.end_pass(plan, results, times, free):
        rig.out[session_id] += delta.token_ids
        rig.deltas[session_id].append(delta)
    return {entry.session_id for entry in plan.entries if entry.draft_token_ids}


def test_what_passes_have_committed_is_told_at_once(make_rig):
    """A long newcomer takes nobody's lookups away."""
    rig = make_rig(info=BIG, target=ROOM, speculation={"method": "suffix"})
    made = counting(rig)
    old = {rig.add((1, 2, 3 + number), 100) for number in range(32)}
    drafting(rig)
    assert drafting(rig) == old
    new = rig.add(prompt(8 * MAX_TOLD_TOKENS), 100)
    seen = [drafting(rig) for _ in range(12)]
    assert all(old <= each for each in seen)
    assert new in seen[-1]
    assert max(max(made[session_id].told) for session_id in old) <= MAX_OWED_TOKENS


def test_long_prompts_are_told_a_part_at_a_time(make_rig):
    rig = make_rig(info=BIG, target=ROOM, speculation={"method": "suffix"})
    made = counting(rig)
    ids = [rig.add(prompt(3 * MAX_TOLD_TOKENS, number), 30) for number in range(2)]
    num_told = []
    while rig.scheduler.num_running:
        before = total(made)
        drafting(rig)
        num_told.append(total(made) - before)
    assert max(num_told) <= MAX_TOLD_TOKENS + 2 * 5  # what is committed meanwhile
    assert min(num_told[:5]) == MAX_TOLD_TOKENS  # from the first pass on, the prompt's own
    assert all(sum(delta.source == "suffix" for delta in rig.deltas[i]) > 5 for i in ids)


def test_it_is_learnt_while_the_prompt_is_computed(make_rig):
    rig = make_rig(info=BIG, target={"max_rows_per_pass": 256}, speculation={"method": "suffix"})
    counting(rig)
    session_id = rig.add(prompt(2000), 20)
    while not rig.out[session_id]:
        drafting(rig)
    assert drafting(rig) == {session_id}


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_two_lookups_learn_a_prompt_as_fast_as_one(make_rig, method):
    rig = make_rig(info=BIG, target=ROOM, speculation={"method": method})
    session_id = rig.add(prompt(3 * MAX_TOLD_TOKENS), 30)
    for num_passes in range(1, 3):
        drafting(rig)
        sources = rig.scheduler._sequences[session_id].sources.sources
        num_told = {source.told_len for source in sources if source.looks_up}
        assert num_told == {num_passes * MAX_TOLD_TOKENS}


def test_backlogs_have_turns(make_rig):
    """None of six waits until the first of them has learnt all."""
    rig = make_rig(info=BIG, target=ROOM, speculation={"method": "suffix"})
    made = counting(rig)
    for number in range(6):
        rig.add(prompt(4 * MAX_TOLD_TOKENS, number), 50)
    drafting(rig)
    assert sorted(sum(each.told) for each in made.values()) == [TURN_TOKENS] * 4
    for _ in range(2):
        drafting(rig)
    assert {sum(each.told) for each in made.values()} <= {
        TURN_TOKENS * turns + extra for turns in (2,) for extra in range(2 * MAX_OWED_TOKENS)
    }


class TestOutputs:
    def test_they_are_learnt_before_passes_a_part_at_a_time(self, make_rig):
        rig = make_rig(info=BIG, target=ROOM)
        recent = rig.scheduler.local.memory.recent
        for number in range(8):
            rig.add((1, 2, 3 + number), 600, method="suffix")
        while rig.scheduler.num_running > 0:
            before = recent.num_tokens
            plan, results = rig.begin()
            learnt = recent.num_tokens - before
            rig.end(plan, results)
            assert recent.num_tokens == before + learnt  # nothing in the commit
            assert learnt <= MAX_TOLD_TOKENS + 8
        assert recent.num_pending > 0
        rig.add((1, 2, 3), 30, method="suffix")
        rig.run()
        assert recent.num_pending == 30

    @pytest.mark.parametrize("method", ["off", "model", "ngram", "suffix"])
    def test_of_whom_looks_into_them_alone(self, make_rig, method):
        rig = make_rig()
        rig.add((1, 2, 3), 10, method="suffix")
        rig.run()
        recent = rig.scheduler.local.memory.recent
        before = recent.num_pending + recent.num_tokens
        rig.add((1, 2, 3), 20, method=method)
        rig.run()
        grown = recent.num_pending + recent.num_tokens - before
        assert (grown >= 20) is (method == "suffix")


class TestRest:
    def start(self, make_rig, num_sequences, token=63):
        rig = make_rig(
            info=BIG, target=ROOM, speculation={"lookahead": "adaptive", "method": "suffix"}
        )
        made = counting(rig, token)
        for number in range(num_sequences):
            rig.add((1, 2, 3 + number), 2000)
        for _ in range(4):
            drafting(rig)
        return rig, made

    def work(self, rig, made, num_passes):
        """Lookups and tokens told in so many passes."""
        before = sum(each.num_proposed for each in made.values()), total(made)
        for _ in range(num_passes):
            drafting(rig)
        after = sum(each.num_proposed for each in made.values()), total(made)
        return after[0] - before[0], after[1] - before[1]

    def test_nobody_looks_up_while_the_deal_rests(self, make_rig):
        rig, made = self.start(make_rig, 16)
        rig.scheduler.policy.profit.record = lambda *_: None
        rig.scheduler.policy.profit.deal.state = DealState.OPEN
        assert self.work(rig, made, 15) == (0, 0)
        num_lookups, num_told = self.work(rig, made, 185)
        assert 0 < num_lookups <= 4 * 3 * 8
        assert 0 < num_told < 16 * 185 / 4
        assert rig.scheduler.local._rests.num_trials == 3

    def test_all_learn_what_was_put_off_when_it_goes_on(self, make_rig):
        rig, made = self.start(make_rig, 16)
        rig.scheduler.policy.profit.record = lambda *_: None
        deal = rig.scheduler.policy.profit.deal
        deal.state = DealState.OPEN
        self.work(rig, made, 100)
        deal.state = DealState.HALF_OPEN
        num_lookups, _ = self.work(rig, made, 8)
        assert num_lookups >= 16 * 5
        sequences = rig.scheduler.running_sequences()
        lengths = [sequence.session.committed_len for sequence in sequences]
        behind = [
            length - sum(made[sequence.session.session_id].told)
            for length, sequence in zip(lengths, sequences, strict=True)
        ]
        assert max(behind) <= MAX_OWED_TOKENS

    def test_a_class_that_is_always_wrong_is_looked_up_seldom(self, make_rig):
        rig, made = self.start(make_rig, 16)
        rig.scheduler.policy.profit.record = lambda *_: None
        self.work(rig, made, 60)
        num_lookups, num_told = self.work(rig, made, 100)
        assert rig.scheduler.local._rests.num_trials > 0
        assert num_lookups <= 4 * 4 * 8
        assert num_told < 16 * 100 / 2

    def test_a_fixed_k_looks_up_whatever_the_deal_says(self, make_rig):
        rig = make_rig(info=BIG, target=ROOM, speculation={"method": "suffix"})
        made = counting(rig)
        rig.add((1, 2, 3), 100)
        rig.scheduler.policy.profit.deal.state = DealState.OPEN
        assert self.work(rig, made, 20) == (19, 3 + 19)
