"""What a draft counts, as a snapshot of the catalog's metrics. Reads, changes nothing; no clock."""

from __future__ import annotations

from paceline.metrics import draft_catalog as catalog
from paceline.metrics.metric import Role
from paceline.metrics.process import COUNTS
from paceline.metrics.snapshot import Snapshot
from paceline.protocol.draft_table import DraftTable

_US = 1e6


def draft_snapshot(table: DraftTable, num_connected: int) -> Snapshot:
    """`num_connected`: targets with a live stream."""
    stats = table.stats
    snapshot = Snapshot(Role.DRAFT)
    put = snapshot.put
    put(catalog.PASSES, stats.num_passes)
    put(catalog.BUSY_SECONDS, stats.busy_us / _US)
    put(catalog.PASS_SECONDS, stats.pass_s)
    put(catalog.TOKENS, stats.num_drafted_tokens)
    put(catalog.BRANCHES, stats.num_branches)
    put(catalog.BRANCH_TOKENS, stats.num_branch_tokens)
    put(catalog.PROMOTIONS, stats.num_promoted)
    put(catalog.REWINDS, stats.num_rewinds)
    put(catalog.DROPPED_TOKENS, stats.num_dropped_tokens)
    put(catalog.NACKS, stats.num_nacks)
    opens = {
        "ok": stats.num_opened,
        "busy": stats.num_busy,
        "unsupported": stats.num_unsupported,
    }
    snapshot.put_each(catalog.OPENS, opens)
    lost = {
        "expired": stats.num_expired,
        "evicted": stats.num_evicted,
        "poisoned": stats.num_poisoned,
    }
    snapshot.put_each(catalog.LOST, lost)
    limits = {
        "draft.max_sessions": stats.num_busy,
        "draft.session_idle_s": stats.num_expired,
    }
    snapshot.put_each(catalog.LIMITS_HIT, limits)
    put(catalog.SESSIONS, len(table))
    put(catalog.MAX_SESSIONS, table.max_sessions)
    put(catalog.CONNECTED, num_connected)
    COUNTS.fill(snapshot)
    return snapshot
