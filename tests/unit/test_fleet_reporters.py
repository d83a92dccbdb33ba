"""What replicas say of themselves with each heartbeat, and what a target does with the answer."""

import itertools

import pytest

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.draft.fleet_reporter import FleetReporter as DraftReporter
from paceline.engine.base import EngineInfo
from paceline.fleet_reports import (
    Ceilings,
    DraftReport,
    ReportError,
    TargetReport,
    plain_guidance,
)
from paceline.metrics import target_catalog as catalog
from paceline.metrics.catalog import OF_ROLE
from paceline.metrics.metric import Role
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.lookahead import (
    AcceptanceClass,
    Choice,
    ClassCounts,
    Explanation,
    LookaheadPolicy,
    StarvationCounts,
)
from paceline.sampling.params import VerificationMode
from paceline.target.fleet_reporter import CEILINGS_EXPIRE_S, EXPLAIN_EVERY_BEATS, FleetReporter
from paceline.target.scheduler import Scheduler

INFO = EngineInfo("toy", vocab_size=64, max_model_len=512, block_size=16, num_blocks=64)
KIND = AcceptanceClass("toy", VerificationMode.GREEDY, 0.0)
COUNTS = {KIND: ClassCounts((9.0,), (6.0,))}
WHY = Explanation({"rtt_us": 5.0}, (Choice(0, 1, 1.0, 1e4), Choice(6, 7, 3.0, 1e4)), 1, "pays")


class Policy(LookaheadPolicy):
    """Says what the test wants and writes down its guidance."""

    def __init__(self, limits):
        super().__init__(limits)
        self.words = []
        self.why = None

    def class_counts(self):
        return COUNTS

    def starvation(self):
        return StarvationCounts(8.0, 2.0)

    def explain(self):
        return self.why

    def guide(self, guidance):
        self.words.append(guidance)


class Target:
    def __init__(self, **speculation):
        config = SpeculationConfig(**speculation)
        self.scheduler = Scheduler(INFO, TargetConfig(), config, RpcConfig())
        self.policy = self.scheduler.policy = Policy(self.scheduler.policy.limits)
        self.reporter = FleetReporter(self.scheduler, "t", "boot", "host:1")
        self.times = itertools.count(10.0)

    def beat(self):
        return TargetReport.read(self.reporter.report(num_drafts=2, now_s=next(self.times)))


@pytest.fixture
def target():
    return Target(num_speculative_tokens=3, max_num_speculative_tokens=8, max_draft_ahead=12)


def test_what_a_target_says(target):
    target.reporter.config_error = "unknown key x"
    target.scheduler.drafts.counts["busy"] = 4
    report = target.beat()
    assert (report.replica_id, report.boot_id, report.address) == ("t", "boot", "host:1")
    assert (report.num_drafts, report.num_busy) == (2, 4)
    assert report.num_speculative_tokens == 3, "before a decision: the configured"
    limits = (report.max_num_speculative_tokens, report.max_draft_ahead, report.max_fan_out)
    assert limits == (8, 12, 0)
    assert (report.wanted, report.missing) == (8.0, 2.0)
    assert report.class_counts == COUNTS
    assert report.config_error == "unknown key x"


def test_the_k_in_force_is_the_last_decisions(target):
    target.policy.why = WHY
    assert target.beat().num_speculative_tokens == 6


def test_where_k_is_fixed_it_is_the_configured():
    target = Target(lookahead="fixed", num_speculative_tokens=2)
    target.policy.why = WHY  # of the time before
    assert target.beat().num_speculative_tokens == 2


def test_off_is_no_k():
    assert Target(method="off").beat().num_speculative_tokens == 0


def test_the_batch_is_that_since_the_last_beat(target):
    stats = target.scheduler.stats
    stats.num_passes, stats.num_rounds = 10, 25
    assert target.beat().batch == 2.5
    stats.num_passes, stats.num_rounds = 14, 41
    assert target.beat().batch == 4.0
    assert target.beat().batch == 0.0


def test_a_pass_takes_what_those_since_the_last_beat_took(target):
    stats = target.scheduler.stats
    stats.num_passes, stats.busy_us = 10, 250_000
    assert target.beat().pass_ms == 25.0
    stats.num_passes, stats.busy_us = 14, 290_000
    assert target.beat().pass_ms == 10.0
    assert target.beat().pass_ms == 0.0


def test_rates_are_those_since_the_last_beat(target):
    stats = target.scheduler.stats
    first = target.beat()
    assert (first.busy_share, first.tokens_per_s, first.acceptance_rate) == (None, None, None)
    stats.busy_us, stats.num_committed_tokens = 250_000, 30
    stats.num_draft_tokens, stats.num_accepted_tokens = 8, 6
    second = target.beat()
    assert (second.busy_share, second.tokens_per_s, second.acceptance_rate) == (0.25, 30.0, 0.75)
    third = target.beat()
    assert (third.busy_share, third.tokens_per_s, third.acceptance_rate) == (0.0, 0.0, None)


def test_sources_are_shares_of_the_proposals_since_the_last_beat(target):
    counts = target.scheduler.stats.by_source
    assert target.beat().sources == {}
    counts["model"].num_draft_tokens, counts["suffix"].num_draft_tokens = 6, 2
    assert target.beat().sources == {"model": 0.75, "suffix": 0.25}
    counts["suffix"].num_draft_tokens = 5
    assert target.beat().sources == {"suffix": 1.0}
    assert target.beat().sources == {}


def test_every_source_has_its_counts(target):
    counts = target.scheduler.stats.by_source["suffix"]
    counts.num_rounds, counts.num_draft_tokens, counts.num_accepted_tokens = 2, 8, 5
    counts.num_chosen, counts.num_explored, counts.num_failures = 4, 3, 1
    metrics = target.beat().metrics
    families = (
        catalog.DRAFTS_PER_SOURCE, catalog.DRAFT_TOKENS_PER_SOURCE, catalog.ACCEPTED_PER_SOURCE,
        catalog.CHOSEN_PER_SOURCE, catalog.EXPLORED_PER_SOURCE, catalog.FAILURES_PER_SOURCE,
    )  # fmt: skip
    assert [metrics.get(metric, "suffix") for metric in families] == [2, 8, 5, 4, 3, 1]
    assert {metrics.get(m, s) for m in families for s in ("model", "ngram", "medusa")} == {0.0}


def test_what_lookups_remember_try_and_drop(target):
    local = target.scheduler.local
    local._rests.num_trials, local.memory._held_bytes = 4, 900
    drops = local.memory.drops
    drops.num_unlearnt, drops.num_recent, drops.num_ngram, drops.num_suffix = 1, 2, 3, 5
    drops.num_full = 7
    metrics = target.beat().metrics
    assert metrics.get(catalog.LOOKUP_TRIALS) == 4
    assert metrics.get(catalog.LOOKUP_MEMORY) == 900
    dropped = [metrics.get(catalog.LOOKUP_DROPPED, what) for what in catalog.LOOKUP_DROPS]
    assert dropped == [1, 2, 3, 5]
    assert metrics.get(catalog.TARGET_LIMITS, "speculation.max_lookup_memory_mib") == 7


def test_what_is_so_now(target):
    plain = target.reporter.report(1, next(target.times), {"a": 1500, "b": 2500})
    report = TargetReport.read(plain)
    assert (report.rtt_ms, report.kv_cache_usage, report.window) == (2.5, 0.0, 0.0)
    assert (report.speculation_state, report.breakers) == ("drafting", {})
    assert report.metrics.get(catalog.RTT, "a") == 0.0015
    assert report.metrics == target.reporter.snapshot
    assert target.beat().rtt_ms is None


def test_everything_that_is_counted_comes_with_it(target):
    target.scheduler.stats.num_refused = 3
    metrics = target.beat().metrics
    assert metrics.get(catalog.TARGET_LIMITS, "target.max_queued_seqs") == 3
    shown = {metric.name for metric, _, _ in metrics}
    of_links = {catalog.RTT.name, catalog.LINK_SESSIONS.name, catalog.BREAKER_STATE.name}
    assert set(OF_ROLE[Role.TARGET]) - shown == of_links, "there are no drafts"


def test_explanations_come_with_some_beats_only(target):
    target.policy.why = WHY
    sent = [target.beat().explanation for _ in range(2 * EXPLAIN_EVERY_BEATS)]
    assert [why is not None for why in sent] == [True, *[False] * (EXPLAIN_EVERY_BEATS - 1)] * 2
    assert sent[0] == WHY


def test_guidance_goes_to_the_policy_and_ceilings_are_told_back(target):
    target.reporter.hear(plain_guidance(COUNTS, Ceilings(6, None, 4)), 1.0)
    (word,) = target.policy.words
    assert (word.priors, word.max_draft_ahead, word.max_num_speculative_tokens) == (COUNTS, 6, 4)
    assert target.beat().ceilings == Ceilings(6, None, 4), "for a controller that starts anew"


def test_the_last_word_stays_but_its_ceilings_expire(target):
    target.reporter.hear(plain_guidance(COUNTS, Ceilings(6, None, 4)), 1.0)
    target.reporter.expire(1.0 + CEILINGS_EXPIRE_S - 0.1)
    assert len(target.policy.words) == 1
    target.reporter.expire(1.0 + CEILINGS_EXPIRE_S)
    target.reporter.expire(2.0 + CEILINGS_EXPIRE_S)
    assert len(target.policy.words) == 2, "once"
    word = target.policy.words[-1]
    assert (word.priors, word.max_draft_ahead, word.max_num_speculative_tokens) == (
        COUNTS,
        None,
        None,
    )
    assert target.beat().ceilings == Ceilings()


def test_an_answer_that_is_none_changes_nothing(target):
    with pytest.raises(ReportError):
        target.reporter.hear(None, 1.0)
    assert target.policy.words == []


def test_what_a_draft_says():
    table = DraftTable(max_sessions=7, max_len=64, session_idle_us=1)
    reporter = DraftReporter(table, "d", "boot")
    first = DraftReport.read(reporter.report(("host:1",), 10.0))
    assert (first.max_sessions, first.num_sessions, first.connected) == (7, 0, ("host:1",))
    assert (first.is_draining, first.busy_share) == (False, None)
    table.stats.num_drafted_tokens += 30
    table.stats.busy_us += 500_000
    table.stats.num_passes = getattr(table.stats, "num_passes", 0) + 10
    table.is_draining = True
    second = DraftReport.read(reporter.report((), 12.0))
    assert (second.busy_share, second.num_drafted_tokens) == (0.25, 30)
    assert (second.step_ms, second.batch, second.is_draining) == (50.0, 3.0, True)
    assert (first.tokens_per_s, second.tokens_per_s) == (None, 15.0)
    assert set(OF_ROLE[Role.DRAFT]) == {metric.name for metric, _, _ in second.metrics}
    third = DraftReport.read(reporter.report((), 13.0))
    assert (third.busy_share, third.num_drafted_tokens, third.step_ms, third.batch) == (0, 0, 0, 0)
