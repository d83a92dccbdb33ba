"""What a target counts: passes, rounds, requests, and its draft links."""

from __future__ import annotations

from paceline.methods import SOURCES
from paceline.metrics.metric import Declare, Metric, Role

# Accepted tokens at this place of a block and behind it are counted together.
MAX_POSITION = 32
K_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PASS_S_BUCKETS = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1,
    0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
QUEUE_S_BUCKETS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip

ENDINGS = ("finished", "aborted", "failed", "queue_timeout")
GAINS = ("predicted", "measured")
SPECULATION_STATES = ("drafting", "control", "open", "half_open")
PROPOSAL_SOURCES = tuple(source for source in SOURCES if source)
BREAKER_STATES = ("closed", "dark", "probing")
LINK_EVENTS = ("attached", "drained", "dark", "outlawed", "probed", "restored")
SESSION_EVENTS = (
    "opened", "reopened", "moved", "open_timeout", "stalled", "given_up", "remote_error",
    "outgrown", "gave_up", "busy", "unsupported", "adopted", "nack", "nack_repeated",
)  # fmt: skip
DISPOSITIONS = (
    "kept", "duplicate", "gap", "stale", "diverged", "stale_epoch", "alternate",
    "unknown_session", "flood",
)  # fmt: skip
# The field of the configuration (or the name in the code) and the counter that says it was hit.
LIMITS = (
    "target.max_queued_seqs", "target.max_queue_s", "target.kv_blocks", "rpc.open_timeout_s",
    "rpc.stall_timeout_s", "rpc.max_reopens", "rpc.max_remote_errors", "rpc.breaker_failures",
    "draft.max_sessions", "message_allowance", "speculation.max_lookup_memory_mib",
)  # fmt: skip
# What is dropped of what lookups remember: outputs that were not learnt to their ends, as too many
# waited or their tree was dropped; for the limit, trees of recent outputs, lookups of sequences.
LOOKUP_DROPS = ("unlearnt_output", "recent_outputs", "ngram", "suffix")

_DESK = "target: scheduler.drafts.counts"
_POOL = "target: scheduler.drafts.pool"
_POLICY = "target: scheduler.policy"
_LOCAL = "target: scheduler.local"


_TARGET = Declare(Role.TARGET, "target: scheduler.stats")
_counter, _gauge, _histogram = _TARGET.counter, _TARGET.gauge, _TARGET.histogram

# -- speculation --------------------------------------------------------------------------------


def _of_source(name: str, what: str, unit: str) -> Metric:
    """A counter with a series for each source of proposals."""
    name = f"{name}_per_source"
    return _counter(name, what, unit, labels=("source",), values=PROPOSAL_SOURCES)


NUM_DRAFTS = _counter(
    "spec_decode_num_drafts", "Rounds that verified proposals, of whatever source.", "rounds"
)
NUM_DRAFT_TOKENS = _counter(
    "spec_decode_num_draft_tokens", "Proposals that were verified.", "tokens"
)
NUM_ACCEPTED_TOKENS = _counter(
    "spec_decode_num_accepted_tokens", "Proposals that were accepted.", "tokens"
)
ACCEPTED_PER_POS = _counter(
    "spec_decode_num_accepted_tokens_per_pos",
    f"Proposals accepted, by their place in the block; {MAX_POSITION}: there and behind.",
    "tokens",
    labels=("position",),
)
DRAFTS_PER_SOURCE = _of_source(
    "spec_decode_num_drafts", "Rounds that verified proposals of this source.", "rounds"
)
DRAFT_TOKENS_PER_SOURCE = _of_source(
    "spec_decode_num_draft_tokens", "Proposals that were verified.", "tokens"
)
ACCEPTED_PER_SOURCE = _of_source(
    "spec_decode_num_accepted_tokens", "Proposals that were accepted.", "tokens"
)
CHOSEN_PER_SOURCE = _of_source(
    "spec_decode_num_chosen",
    "Passes of a sequence in which this was its source, proposals or not; under the method auto "
    "the policy chose it.",
    "passes",
)
EXPLORED_PER_SOURCE = _of_source(
    "spec_decode_num_explored",
    "Those of them in which auto tried it without expecting it to be the best.",
    "passes",
)
FAILURES_PER_SOURCE = _of_source(
    "spec_decode_num_failures",
    "Proposers that raised, each of which its sequence goes on without.",
    "proposers",
)
LOOKUP_TRIALS = _counter(
    "lookup_trials",
    "Trials of lookups that rest, as what they find has not been worth a row.",
    "trials",
    _LOCAL,
)
LOOKUP_MEMORY = _gauge(
    "lookup_memory_bytes",
    "Memory of lookups in use, at most: texts of sequences, and recent outputs.",
    "bytes",
    _LOCAL,
)
LOOKUP_DROPPED = _counter(
    "lookup_drops",
    "What lookups had to drop: outputs not learnt to their ends (unlearnt_output); for want "
    "of memory, trees of recent outputs, and the lookups of sequences, by source.",
    "drops",
    _LOCAL,
    labels=("what",),
    values=LOOKUP_DROPS,
)
ROUNDS = _counter("rounds", "Passes of a sequence that committed tokens.", "rounds")
PLAIN_ROUNDS = _counter(
    "plain_rounds",
    "Rounds without a proposal: the window was empty, or K was 0 (as in the audit's re-runs).",
    "rounds",
)
REJECTED_ROUNDS = _counter(
    "rejected_rounds", "Rounds that rejected a proposal, so that the draft must rewind.", "rounds"
)
MAX_K = _gauge(
    "max_num_speculative_tokens", "Largest K that the configuration allows.", "tokens", _POLICY
)
K_CHOSEN = _histogram(
    "round_num_speculative_tokens", "The K in force, of every round.", "tokens", K_BUCKETS
)
WASTED_TOKENS = _counter(
    "wasted_draft_tokens",
    "Proposals that arrived and were never verified, as the text took another way before them: in "
    "the window, or in stale and diverged messages. Branches that are held count for nothing.",
    "tokens",
)
WANTED_TOKENS = _counter(
    "wanted_draft_tokens",
    "Accepted tokens expected of the windows that the policy would have verified.",
    "tokens",
    _POLICY,
)
MISSING_TOKENS = _counter(
    "missing_draft_tokens", "Those of the wanted that had not arrived in time.", "tokens", _POLICY
)
LONE_HOLDS = _counter(
    "lone_holds", "Times that a lone sequence held its pass for proposals.", "waits"
)
PREDICTED_TOKENS = _counter(
    "predicted_tokens", "Tokens that the policy expected of passes it planned.", "tokens", _POLICY
)
PREDICTED_SECONDS = _counter(
    "predicted_seconds", "Time that the policy expected of the same passes.", "seconds", _POLICY
)
MEASURED_TOKENS = _counter(
    "measured_tokens", "Tokens that those passes committed.", "tokens", _POLICY
)
MEASURED_SECONDS = _counter(
    "measured_seconds", "Time that those passes took, and the wait before.", "seconds", _POLICY
)
GAIN = _gauge(
    "speculation_gain_ratio",
    "Tokens per second with drafting over those without, as the policy predicts and as its "
    "control passes measure it; 0: not known yet.",
    "ratio",
    _POLICY,
    labels=("kind",),
    values=GAINS,
)
SPECULATION_STATE = _gauge(
    "speculation_state",
    "1 for the state of the breaker that compares drafting with control passes.",
    "bool",
    _POLICY,
    labels=("state",),
    values=SPECULATION_STATES,
)

# -- passes and requests ------------------------------------------------------------------------

PASSES = _counter("target_passes", "Forward passes.", "passes")
FAILED_PASSES = _counter("target_failed_passes", "Passes in which the engine raised.", "passes")
BUSY_SECONDS = _counter("target_busy_seconds", "Time that passes took.", "seconds")
PASS_SECONDS = _histogram("target_pass_seconds", "Time of one pass.", "seconds", PASS_S_BUCKETS)
PASS_ROWS = _histogram("target_pass_rows", "Rows that one pass computed.", "rows", ROW_BUCKETS)
TARGET_TOKENS = _counter(
    "target_generation_tokens", "Tokens committed, those behind a stop string too.", "tokens"
)
RUNNING = _gauge("num_requests_running", "Choices that have a place.", "choices")
WAITING = _gauge("num_requests_waiting", "Choices that wait for one.", "choices")
QUEUE_TIME = _histogram(
    "request_queue_time_seconds",
    "From the target's door to a place, of choices that got one.",
    "seconds",
    QUEUE_S_BUCKETS,
)
ENDED = _counter(
    "sequences_ended",
    "Choices that left, by how: aborted by their client, or one in the background that gave way "
    "to clients; failed with the engine (its own error, or this target has stopped).",
    "choices",
    labels=("reason",),
    values=ENDINGS,
)
KV_USAGE = _gauge("kv_cache_usage_ratio", "KV blocks that running texts take, of all.", "ratio")
KV_BLOCKS = _gauge("kv_cache_blocks", "KV blocks of this replica.", "blocks", "target: engine info")
PREFIX_QUERIES = _counter(
    "prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.", "tokens"
)
PREFIX_HITS = _counter("prefix_cache_hits", "Those of them that it had.", "tokens")
PREEMPTIONS = _counter("num_preemptions", "Times that a text gave its KV back.", "preemptions")
TARGET_LIMITS = _counter(
    "target_limits_hit",
    "Times that a named limit of a target or of its draft links was reached.",
    "events",
    labels=("limit",),
    values=LIMITS,
)

# -- draft links --------------------------------------------------------------------------------

DRAFT_LINKS = _gauge("draft_links", "Drafts with a live stream to this target.", "links", _POOL)
LINK_EVENT = _counter(
    "draft_link_events",
    "What befell draft links: dark is a breaker that opened, outlawed one that broke rules.",
    "events",
    _DESK,
    labels=("event",),
    values=LINK_EVENTS,
)
SESSION_EVENT = _counter(
    "draft_session_events",
    "What befell sequences at their drafts.",
    "events",
    _DESK,
    labels=("event",),
    values=SESSION_EVENTS,
)
MESSAGES = _counter(
    "draft_messages",
    "Messages of drafts by what became of them: proposals, but stale_epoch has answers to opens "
    "and nacks too, and unknown_session and flood any message.",
    "messages",
    _DESK,
    labels=("disposition",),
    values=DISPOSITIONS,
)
REOPENS = _counter("reopens", "Sequences handed to a draft once more.", "sequences", _DESK)
RTT = _gauge(
    "draft_link_rtt_seconds",
    "Least recent round trip to a draft.",
    "seconds",
    "target: streams' clock offsets",
    labels=("draft",),
)
LINK_SESSIONS = _gauge(
    "draft_link_sessions", "Sequences that a draft serves here.", "sequences", _POOL,
    labels=("draft",),
)  # fmt: skip
BREAKER_STATE = _gauge(
    "draft_breaker_state",
    "1 for the state of a draft's circuit breaker.",
    "bool",
    _POOL,
    labels=("draft", "state"),
    values=BREAKER_STATES,
)

TARGET_METRICS: tuple[Metric, ...] = (
    NUM_DRAFTS, NUM_DRAFT_TOKENS, NUM_ACCEPTED_TOKENS, ACCEPTED_PER_POS, DRAFTS_PER_SOURCE,
    DRAFT_TOKENS_PER_SOURCE, ACCEPTED_PER_SOURCE, CHOSEN_PER_SOURCE, EXPLORED_PER_SOURCE,
    FAILURES_PER_SOURCE, LOOKUP_TRIALS, LOOKUP_MEMORY, LOOKUP_DROPPED,
    ROUNDS, PLAIN_ROUNDS, REJECTED_ROUNDS, MAX_K, K_CHOSEN, WASTED_TOKENS,
    WANTED_TOKENS, MISSING_TOKENS, LONE_HOLDS, PREDICTED_TOKENS, PREDICTED_SECONDS,
    MEASURED_TOKENS, MEASURED_SECONDS, GAIN,
    SPECULATION_STATE, PASSES, FAILED_PASSES, BUSY_SECONDS, PASS_SECONDS, PASS_ROWS,
    TARGET_TOKENS, RUNNING, WAITING, QUEUE_TIME, ENDED, KV_USAGE, KV_BLOCKS, PREFIX_QUERIES,
    PREFIX_HITS, PREEMPTIONS, TARGET_LIMITS, DRAFT_LINKS, LINK_EVENT, SESSION_EVENT, MESSAGES,
    REOPENS, RTT, LINK_SESSIONS, BREAKER_STATE,
)  # fmt: skip
