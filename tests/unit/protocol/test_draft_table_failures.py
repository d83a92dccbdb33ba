"""A pass of a draft that fails costs at most one sequence its draft, and only if it was alone."""

from paceline.protocol.draft_session import WorkResult
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.messages import CloseReason, CloseSession, OpenSession
from paceline.sampling.params import SamplingParams, VerificationMode

PROMPT = tuple(range(1, 21))


def filled(*keys):
    table = DraftTable(max_sessions=8, max_len=100, session_idle_us=10**9)
    for link_id, session_id in keys:
        opened = OpenSession(
            session_id, 1, 20, PROMPT, SamplingParams(temperature=0), VerificationMode.GREEDY, 24
        )
        table.receive(link_id, opened, 0)
    return table


def keys(items):
    return [item.key for item in items]


def test_each_of_several_is_tried_alone():
    table = filled((1, 5), (1, 6), (2, 5))
    assert table.fail_pass(table.begin_pass(100)) == []
    for key in ((1, 5), (1, 6), (2, 5)):
        items = table.begin_pass(100)
        assert keys(items) == [key]
        assert items[0].work.start == 0, "nothing of the failed pass is in the cache"
        table.end_pass(items, [WorkResult(7)], 0)
    assert len(table.begin_pass(100)) == 3


def test_alone_it_is_the_cause():
    table = filled((1, 5), (2, 6))
    table.fail_pass(table.begin_pass(100))
    first = table.begin_pass(100)
    assert table.fail_pass(first) == [(1, CloseSession(5, 1, CloseReason.ABORTED))]
    assert table.take_released() == [first[0].sequence_id]
    items = table.begin_pass(100)
    assert keys(items) == [(2, 6)]
    table.end_pass(items, [WorkResult(7)], 0)
    assert len(table) == 1
    assert table.stats.num_evicted == 1


def test_a_chunk_of_a_prompt_clears_nobody():
    table = filled((1, 5), (1, 6))
    table.fail_pass(table.begin_pass(100))
    items = table.begin_pass(16)
    assert keys(items) == [(1, 5)]
    table.end_pass(items, [WorkResult(None, cached_len=16)], 0)
    assert keys(table.begin_pass(16)) == [(1, 5)]


def test_who_left_meanwhile_is_nobodys_suspect():
    table = filled((1, 5), (1, 6))
    items = table.begin_pass(100)
    table.receive(1, CloseSession(5, 1, CloseReason.FINISHED), 0)
    assert table.fail_pass(items) == []
    lone = table.begin_pass(100)
    assert keys(lone) == [(1, 6)]
    table.lose_link(1)
    assert table.fail_pass(lone) == []
    assert len(table) == 0
