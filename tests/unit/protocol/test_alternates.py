"""Proposals of branches: they join by position and context, are bounded, and die with a commit."""

import random

import pytest

from paceline.protocol.alternates import MAX_ALTERNATES, Alternates
from paceline.protocol.token_log import TokenLog


def hash_of(*token_ids):
    return TokenLog(token_ids).hash_at(len(token_ids))


def put(alternates, context, *token_ids):
    return alternates.put(len(context), hash_of(*context), token_ids)


def take(alternates, *context):
    return alternates.take(len(context), hash_of(*context))


def test_nothing():
    alternates = Alternates()
    assert len(alternates) == 0
    assert take(alternates, 1, 2) == []


def test_it_is_found_by_its_context_alone():
    alternates = Alternates()
    assert put(alternates, (1, 2, 9), 10, 11) == 2
    assert take(alternates, 1, 2, 8) == []
    assert take(alternates, 1, 2) == []
    assert take(alternates, 2, 2, 9) == []
    assert take(alternates, 1, 2, 9) == [10, 11]


def test_the_same_hash_at_another_position_is_another_context():
    alternates = Alternates()
    put(alternates, (1, 2), 10)
    assert alternates.take(3, hash_of(1, 2)) == []


def test_what_is_taken_is_gone():
    alternates = Alternates()
    put(alternates, (1, 2), 10, 11)
    assert take(alternates, 1, 2) == [10, 11]
    assert len(alternates) == 0
    assert take(alternates, 1, 2) == []


def test_a_later_message_goes_on():
    alternates = Alternates()
    put(alternates, (1, 2), 10)
    put(alternates, (1, 2, 10), 11, 12)
    assert take(alternates, 1, 2) == [10, 11, 12]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_and_the_cuts_of_messages_do_not_matter(seed):
    rng = random.Random(seed)
    text, pieces, start = (1, 2, 5, 6, 7, 8, 9, 10), [], 2
    while start < len(text):
        end = min(len(text), start + rng.randrange(1, 4))
        pieces.append((text[:start], text[start:end]))
        start = end
    pieces.append((text[:3], text[3:5]))  # and one twice
    rng.shuffle(pieces)
    alternates = Alternates()
    for context, token_ids in pieces:
        put(alternates, context, *token_ids)
    assert take(alternates, 1, 2) == list(text[2:])


def test_behind_a_gap_nothing_is_taken():
    alternates = Alternates()
    put(alternates, (1, 2), 10)
    put(alternates, (1, 2, 10, 11), 12)
    assert take(alternates, 1, 2) == [10]
    assert take(alternates, 1, 2, 10, 11) == [12]


def test_many_branches_of_one_position():
    alternates = Alternates()
    for runner_up in (7, 8, 9):
        put(alternates, (1, runner_up), 10 * runner_up)
    assert take(alternates, 1, 8) == [80]
    assert [take(alternates, 1, r) for r in (7, 9)] == [[70], [90]]


def test_a_duplicate_is_not_new():
    alternates = Alternates()
    assert put(alternates, (1, 2), 10, 11) == 2
    assert put(alternates, (1, 2), 10) == 0
    assert put(alternates, (1, 2, 10), 11) == 0
    assert put(alternates, (1, 2), 10, 11, 12) == 1


def test_of_two_continuations_the_newer_stays():
    alternates = Alternates()
    put(alternates, (1, 2), 10, 11)
    assert put(alternates, (1, 2), 20) == 1
    assert take(alternates, 1, 2) == [20]


def test_what_is_committed_is_dropped():
    alternates = Alternates()
    put(alternates, (1, 2), 10, 11, 12)
    alternates.drop_before(3)
    assert len(alternates) == 2
    assert take(alternates, 1, 2) == []
    assert take(alternates, 1, 2, 10) == [11, 12]


def test_clear():
    alternates = Alternates()
    put(alternates, (1, 2), 10)
    alternates.clear()
    assert (len(alternates), take(alternates, 1, 2)) == (0, [])


class TestBound:
    def test_full(self):
        alternates = Alternates()
        put(alternates, (1, 2), *range(MAX_ALTERNATES))
        assert (len(alternates), alternates.num_evicted) == (MAX_ALTERNATES, 0)

    def test_the_oldest_gives_way(self):
        alternates = Alternates()
        for branch in range(MAX_ALTERNATES + 3):
            put(alternates, (1, branch), 1000 + branch)
        assert (len(alternates), alternates.num_evicted) == (MAX_ALTERNATES, 3)
        assert [take(alternates, 1, branch) for branch in (0, 2)] == [[], []]
        assert take(alternates, 1, 3) == [1003]
        assert take(alternates, 1, MAX_ALTERNATES + 2) == [1000 + MAX_ALTERNATES + 2]

    def test_one_message_longer_than_all(self):
        alternates = Alternates()
        put(alternates, (1, 2), *range(MAX_ALTERNATES + 5))
        assert (len(alternates), alternates.num_evicted) == (MAX_ALTERNATES, 5)

    def test_what_was_said_again_is_young(self):
        """A context that got another continuation is not among the first to go."""
        alternates = Alternates()
        put(alternates, (1, 0), 10)
        for branch in range(1, MAX_ALTERNATES):
            put(alternates, (1, branch), 10)
        put(alternates, (1, 0), 20)
        put(alternates, (1, MAX_ALTERNATES), 10)
        assert take(alternates, 1, 0) == [20]
        assert take(alternates, 1, 1) == []
