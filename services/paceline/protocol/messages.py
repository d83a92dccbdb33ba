"""Everything that crosses the wire between a draft and a target, and nothing else.

Frozen, without behaviour. `rpc.codec` translates to protobuf; sessions consume and return these.
Conventions: a *position* is an absolute 0-based index into prompt + output; token ids are
non-negative ints below the vocabulary size that both sides agreed on; `*_us` are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

PROTOCOL_VERSION = 1
TRACE_CONTEXT_BYTES = 25
MAX_FAN_OUT = 16
MAX_BRANCH_TOKENS = 256  # of one sequence, sent between two verdicts
# The modes whose proposals travel with the laws that they were drawn from. In the other two the
# target matches proposals against its own samples, and it does not matter where they come from.
REJECTION_MODES = frozenset({VerificationMode.REJECTION, VerificationMode.BLOCK})


@dataclass(frozen=True, slots=True)
class Hello:
    """Draft -> target, first message of a stream. `boot_id` is new at every process start.

    `vocab_size` counts the ids that the tokenizer has, on both sides: the output layers of two
    models may be padded differently.
    """

    protocol_version: int
    boot_id: str
    replica_id: str
    model_id: str
    vocab_size: int
    tokenizer_hash: str
    max_model_len: int
    max_sessions: int
    modes: tuple[VerificationMode, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """Target -> draft, the answer to a `Hello` that fits.

    `unix_offset_us`: what turns the target's monotonic clock into unix time (0: not said).
    """

    protocol_version: int
    boot_id: str
    replica_id: str
    model_id: str
    vocab_size: int
    tokenizer_hash: str
    unix_offset_us: int = 0


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Target -> draft: (re)open a sequence. Carries every token so far; `epoch` fences older ones.

    `token_ids` = prompt + committed output; the first `prompt_len` are the prompt, so output
    index t sits at position `prompt_len + t`. `limit_position`: no token at or beyond it may be
    drafted. `cache_salt` (u64): the draft's prefix cache shares blocks only between equal salts.
    `fan_out`: for so many runner-ups of each proposal the draft may prepare a branch, in case the
    target commits that one instead (0: none; always 0 in the rejection modes).
    `trace_context`: of the round that is open; empty when the request is not traced.
    """

    session_id: int
    epoch: int
    prompt_len: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: VerificationMode
    limit_position: int
    cache_salt: int = 0
    fan_out: int = 0
    trace_context: bytes = b""


class OpenStatus(StrEnum):
    OK = "ok"
    BUSY = "busy"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Opened:
    """Draft -> target: the answer to `OpenSession`."""

    session_id: int
    epoch: int
    status: OpenStatus


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Draft -> target: proposals for positions `start, start + 1, ...`.

    `draft_probs`: in the rejection modes the law that each token was drawn from, else empty.
    `context_hash` is the hash (`protocol.token_log`) of all tokens before `start`: a proposal made
    from another context is recognised exactly. `last_round` is the newest verdict round that the
    draft had processed. `draft_us` is compute time of these tokens. Three moments are the draft's
    monotonic clock (0: not said): `began_us` when their computing began, `sent_us` when the message
    left, and `received_us`, in the first proposals computed after a verdict, when that came.

    `is_branch`: the context is not the draft's own text. It goes on from a runner-up, a token that
    the target may commit in place of the draft's own; the target holds such proposals beside its
    window until it knows, and never misses one (no `Nack`). Only where `fan_out` was granted in
    this epoch, within the same limit of positions, and at most `MAX_BRANCH_TOKENS` tokens of a
    sequence between two of its verdicts: the target holds no more.
    """

    session_id: int
    epoch: int
    start: int
    context_hash: int
    token_ids: tuple[int, ...]
    last_round: int
    draft_us: int = 0
    sent_us: int = 0
    draft_probs: tuple[SparseProbs, ...] = ()
    is_branch: bool = False
    began_us: int = 0
    received_us: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Target -> draft: positions `start, start + 1, ...` are committed to `token_ids`.

    The last of them is the recovered or bonus token (or the plain one of an empty window), the
    `num_accepted_tokens` before it were the draft's. A verdict *sets* positions: a duplicate is
    harmless, a gap is answered by a `Nack`, a conflict is a rewind.

    `has_rejection`: a verified proposal was rejected. In the rejection modes the draft then drops
    everything behind `token_ids`, even if the last of them equals its own: what the target has
    looked at must not be proposed again from the same noise (math.md 2d, B2).

    `fan_out` is the one in force from now on, see `OpenSession`. `trace_context` is that of the
    round that is now open, the one after `round`; `sent_us` our clock when the message left.
    """

    session_id: int
    epoch: int
    start: int
    token_ids: tuple[int, ...]
    num_accepted_tokens: int
    limit_position: int
    round: int
    trace_context: bytes = b""
    queue_us: int = 0
    verify_us: int = 0
    has_rejection: bool = False
    fan_out: int = 0
    sent_us: int = 0


@dataclass(frozen=True, slots=True)
class Nack:
    """Either way: "I hold your tokens up to `have_len`, then something is missing"."""

    session_id: int
    epoch: int
    have_len: int


class CloseReason(StrEnum):
    """From a draft, FINISHED says that it has no room for more of this text."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REPLACED = "replaced"
    UNKNOWN = "unknown"
    PROTOCOL = "protocol"


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Target -> draft (or draft -> target when it gives a sequence up): forget the sequence."""

    session_id: int
    epoch: int
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class Ping:
    """Either way. `sent_us` is the sender's monotonic clock; the load figures are the sender's."""

    sent_us: int
    num_sessions: int = 0
    queue_len: int = 0


@dataclass(frozen=True, slots=True)
class Pong:
    """`ping_sent_us` echoes the ping; `received_us` is the answering side's monotonic clock."""

    ping_sent_us: int
    received_us: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Either way: open nothing new here; existing sessions go on."""


@dataclass(frozen=True, slots=True)
class Bye:
    """Either way: an orderly end of the stream. EOF without it is a lost peer."""

    reason: str = field(default="")


DraftMessage = (
    Hello | Opened | DraftTokens | Nack | CloseSession | Ping | Pong | Drain | Bye
)  # draft -> target
TargetMessage = (
    Welcome | OpenSession | Verdict | Nack | CloseSession | Ping | Pong | Drain | Bye
)  # target -> draft
