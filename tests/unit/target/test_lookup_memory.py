"""One bound for all that lookups remember: who gives way, and that nobody fails of it."""

from dataclasses import replace

import pytest

from paceline.config import SpeculationConfig
from paceline.proposers.ngram import MAX_RUN_BYTES
from paceline.proposers.suffix import MAX_TOKEN_BYTES
from paceline.target.lookup_memory import LookupDrops, LookupMemory
from tests.unit.target.conftest import INFO
from tests.unit.target.test_lookup_costs import BIG, ROOM, counting, drafting, prompt

MIB = 1 << 20
FULL = MIB // MAX_TOKEN_BYTES  # tokens that a suffix tree has in the least limit: 2730


@pytest.fixture
def small(monkeypatch):
    """A "MiB" of 40 tokens."""
    monkeypatch.setattr("paceline.target.lookup_memory._MIB", 40 * MAX_TOKEN_BYTES)


def make(make_rig, method="suffix", **speculation):
    asked = {"method": method, "max_lookup_memory_mib": 1, **speculation}
    return make_rig(info=BIG, target=ROOM, speculation=asked)


def memory(rig):
    """Never over the limit, and held for those alone who have it."""
    found = rig.scheduler.local.memory
    assert found.num_bytes <= found.max_bytes
    assert all(name in names(rig, session_id) for session_id, name in found._held)
    return found


def names(rig, session_id):
    found = rig.scheduler._sequences[session_id].sources
    return () if found is None else tuple(source.name for source in found.sources)


def test_recent_outputs_go_first(make_rig):
    """Two outputs of 600 tokens are known; then a text of 2600, and the older of them goes, then
    the other. The text keeps its lookup."""
    rig = make(make_rig, suffix_decoding_max_cached_tokens=2000)
    counting(rig)
    for first in range(2):
        rig.add(prompt(3, first), 600)
        rig.run()
        rig.add((1, 2), 3)  # somebody for whom outputs are learnt
        rig.run()
    found = memory(rig)
    assert found.recent.num_tokens >= 1200
    session_id = rig.add(prompt(1700), 900)
    while rig.scheduler.num_running:
        drafting(rig)
        memory(rig)
    assert found.drops.num_recent == 2
    assert found.drops.num_full >= 2
    assert (found.drops.num_suffix, found.drops.num_ngram) == (0, 0)
    assert len(rig.out[session_id]) == 900
    assert sum(delta.source == "suffix" for delta in rig.deltas[session_id]) > 100


def test_then_the_sequence_that_takes_most_goes_without(make_rig):
    rig = make(make_rig)
    counting(rig)
    long, short = rig.add(prompt(FULL - 500), 600), rig.add(prompt(600, 7), 600)
    lookup = rig.scheduler._sequences[long].sources.sources[0]
    for _ in range(20):
        drafting(rig)
        memory(rig)
    assert (names(rig, long), names(rig, short)) == ((), ("suffix",))
    assert lookup.proposer is None
    assert memory(rig).drops == LookupDrops(num_suffix=1, num_full=1)
    assert drafting(rig) == {short}
    rig.scheduler.set_speculation(rig.scheduler.speculation)
    assert names(rig, long) == (), "it would begin anew, and be dropped again"
    rig.run()
    assert [len(rig.out[each]) for each in (long, short)] == [600, 600]
    assert memory(rig)._held_bytes == 0
    rig.check_clean()


def test_it_may_be_the_one_that_asks(make_rig):
    rig = make(make_rig)
    counting(rig)
    session_id = rig.add(prompt(FULL + 100), 40)
    rig.run()
    assert len(rig.out[session_id]) == 40
    assert memory(rig).drops.num_suffix == 1
    assert {delta.source for delta in rig.deltas[session_id]} == {""}


def test_of_two_lookups_of_a_sequence_the_larger_goes(make_rig):
    """At three lengths of runs the index of `ngram` takes 768 bytes a token."""
    rig = make(make_rig, "auto")
    counting(rig)
    session_id = rig.add(prompt(FULL // 2), 20)
    for _ in range(4):
        drafting(rig)
    assert names(rig, session_id) == ("model", "suffix")
    assert memory(rig).drops == LookupDrops(num_ngram=1, num_full=1)


def test_outputs_are_learnt_only_while_there_is_room(make_rig):
    """They push out older ones, and no sequence."""
    rig = make(make_rig, suffix_decoding_max_cached_tokens=100_000)
    counting(rig)
    for first in range(6):
        rig.add(prompt(3, first), 600)
        rig.run()
    session_id = rig.add(prompt(1000), 400)
    while rig.scheduler.num_running:
        drafting(rig)
        memory(rig)
    drops = memory(rig).drops
    assert drops.num_recent > 0
    assert drops.num_suffix == 0
    assert sum(delta.source == "suffix" for delta in rig.deltas[session_id]) > 50


def test_who_ends_or_asks_otherwise_gives_back(make_rig):
    rig = make(make_rig)
    counting(rig)
    ids = [rig.add(prompt(400, number), 200) for number in range(3)]
    for _ in range(4):
        drafting(rig)
    before = memory(rig)._held_bytes
    rig.scheduler.abort(ids[0])
    assert 0 < memory(rig)._held_bytes < before
    rig.scheduler.set_speculation(SpeculationConfig(method="model"))
    assert memory(rig)._held_bytes == 0


def test_a_proposer_that_fails_gives_back(make_rig):
    rig = make(make_rig)
    made = counting(rig)
    session_id = rig.add(prompt(400), 200)
    for _ in range(4):
        drafting(rig)
    made[session_id].token = INFO.vocab_size
    drafting(rig)
    assert memory(rig)._held_bytes == 0


def test_a_smaller_limit_holds_for_those_in_progress(make_rig):
    rig = make(make_rig, max_lookup_memory_mib=2)
    counting(rig)
    ids = [rig.add(prompt(1500 + number), 200) for number in range(3)]
    for _ in range(10):
        drafting(rig)
    assert memory(rig).drops.num_full == 0
    speculation = rig.scheduler.speculation.model_copy(update={"max_lookup_memory_mib": 1})
    rig.scheduler.set_speculation(speculation)
    drafting(rig)
    assert [names(rig, each) for each in ids] == [("suffix",), (), ()]
    memory(rig)


def test_outputs_that_are_not_learnt_are_counted(make_rig, monkeypatch):
    monkeypatch.setattr("paceline.proposers.recent_outputs.MAX_PENDING_TOKENS", 50)
    rig = make_rig()
    for _ in range(3):
        rig.add((1, 2, 3), 40, method="suffix")
    rig.run()
    assert memory(rig).drops.num_unlearnt == 2


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.usefixtures("small")
def test_no_text_is_changed_by_it(make_rig, seed):
    """Real proposers, 40 tokens for all of them: whoever grows, somebody gives way."""
    rig = make_rig(
        info=replace(INFO, num_blocks=512),
        speculation={"method": "auto", "max_lookup_memory_mib": 2},
    )
    rig.add_draft(1, error_rate=0.3)
    wanted = {}
    for number in range(12):
        text = (*range(1, 5 + number), *range(1, 5))
        session_id = rig.add(text, 30, seed=seed)
        wanted[session_id] = rig.oracle(text, 30, seed=seed)
        rig.draft(1)
        rig.step()
        memory(rig)
    rig.run(2)
    assert rig.out == wanted
    drops = memory(rig).drops
    assert drops.num_ngram > 2
    assert drops.num_suffix > 0
    rig.check_clean()


class TestLearning:
    """Of outputs, beside sequences that have all but some tokens of the memory."""

    def memory(self, num_free, *outputs):
        config = SpeculationConfig(max_lookup_memory_mib=1)
        found = LookupMemory(config)
        found._held_bytes = found.max_bytes - num_free * MAX_TOKEN_BYTES
        for output in outputs:
            found.recent.put_off(output)
        return found

    def test_no_more_than_there_is_room_for(self):
        """Of a longer one the end: two trees shall have room."""
        found = self.memory(10, range(100))
        assert found.learn(50) == 4
        assert (found.recent.num_tokens, found.recent.num_pending) == (5, 0)

    def test_older_outputs_make_room_for_newer_ones(self):
        """And never the one that is learnt for itself: what it has grows."""
        found = self.memory(1000)
        num_tokens = []
        for _ in range(5):
            found.recent.put_off(range(600))
            while found.learn(128):
                num_tokens.append(found.recent.num_tokens)
                assert found.num_bytes <= found.max_bytes
        assert num_tokens[:8] == [129, 257, 385, 500, 629, 757, 885, 1000]
        assert min(num_tokens[4:]) == 629
        assert num_tokens[-1] == 1000
        assert found.drops == LookupDrops(num_recent=3, num_full=3)

    def test_the_rest_waits_while_sequences_take_the_room(self):
        found = self.memory(100, range(45))
        assert found.learn(20) == 20
        found._held_bytes += 70 * MAX_TOKEN_BYTES
        assert (found.learn(60), found.recent.num_pending) == (9, 16)
        assert found.learn(60) == 0
        found._held_bytes -= 70 * MAX_TOKEN_BYTES
        assert (found.learn(60), found.recent.num_tokens) == (16, 46)
        assert found.drops == LookupDrops()

    def test_waiting_is_no_reason_to_count_the_limit(self):
        found = self.memory(0, *[range(300)] * 3)
        assert {found.learn(256) for _ in range(100)} == {0}
        assert found.drops == LookupDrops()

    def test_an_output_that_is_lost_while_it_is_learnt_is_counted(self):
        found = self.memory(1000, range(400), range(10))
        found.learn(100)
        found._held_bytes = found.max_bytes
        found.enforce()
        assert (found.recent.num_tokens, found.recent.num_pending) == (0, 10)
        assert found.drops == LookupDrops(num_unlearnt=1, num_recent=1, num_full=1)

    def test_their_ends_count(self):
        found = self.memory(10, *((number,) for number in range(10)))
        assert found.learn(10) == 10
        assert found.num_bytes <= found.max_bytes


def test_a_text_that_is_dropped_while_it_is_learnt_is_told_no_more(make_rig):
    """Of three long prompts that are learnt in turn, one goes, and keeps nothing."""
    rig = make(make_rig)
    made = counting(rig)
    ids = [rig.add(prompt(1200 + number), 60) for number in range(3)]
    for _ in range(8):
        drafting(rig)
        memory(rig)
    assert sorted(names(rig, each) for each in ids) == [(), ("suffix",), ("suffix",)]
    assert set(made) == set(ids)


def test_nothing_to_learn_is_no_reason_to_forget():
    found = LookupMemory(SpeculationConfig(max_lookup_memory_mib=1))
    assert found.learn(100) == 0
    assert found.drops == LookupDrops()


@pytest.mark.parametrize("is_broken", [False, True], ids=["a new one", "a broken one"])
@pytest.mark.parametrize("length", range(80, 92))
def test_a_lookup_that_is_dropped_while_another_proposes_stays_away(
    make_rig, monkeypatch, length, is_broken
):
    """`suffix` grows over the limit, by the same text's `ngram`, whose turn would be next."""
    both_bytes = MAX_TOKEN_BYTES + 3 * MAX_RUN_BYTES
    monkeypatch.setattr("paceline.target.lookup_memory._MIB", 104 * both_bytes)
    rig = make(make_rig, "auto")
    made, real = [], rig.scheduler.local._proposer

    def proposer(sequence, name):
        made.append(name)
        if is_broken and made.count(name) > 1:
            raise MemoryError
        return real(sequence, name)

    rig.scheduler.local._proposer = proposer
    rig.add(prompt(length), 60)
    while rig.scheduler.num_running:
        drafting(rig)
        memory(rig)
    assert sorted(made) == ["ngram", "suffix"]
    assert memory(rig).drops.num_ngram == 1
