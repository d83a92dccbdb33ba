"""What a set of runs must have met: one that missed any of it has not tested what it says."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.methods import LOCAL_SOURCES
from paceline.testing.faults import Fault
from paceline.testing.scenario import MESSAGE_KINDS

# So many seeds meet everything below, whichever they are; what is RARE needs ten times as many.
MIN_SEEDS = 2_000

FAULTS = (
    *(f"{fault} {kind}" for fault in ("drop", "duplicate", "delay") for kind in MESSAGE_KINDS),
    *(f"straggle {kind}" for kind in MESSAGE_KINDS),
    "corrupt DraftTokens",
    *Fault,
)
CASES = (
    *("accepted", "rejected", "plain", "rewinds", "lone_holds", "passes"),
    *("kept", "duplicate", "gap", "stale", "diverged", "stale_epoch"),
    *("checked_context", "stale_draft", "stale_verdict", "nack", "remote_error", "outlaw"),
    *("opened", "reopened", "open_timeout", "busy", "given_up", "evicted", "expired"),
    *("out_of_blocks", "preempted", "unfinished_prefills", "prefix_tokens", "cached_prompts"),
    *("groups", "prompt_logprobs", "lawful_accepted", "lawful_rejected"),
    *("failovers", "resumed", "stale_try", "alive", "silence", "quarantined", "no_target"),
    *("refused", "queue_timeout", "engine_errors", "others_turns", "reassigned"),
    *("stalled", "dark", "probed", "restored", "drained", "moved", "recovered"),
    *("rested", "caught_up", "woken", "alternate", "adopted", "alternates_evicted"),
    *("stale_branch", "promoted", "branches_given_up"),
    *(f"{source} {what}" for source in LOCAL_SOURCES for what in ("accepted", "rejected")),
    *("tree_branches", "local_kept_window", "proposer_failed"),
)
RARE = frozenset(
    (
        *("straggle Nack", "straggle Opened", "delay Nack", "duplicate Nack", "drop Nack"),
        *("straggle OpenSession", "delay OpenSession"),
        *("reassigned", "others_turns", "evicted", "expired", "stale_verdict", "given_up"),
        *("lawful_rejected", "moved", "restored"),
    )
)


def missing(num_seeds: int, fired: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """Faults that never fired and cases that were never met, of those that so many seeds must."""
    never = [fault for fault in FAULTS if not fired.get(fault)]
    never += [case for case in CASES if not counts.get(case)]
    if num_seeds < MIN_SEEDS:
        return []
    return [what for what in never if num_seeds >= 10 * MIN_SEEDS or what not in RARE]
