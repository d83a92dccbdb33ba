"""What a draft says of itself, and that the policy understands every word of it."""

from __future__ import annotations

from ray.serve._private.common import TimeStampedValue

from paceline.autoscaling.reports import DraftLoad, Reports, draft_load
from paceline.draft.autoscaling_stats import table_stats
from paceline.protocol.draft_session import WorkResult
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.messages import OpenSession
from paceline.sampling.params import SamplingParams, VerificationMode

GREEDY = SamplingParams(temperature=0)


def test_the_policy_reads_it():
    table = DraftTable(max_sessions=8, max_len=100, session_idle_us=1000)
    stats = [table_stats(table)]
    for session_id in (1, 2, 3):
        opening = OpenSession(session_id, 1, 3, (1, 2, 3), GREEDY, VerificationMode.GREEDY, 19)
        table.receive(1, opening, 0)
    for _ in range(4):
        items = table.begin_pass(100)
        results = [WorkResult(50, item.work.end) for item in items]
        table.end_pass(items, results, 150_000)
    stats.append(table_stats(table))
    assert all(type(value) in (int, float) for value in stats[1].values()), "Serve wants those"
    points = {
        name: {0: [TimeStampedValue(2 * i, one[name]) for i, one in enumerate(stats)]}
        for name in stats[0]
    }
    assert draft_load(Reports(points, 0)) == DraftLoad(1.5, 8, 4 * 0.150 / 2, 12 / 2, 150.0)
