"""One message of every kind, with every field set to something that a default would lose."""

from __future__ import annotations

from paceline.protocol.messages import (
    MAX_FAN_OUT,
    Bye,
    CloseReason,
    CloseSession,
    DraftMessage,
    DraftTokens,
    Drain,
    Hello,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
    Ping,
    Pong,
    TargetMessage,
    Verdict,
    Welcome,
)
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

VOCAB_SIZE = 1000
U64 = 2**64 - 1

HELLO = Hello(
    protocol_version=1,
    boot_id="boot-d",
    replica_id="draft-0",
    model_id="small",
    vocab_size=VOCAB_SIZE,
    tokenizer_hash="sha256:abc",
    max_model_len=2048,
    max_sessions=128,
    modes=(VerificationMode.GREEDY, VerificationMode.COUPLED),
)
WELCOME = Welcome(
    protocol_version=1,
    boot_id="boot-t",
    replica_id="target-0",
    model_id="large",
    vocab_size=VOCAB_SIZE,
    tokenizer_hash="sha256:abc",
    unix_offset_us=2**53 - 1,
)
OPEN = OpenSession(
    session_id=U64,
    epoch=3,
    prompt_len=2,
    token_ids=(5, 0, 999),
    sampling=SamplingParams(
        temperature=0.7,
        top_p=0.95,
        top_k=40,
        seed=U64,
        choice=2**24 - 1,
        min_p=0.05,
        presence_penalty=-0.5,
        frequency_penalty=1.25,
        repetition_penalty=1.1,
        logit_bias=((0, -100.0), (7, 0.1), (999, 100.0)),
        min_tokens=5,
        stop_token_ids=(3, 999),
        grammar='start: "é\U0001f600"',
    ),
    mode=VerificationMode.COUPLED,
    limit_position=19,
    cache_salt=U64 - 1,
    fan_out=MAX_FAN_OUT,
    trace_context=bytes(range(25)),
)
OPENED = Opened(session_id=U64, epoch=3, status=OpenStatus.BUSY)
DRAFT_TOKENS = DraftTokens(
    session_id=7,
    epoch=2**32 - 1,
    start=3,
    context_hash=U64,
    token_ids=(1, 999, 0),
    last_round=12,
    draft_us=830,
    sent_us=2**53 - 1,
    is_branch=True,
    began_us=2**53 - 1,
    received_us=2**53 - 1,
)
DRAFT_WITH_LAWS = DraftTokens(
    session_id=7,
    epoch=1,
    start=3,
    context_hash=U64,
    token_ids=(1, 999),
    last_round=12,
    draft_probs=(SparseProbs((0, 1), (1, 65535)), SparseProbs((999,), (65536,))),
)
VERDICT = Verdict(
    session_id=7,
    epoch=3,
    start=3,
    token_ids=(1, 999, 4),
    num_accepted_tokens=2,
    limit_position=22,
    round=13,
    trace_context=bytes(range(25)),
    queue_us=40,
    verify_us=9_000,
    has_rejection=True,
    fan_out=3,
    sent_us=2**53 - 1,
)
NACK = Nack(session_id=7, epoch=3, have_len=11)
CLOSE = CloseSession(session_id=7, epoch=3, reason=CloseReason.REPLACED)
PING = Ping(sent_us=123, num_sessions=4, queue_len=5)
PONG = Pong(ping_sent_us=123, received_us=456)

DRAFT_MESSAGES: tuple[DraftMessage, ...] = (
    HELLO,
    OPENED,
    DRAFT_TOKENS,
    DRAFT_WITH_LAWS,
    NACK,
    CLOSE,
    PING,
    PONG,
    Drain(),
    Bye("done"),
)
TARGET_MESSAGES: tuple[TargetMessage, ...] = (
    WELCOME,
    OPEN,
    VERDICT,
    NACK,
    CLOSE,
    PING,
    PONG,
    Drain(),
    Bye("done"),
)
