"""Messages -> protobuf: the mirror of `decoders`. Pure.

Does not check what it writes: our own sessions keep the promises of `protocol.messages`, and the
peer checks everything. A value that does not fit its field raises here (ValueError, TypeError).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.protocol.messages import (
    Bye,
    CloseSession,
    DraftTokens,
    Drain,
    Hello,
    Nack,
    Opened,
    OpenSession,
    Ping,
    Pong,
    Verdict,
    Welcome,
)
from paceline.rpc.enums import CLOSE_REASON_NUMBERS, MODE_NUMBERS, OPEN_STATUS_NUMBERS
from paceline.rpc.limits import MAX_REASON_CHARS, NO_REPETITION_PENALTY
from paceline.rpc.v1 import speculation_pb2 as pb
from paceline.sampling.params import SamplingParams


def _hello(message: Hello, wire: pb.Hello) -> None:
    wire.protocol_version = message.protocol_version
    wire.boot_id = message.boot_id
    wire.replica_id = message.replica_id
    wire.model_id = message.model_id
    wire.vocab_size = message.vocab_size
    wire.tokenizer_hash = message.tokenizer_hash
    wire.max_model_len = message.max_model_len
    wire.max_sessions = message.max_sessions
    wire.modes.extend(MODE_NUMBERS[mode] for mode in message.modes)


def _welcome(message: Welcome, wire: pb.Welcome) -> None:
    wire.protocol_version = message.protocol_version
    wire.boot_id = message.boot_id
    wire.replica_id = message.replica_id
    wire.model_id = message.model_id
    wire.vocab_size = message.vocab_size
    wire.tokenizer_hash = message.tokenizer_hash
    wire.unix_offset_us = message.unix_offset_us


def _sampling(sampling: SamplingParams, wire: pb.Sampling) -> None:
    wire.temperature = sampling.temperature
    wire.top_p = sampling.top_p
    wire.top_k = sampling.top_k
    wire.seed = sampling.seed
    wire.choice = sampling.choice
    wire.min_p = sampling.min_p
    wire.presence_penalty = sampling.presence_penalty
    wire.frequency_penalty = sampling.frequency_penalty
    if sampling.repetition_penalty != NO_REPETITION_PENALTY:
        wire.repetition_penalty = sampling.repetition_penalty
    wire.logit_bias_token_ids.extend(token_id for token_id, _ in sampling.logit_bias)
    wire.logit_biases.extend(bias for _, bias in sampling.logit_bias)
    wire.min_tokens = sampling.min_tokens
    wire.stop_token_ids.extend(sampling.stop_token_ids)
    wire.grammar = sampling.grammar


def _open_session(message: OpenSession, wire: pb.OpenSession) -> None:
    wire.session_id = message.session_id
    wire.epoch = message.epoch
    wire.prompt_len = message.prompt_len
    wire.token_ids.extend(message.token_ids)
    _sampling(message.sampling, wire.sampling)
    wire.mode = MODE_NUMBERS[message.mode]
    wire.limit_position = message.limit_position
    wire.cache_salt = message.cache_salt
    wire.fan_out = message.fan_out
    wire.trace_context = message.trace_context


def _opened(message: Opened, wire: pb.Opened) -> None:
    wire.session_id = message.session_id
    wire.epoch = message.epoch
    wire.status = OPEN_STATUS_NUMBERS[message.status]


def _draft_tokens(message: DraftTokens, wire: pb.DraftTokens) -> None:
    wire.session_id = message.session_id
    wire.epoch = message.epoch
    wire.start = message.start
    wire.context_hash = message.context_hash
    wire.token_ids.extend(message.token_ids)
    wire.last_round = message.last_round
    wire.draft_us = message.draft_us
    wire.sent_us = message.sent_us
    wire.is_branch = message.is_branch
    wire.began_us = message.began_us
    wire.received_us = message.received_us
    for probs in message.draft_probs:
        law = wire.distributions.add()
        law.token_ids.extend(probs.token_ids)
        law.weights.extend(probs.weights)


def _verdict(message: Verdict, wire: pb.Verdict) -> None:
    wire.session_id = message.session_id
    wire.epoch = message.epoch
    wire.start = message.start
    wire.token_ids.extend(message.token_ids)
    wire.num_accepted_tokens = message.num_accepted_tokens
    wire.limit_position = message.limit_position
    wire.round = message.round
    wire.trace_context = message.trace_context
    wire.queue_us = message.queue_us
    wire.verify_us = message.verify_us
    wire.has_rejection = message.has_rejection
    wire.fan_out = message.fan_out
    wire.sent_us = message.sent_us


def _nack(message: Nack, wire: pb.Nack) -> None:
    wire.session_id = message.session_id
    wire.epoch = message.epoch
    wire.have_len = message.have_len


def _close_session(message: CloseSession, wire: pb.CloseSession) -> None:
    wire.session_id = message.session_id
    wire.epoch = message.epoch
    wire.reason = CLOSE_REASON_NUMBERS[message.reason]


def _ping(message: Ping, wire: pb.Ping) -> None:
    wire.sent_us = message.sent_us
    wire.num_sessions = message.num_sessions
    wire.queue_len = message.queue_len


def _pong(message: Pong, wire: pb.Pong) -> None:
    wire.ping_sent_us = message.ping_sent_us
    wire.received_us = message.received_us


def _drain(_message: Drain, wire: pb.Drain) -> None:
    wire.SetInParent()


def _bye(message: Bye, wire: pb.Bye) -> None:
    wire.SetInParent()
    reason = message.reason[:MAX_REASON_CHARS]  # often an exception's text: make it fit
    wire.reason = "".join(char if char.isprintable() else " " for char in reason)


# Message type -> (member of the frame's oneof, encoder). Batched ones write one entry.
Encoders = Mapping[type, tuple[str, Callable[[Any, Any], None]]]

BATCHED: Encoders = {
    OpenSession: ("open_session", _open_session),
    Opened: ("opened", _opened),
    DraftTokens: ("draft_tokens", _draft_tokens),
    Verdict: ("verdict", _verdict),
    Nack: ("nack", _nack),
    CloseSession: ("close_session", _close_session),
}
SINGLE: Encoders = {
    Hello: ("hello", _hello),
    Welcome: ("welcome", _welcome),
    Ping: ("ping", _ping),
    Pong: ("pong", _pong),
    Drain: ("drain", _drain),
    Bye: ("bye", _bye),
}
