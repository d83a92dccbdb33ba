"""What a replica remembers of its outputs: whose they are, for how long, in how many bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.proposers.recent_outputs import MAX_NAMESPACES, RecentOutputs
from paceline.proposers.suffix import MAX_TOKEN_BYTES, SuffixProposer
from tests.unit.proposers.texts import HARD, bytes_kept

OUTPUT = (1, 2, 3, 4, 5, 6)


def proposes(recent: RecentOutputs, *token_ids: int, salt: str = "", adapter: str = "") -> object:
    proposer = SuffixProposer(8, 1.0, 0.1, recent, salt, adapter)
    proposer.extend(token_ids)
    return proposer.propose(8)


def test_another_request_goes_on_like_a_former_one() -> None:
    recent = RecentOutputs(100, 8)
    assert proposes(recent, 9, 2, 3) == ()
    recent.add(OUTPUT)
    assert proposes(recent, 9, 2, 3) == (4, 5)


def test_the_end_of_an_output_is_no_guess() -> None:
    recent = RecentOutputs(100, 8)
    recent.add((1, 2, 3))
    recent.add((7, 8, 9))
    assert proposes(recent, 2, 3) == ()
    assert proposes(recent, 1, 2) == (3,)


def test_own_text_wins_unless_more_is_expected() -> None:
    recent = RecentOutputs(100, 8)
    recent.add((1, 2, 3))
    assert proposes(recent, 2, 7, 2) == (7,)
    assert proposes(recent, 2, 7, 1, 2) == (7,)
    recent.add(OUTPUT)
    assert proposes(recent, 2, 7, 1, 2) == (3, 4)


@pytest.mark.parametrize(("salt", "adapter"), [("b", ""), ("", "x"), ("b", "x"), ("", "")])
def test_nothing_of_another_cache_salt_or_adapter(salt: str, adapter: str) -> None:
    recent = RecentOutputs(100, 8)
    recent.add(OUTPUT, "a", "x")
    assert proposes(recent, 1, 2, salt=salt, adapter=adapter) == ()
    assert proposes(recent, 1, 2, salt="a", adapter="x") == (3, 4)


def test_the_oldest_go_first() -> None:
    """Four outputs of four tokens and their ends in 22 tokens: two trees of two outputs."""
    recent = RecentOutputs(22, 8)
    for number in range(4):
        recent.add(range(10 * number, 10 * number + 4))
    assert recent.num_tokens == 20
    assert [proposes(recent, 10 * number) for number in range(4)] == [(1,), (11,), (21,), (31,)]
    recent.add(range(40, 44))
    assert recent.num_tokens <= 22
    starts = [proposes(recent, 10 * number) for number in range(5)]
    assert starts == [(), (), (21,), (31,), (41,)]


def test_of_a_long_output_the_end() -> None:
    recent = RecentOutputs(22, 8)
    recent.add(range(100))
    assert recent.num_tokens == 11
    assert proposes(recent, 89) == ()
    assert proposes(recent, 90) == (91,)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_too_small_for_anything(max_tokens: int) -> None:
    recent = RecentOutputs(max_tokens, 8)
    recent.add(OUTPUT)
    assert recent.num_tokens == 0


def test_nothing_was_said() -> None:
    recent = RecentOutputs(100, 8)
    recent.add(())
    assert recent.num_tokens == 0


def test_what_is_put_off_is_learnt_a_part_at_a_time() -> None:
    """Two outputs of six tokens, five at a time; a run across two parts is one run."""
    recent = RecentOutputs(100, 8)
    recent.put_off(OUTPUT)
    recent.put_off(range(11, 17), "b")
    assert (recent.num_pending, recent.num_tokens) == (len(OUTPUT) + 6, 0)
    told = []
    while recent.num_pending:
        told.append(recent.learn(4))
    assert sum(told) == len(OUTPUT) + 6
    assert max(told) == 4
    assert recent.learn(4) == 0
    assert recent.num_tokens == len(OUTPUT) + 6 + 2
    assert proposes(recent, OUTPUT[2], OUTPUT[3]) == OUTPUT[4:6]
    assert proposes(recent, 14, salt="b") == (15,)
    assert recent.num_unlearnt == 0


def test_outputs_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes, in part learnt or not, and nothing follows on it."""
    monkeypatch.setattr("paceline.proposers.recent_outputs.MAX_PENDING_TOKENS", 12)
    recent = RecentOutputs(1000, 8)
    recent.put_off(range(5))
    recent.learn(3)
    for number in range(1, 4):
        recent.put_off(range(10 * number, 10 * number + 5))
    assert (recent.num_unlearnt, recent.num_pending) == (2, 10)
    recent.learn(100)
    assert [proposes(recent, first) for first in (0, 2, 10, 20, 30)] == [
        (1,),
        (),
        (),
        (21,),
        (31,),
    ]
    recent.put_off(range(100, 200))
    assert recent.num_pending == 100  # one is never too long


def test_namespaces_are_bounded() -> None:
    """The one that was told longest ago goes, not the one that came first."""
    recent = RecentOutputs(100, 8)
    for number in range(MAX_NAMESPACES):
        recent.add(OUTPUT, f"salt {number}")
    recent.add(OUTPUT, "salt 0")
    recent.add(OUTPUT, "another")
    assert proposes(recent, 2, salt="salt 0") == (3,)
    assert proposes(recent, 2, salt="salt 1") == ()
    assert proposes(recent, 2, salt="salt 2") == (3,)
    assert recent.num_tokens == (MAX_NAMESPACES + 1) * (len(OUTPUT) + 1)


def test_the_oldest_half_of_who_was_told_longest_ago_is_forgotten() -> None:
    recent = RecentOutputs(22, 8)
    recent.add(range(90, 94), "other")
    for number in range(4):
        recent.add(range(10 * number, 10 * number + 4), "mine")
    told = []
    while recent.forget_oldest():
        starts = [proposes(recent, 10 * number, salt="mine") for number in (0, 2)]
        told.append((recent.num_tokens, *starts))
    assert told == [(20, (1,), (21,)), (10, (), (21,)), (0, (), ())]
    recent.add(OUTPUT, "mine")
    assert proposes(recent, 2, salt="mine") == (3,)


def test_an_output_that_is_being_learnt_is_forgotten_with_its_tree() -> None:
    recent = RecentOutputs(100, 8)
    recent.put_off(range(20))
    recent.put_off(OUTPUT)
    recent.learn(8)
    assert recent.forget_oldest()
    assert (recent.num_pending, recent.num_unlearnt) == (len(OUTPUT), 1)
    recent.learn(100)
    assert recent.num_tokens == len(OUTPUT) + 1


def test_a_smaller_room_has_two_trees_as_well() -> None:
    recent = RecentOutputs(1000, 8)
    for number in range(4):
        recent.put_off(range(10 * number, 10 * number + 5), str(number % 2))
        while recent.learn(2, room=12):
            assert recent.num_tokens <= 12
    starts = [proposes(recent, 10 * number, salt=str(number % 2)) for number in range(4)]
    assert starts == [(), (), (21,), (31,)]
    assert (recent.num_tokens, recent.num_forgotten, recent.num_unlearnt) == (12, 2, 0)


@pytest.mark.parametrize("room", [0, 3])
def test_outputs_wait_for_a_room(room: int) -> None:
    recent = RecentOutputs(1000, 8)
    recent.put_off(OUTPUT)
    assert recent.learn(100, room) == 0
    assert recent.num_pending == len(OUTPUT)
    assert recent.learn(100, 14) == len(OUTPUT)


def test_a_new_start() -> None:
    recent = RecentOutputs(100, 8)
    recent.add(OUTPUT)
    recent.put_off(OUTPUT)
    recent.put_off(OUTPUT)
    recent.learn(3)
    recent.restart(12, 3)
    assert (recent.num_tokens, recent.num_pending, recent.num_unlearnt) == (0, 0, 2)
    recent.add(range(10))
    assert recent.num_tokens == 6
    assert proposes(recent, 5, 6) == (7, 8)


@pytest.mark.parametrize("size", [1, 200])
@pytest.mark.parametrize("make", HARD)
def test_no_text_takes_more_memory_than_stated(make: Callable[[], list[int]], size: int) -> None:
    """Outputs of any size, more of them than are kept, in the worst place for a table's growth."""
    text, max_tokens = make()[-2_400:], 1_000

    def build() -> RecentOutputs:
        recent = RecentOutputs(max_tokens, 24)
        for start in range(0, len(text), size):
            recent.add(text[start : start + size])
        assert recent.num_tokens <= max_tokens
        return recent

    assert bytes_kept(build) <= max_tokens * MAX_TOKEN_BYTES
