"""What a target says of itself, and that the policy understands every word of it."""

from __future__ import annotations

from ray.serve._private.common import TimeStampedValue

from paceline.autoscaling.reports import Reports, target_load
from paceline.target.autoscaling_stats import scheduler_stats

LONG = tuple(range(1, 41))


def reports_of(*stats):
    """What Serve makes of them: one a second, of replica 0."""
    names = stats[0].keys()
    points = {n: [TimeStampedValue(t, s[n]) for t, s in enumerate(stats)] for n in names}
    return Reports({name: {0: series} for name, series in points.items()}, 0)


class TestGauges:
    def test_an_idle_target(self, make_rig):
        stats = scheduler_stats(make_rig().scheduler)
        gauges = ("num_running", "num_waiting", "kv_share", "num_wanting_draft")
        assert [stats[name] for name in gauges] == [0, 0, 0, 0]
        assert all(type(value) in (int, float) for value in stats.values()), "Serve wants those"

    def test_running_waiting_and_blocks(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 2})
        for _ in range(3):
            rig.add(LONG, 20)
        stats = scheduler_stats(rig.scheduler)
        assert (stats["num_running"], stats["num_waiting"]) == (2, 1)
        assert stats["kv_share"] == 2 * 3 / 64, "promised from the start: 40 tokens are 3 blocks"
        rig.run()
        assert scheduler_stats(rig.scheduler)["kv_share"] == 0

    def test_who_wants_a_draft_and_who_has_none(self, make_rig):
        rig = make_rig()
        rig.add_draft(1, hello_sessions=2)
        for _ in range(3):
            rig.add(max_tokens=20)
        rig.add(max_tokens=20, method="off")
        rig.draft(1)
        stats = scheduler_stats(rig.scheduler)
        assert stats["num_running"] == 4
        assert (stats["num_wanting_draft"], stats["num_without_draft"]) == (3, 1)
        rig.lose_draft(1)
        assert scheduler_stats(rig.scheduler)["num_without_draft"] == 3

    def test_one_that_no_draft_may_have_any_more_wants_none(self, make_rig):
        rig = make_rig(rpc={"max_reopens": 1})
        rig.add(max_tokens=20)
        assert scheduler_stats(rig.scheduler)["num_wanting_draft"] == 1
        for link_id in (1, 2):
            rig.add_draft(link_id)
            rig.step()
            rig.lose_draft(link_id)
        assert scheduler_stats(rig.scheduler)["num_wanting_draft"] == 0

    def test_the_last_token_needs_no_draft(self, make_rig):
        rig = make_rig()
        rig.add(max_tokens=3)
        wanting = []
        while rig.scheduler.num_running:
            wanting.append(scheduler_stats(rig.scheduler)["num_wanting_draft"])
            rig.step()
        assert wanting == [1, 1, 0]


class TestCounts:
    def test_the_policy_reads_them(self, make_rig):
        rig = make_rig(target={"max_rows_per_pass": 64})
        rig.add_draft(1)
        for _ in range(2):
            rig.add(LONG, 40)
        before = scheduler_stats(rig.scheduler)
        for _ in range(4):
            rig.draft(6)
            rig.step()
        load = target_load(reports_of(before, scheduler_stats(rig.scheduler)))
        counts = rig.scheduler.stats
        assert counts.num_draft_tokens > 0
        assert (load.num_running, load.num_wanting, load.num_unserved) == (2, 2, 0)
        assert load.verified_rate == counts.num_draft_tokens
        busy_share = 4 * 500e-6  # a pass of this rig takes half a millisecond
        assert load.row_share == busy_share * counts.num_rows / (4 * 64)
