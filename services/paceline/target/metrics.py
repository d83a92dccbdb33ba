"""What a target counts, as a snapshot of the catalog's metrics. Reads, changes nothing; no clock.

Made with each heartbeat, never in a pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.metrics import target_catalog as catalog
from paceline.metrics.metric import Role
from paceline.metrics.process import COUNTS
from paceline.metrics.snapshot import Snapshot
from paceline.protocol.lookahead import Explanation
from paceline.target.scheduler import Scheduler

_US = 1e6


def target_snapshot(
    scheduler: Scheduler, rtt_us: Mapping[str, int], explanation: Explanation | None
) -> Snapshot:
    """`rtt_us` by draft replica; `explanation` is the policy's last decision."""
    snapshot = Snapshot(Role.TARGET)
    _put_speculation(snapshot, scheduler)
    _put_policy(snapshot, scheduler, explanation)
    _put_passes(snapshot, scheduler)
    _put_requests(snapshot, scheduler)
    _put_limits(snapshot, scheduler)
    _put_drafts(snapshot, scheduler, rtt_us)
    COUNTS.fill(snapshot)
    return snapshot


def kv_usage(scheduler: Scheduler) -> float:
    """Share of the KV blocks that running texts take or are promised."""
    num_blocks = scheduler.info.num_blocks
    return min(1.0, max(0.0, 1.0 - scheduler.num_free_blocks / num_blocks))


def _put_speculation(snapshot: Snapshot, scheduler: Scheduler) -> None:
    stats = scheduler.stats
    put = snapshot.put
    put(catalog.ROUNDS, stats.num_rounds)
    put(catalog.PLAIN_ROUNDS, stats.num_plain_rounds)
    put(catalog.REJECTED_ROUNDS, stats.num_rejected_rounds)
    put(catalog.NUM_DRAFTS, stats.num_rounds - stats.num_plain_rounds)
    put(catalog.NUM_DRAFT_TOKENS, stats.num_draft_tokens)
    put(catalog.NUM_ACCEPTED_TOKENS, stats.num_accepted_tokens)
    most = scheduler.policy.limits.max_num_speculative_tokens
    for position, count in enumerate(stats.accepted_per_pos):
        if count or position < most:
            put(catalog.ACCEPTED_PER_POS, count, str(position))
    _put_sources(snapshot, scheduler)
    put(catalog.K_CHOSEN, stats.chosen)
    num_dropped = scheduler.drafts.counts["dropped_tokens"]
    put(catalog.WASTED_TOKENS, stats.num_unused_tokens + num_dropped)
    put(catalog.LONE_HOLDS, stats.num_holds)


def _put_sources(snapshot: Snapshot, scheduler: Scheduler) -> None:
    for source, counts in scheduler.stats.by_source.items():
        for metric, count in (
            (catalog.DRAFTS_PER_SOURCE, counts.num_rounds),
            (catalog.DRAFT_TOKENS_PER_SOURCE, counts.num_draft_tokens),
            (catalog.ACCEPTED_PER_SOURCE, counts.num_accepted_tokens),
            (catalog.CHOSEN_PER_SOURCE, counts.num_chosen),
            (catalog.EXPLORED_PER_SOURCE, counts.num_explored),
            (catalog.FAILURES_PER_SOURCE, counts.num_failures),
        ):
            snapshot.put(metric, count, source)
    local, drops = scheduler.local, scheduler.local.memory.drops
    snapshot.put(catalog.LOOKUP_TRIALS, local.num_trials)
    snapshot.put(catalog.LOOKUP_MEMORY, local.memory.num_bytes)
    dropped = {
        "unlearnt_output": drops.num_unlearnt,
        "recent_outputs": drops.num_recent,
        "ngram": drops.num_ngram,
        "suffix": drops.num_suffix,
    }
    snapshot.put_each(catalog.LOOKUP_DROPPED, dropped)


def _put_policy(snapshot: Snapshot, scheduler: Scheduler, explanation: Explanation | None) -> None:
    policy, put = scheduler.policy, snapshot.put
    starvation, forecast = policy.starvation(), policy.forecast
    put(catalog.MAX_K, policy.limits.max_num_speculative_tokens)
    put(catalog.WANTED_TOKENS, starvation.wanted)
    put(catalog.MISSING_TOKENS, starvation.missing)
    put(catalog.PREDICTED_TOKENS, forecast.tokens)
    put(catalog.PREDICTED_SECONDS, forecast.us / _US)
    put(catalog.MEASURED_TOKENS, forecast.num_committed)
    put(catalog.MEASURED_SECONDS, forecast.took_us / _US)
    measured = policy.profit.deal.gain or 0.0
    gains = {"predicted": _predicted_gain(explanation), "measured": measured}
    snapshot.put_each(catalog.GAIN, gains)
    snapshot.put_state(catalog.SPECULATION_STATE, policy.profit.deal.state.value)


def _predicted_gain(explanation: Explanation | None) -> float:
    """Tokens per time of the K in force over those of K = 0; 0: not known."""
    if explanation is None or not explanation.choices:
        return 0.0
    plain = explanation.choices[0]
    chosen = explanation.choices[min(explanation.chosen, len(explanation.choices) - 1)]
    if plain.num_speculative_tokens or not (plain.tokens_per_pass and chosen.pass_us):
        return 0.0
    return (chosen.tokens_per_pass / chosen.pass_us) / (plain.tokens_per_pass / plain.pass_us)


def _put_passes(snapshot: Snapshot, scheduler: Scheduler) -> None:
    stats, put = scheduler.stats, snapshot.put
    put(catalog.PASSES, stats.num_passes)
    put(catalog.FAILED_PASSES, stats.num_failed_passes)
    put(catalog.BUSY_SECONDS, stats.busy_us / _US)
    put(catalog.PASS_SECONDS, stats.pass_s)
    put(catalog.PASS_ROWS, stats.pass_rows)
    put(catalog.TARGET_TOKENS, stats.num_committed_tokens)
    put(catalog.KV_USAGE, kv_usage(scheduler))
    put(catalog.KV_BLOCKS, scheduler.info.num_blocks)
    put(catalog.PREFIX_QUERIES, stats.num_prefill_rows + stats.num_prefix_tokens)
    put(catalog.PREFIX_HITS, stats.num_prefix_tokens)
    put(catalog.PREEMPTIONS, stats.num_preemptions)


def _put_requests(snapshot: Snapshot, scheduler: Scheduler) -> None:
    stats = scheduler.stats
    snapshot.put(catalog.RUNNING, scheduler.num_running)
    snapshot.put(catalog.WAITING, scheduler.num_waiting)
    snapshot.put(catalog.QUEUE_TIME, stats.queue_s)
    ended = {
        "finished": stats.num_finished,
        "aborted": stats.num_aborted,
        "failed": stats.num_failed,
        "queue_timeout": stats.num_queue_timeouts,
    }
    snapshot.put_each(catalog.ENDED, ended)


def _put_limits(snapshot: Snapshot, scheduler: Scheduler) -> None:
    stats, counts = scheduler.stats, scheduler.drafts.counts
    limits = {
        "target.max_queued_seqs": stats.num_refused,
        "target.max_queue_s": stats.num_queue_timeouts,
        "target.kv_blocks": stats.num_short_plans,
        "rpc.open_timeout_s": counts["open_timeout"],
        "rpc.stall_timeout_s": counts["stalled"],
        "rpc.max_reopens": counts["gave_up"],
        "rpc.max_remote_errors": counts["outlawed"],
        "rpc.breaker_failures": counts["dark"] - counts["outlawed"],
        "draft.max_sessions": counts["busy"],
        "message_allowance": counts["flood"],
        "speculation.max_lookup_memory_mib": scheduler.local.memory.drops.num_full,
    }
    snapshot.put_each(catalog.TARGET_LIMITS, limits)


def _put_drafts(snapshot: Snapshot, scheduler: Scheduler, rtt_us: Mapping[str, int]) -> None:
    desk = scheduler.drafts
    counts = desk.counts
    snapshot.put(catalog.DRAFT_LINKS, len(desk.pool))
    snapshot.put_each(catalog.LINK_EVENT, counts)
    snapshot.put_each(catalog.SESSION_EVENT, counts)
    snapshot.put_each(catalog.MESSAGES, counts)
    snapshot.put(catalog.REOPENS, counts["reopened"])
    for draft, round_trip_us in sorted(rtt_us.items()):
        snapshot.put(catalog.RTT, round_trip_us / _US, draft)
    num_sessions: dict[str, int] = {}
    for link in desk.pool.links().values():
        name = link.hello.replica_id
        num_sessions[name] = num_sessions.get(name, 0) + len(link.sessions)
    for name, number in sorted(num_sessions.items()):
        snapshot.put(catalog.LINK_SESSIONS, number, name)
    for name, state in sorted(desk.pool.breaker_states().items()):
        snapshot.put_state(catalog.BREAKER_STATE, state, name)
