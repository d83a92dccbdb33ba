"""Protobuf -> messages: everything that a peer can say is checked here, once. Pure.

Every function either returns messages that hold all the promises of `protocol.messages`, or
raises `RemoteProtocolError` with a sentence. Knows no stream, no checksum and no session: whether
a message makes sense *now* is the sessions' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from paceline.errors import RemoteProtocolError
from paceline.protocol.messages import (
    MAX_FAN_OUT,
    TRACE_CONTEXT_BYTES,
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
from paceline.rpc.enums import CLOSE_REASONS, MODES, OPEN_STATUSES, known
from paceline.rpc.limits import (
    MAX_COUNTER,
    MAX_INT,
    MAX_MODES,
    MAX_REASON_CHARS,
    NO_REPETITION_PENALTY,
    WireLimits,
    check_name,
    check_printable,
    check_range,
)
from paceline.rpc.v1 import speculation_pb2 as pb
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

Item = TypeVar("Item")


def _hello(wire: pb.Hello, _limits: WireLimits) -> list[Hello]:
    return [
        Hello(
            protocol_version=wire.protocol_version,
            boot_id=check_name("boot_id", wire.boot_id),
            replica_id=check_name("replica_id", wire.replica_id),
            model_id=check_name("model_id", wire.model_id),
            # Not compared with ours here: a mismatch gets a sentence of its own.
            vocab_size=check_range("vocab_size", wire.vocab_size, 1, MAX_INT),
            tokenizer_hash=check_name("tokenizer_hash", wire.tokenizer_hash),
            max_model_len=check_range("max_model_len", wire.max_model_len, 1, MAX_INT),
            max_sessions=check_range("max_sessions", wire.max_sessions, 1, MAX_INT),
            modes=_modes(wire),
        )
    ]


def _modes(wire: pb.Hello) -> tuple[VerificationMode, ...]:
    """A capability that we do not know is one that we never use, so it is skipped."""
    if len(wire.modes) > MAX_MODES:
        raise RemoteProtocolError(f"{len(wire.modes)} modes, at most {MAX_MODES} allowed")
    return tuple(MODES[number] for number in wire.modes if number in MODES)


def _welcome(wire: pb.Welcome, _limits: WireLimits) -> list[Welcome]:
    return [
        Welcome(
            protocol_version=wire.protocol_version,
            boot_id=check_name("boot_id", wire.boot_id),
            replica_id=check_name("replica_id", wire.replica_id),
            model_id=check_name("model_id", wire.model_id),
            vocab_size=check_range("vocab_size", wire.vocab_size, 1, MAX_INT),
            tokenizer_hash=check_name("tokenizer_hash", wire.tokenizer_hash),
            unix_offset_us=check_range("unix_offset_us", wire.unix_offset_us, 0, MAX_COUNTER),
        )
    ]


def _sampling(wire: pb.OpenSession, limits: WireLimits) -> SamplingParams:
    if not wire.HasField("sampling"):
        raise RemoteProtocolError("an OpenSession without sampling parameters")
    sampling = wire.sampling
    biased, biases = sampling.logit_bias_token_ids, sampling.logit_biases
    if len(biased) != len(biases):
        raise RemoteProtocolError(f"{len(biases)} logit biases for {len(biased)} token ids")
    limits.check_vocabulary(biased)
    limits.check_vocabulary(sampling.stop_token_ids)
    has_repetition_penalty = sampling.HasField("repetition_penalty")
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            choice=sampling.choice,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=(
                sampling.repetition_penalty if has_repetition_penalty else NO_REPETITION_PENALTY
            ),
            logit_bias=tuple(zip(biased, biases, strict=True)),
            min_tokens=sampling.min_tokens,
            stop_token_ids=tuple(sampling.stop_token_ids),
            grammar=sampling.grammar,
        )
    except ValueError as error:  # out of range; NaN and infinities too
        raise RemoteProtocolError(str(error)) from error


def _open_session(wire: pb.OpenSession, limits: WireLimits) -> OpenSession:
    token_ids = tuple(wire.token_ids)
    limits.check_token_ids(token_ids)
    return OpenSession(
        session_id=wire.session_id,
        epoch=wire.epoch,
        prompt_len=check_range("prompt_len", wire.prompt_len, 1, len(token_ids)),
        token_ids=token_ids,
        sampling=_sampling(wire, limits),
        mode=known("verification mode", MODES, wire.mode),
        limit_position=check_range("limit_position", wire.limit_position, 0, MAX_INT),
        cache_salt=wire.cache_salt,
        fan_out=check_range("fan_out", wire.fan_out, 0, MAX_FAN_OUT),
        trace_context=_trace_context(wire.trace_context),
    )


def _opened(wire: pb.Opened, _limits: WireLimits) -> Opened:
    status = known("open status", OPEN_STATUSES, wire.status)
    return Opened(wire.session_id, wire.epoch, status)


def _draft_tokens(wire: pb.DraftTokens, limits: WireLimits) -> DraftTokens:
    token_ids = tuple(wire.token_ids)
    limits.check_token_ids(token_ids)
    start, last_round = wire.start, wire.last_round
    draft_us, sent_us = wire.draft_us, wire.sent_us
    if start + len(token_ids) > MAX_INT:
        raise RemoteProtocolError(f"positions {start} + {len(token_ids)} exceed {MAX_INT}")
    began_us, received_us = wire.began_us, wire.received_us
    if max(last_round, draft_us, sent_us, began_us, received_us) > MAX_COUNTER:
        _refuse_counters(
            last_round=last_round,
            draft_us=draft_us,
            sent_us=sent_us,
            began_us=began_us,
            received_us=received_us,
        )
    return DraftTokens(
        wire.session_id,
        wire.epoch,
        start,
        wire.context_hash,
        token_ids,
        last_round,
        draft_us,
        sent_us,
        _laws(wire, limits) if wire.distributions else (),
        wire.is_branch,
        began_us,
        received_us,
    )


def _laws(wire: pb.DraftTokens, limits: WireLimits) -> tuple[SparseProbs, ...]:
    """Each is a law. Whether the mode wants any, and whether the tokens can have come from them,
    is the sessions' business.
    """
    if len(wire.distributions) != len(wire.token_ids):
        raise RemoteProtocolError(
            f"{len(wire.distributions)} distributions for {len(wire.token_ids)} token ids"
        )
    return tuple(_law(law, limits) for law in wire.distributions)


def _law(wire: pb.DraftDistribution, limits: WireLimits) -> SparseProbs:
    limits.check_vocabulary(wire.token_ids)
    try:
        return SparseProbs(tuple(wire.token_ids), tuple(wire.weights))
    except ValueError as error:
        raise RemoteProtocolError(f"a distribution that is none: {error}") from error


def _verdict(wire: pb.Verdict, limits: WireLimits) -> Verdict:
    token_ids = tuple(wire.token_ids)
    limits.check_token_ids(token_ids)
    start = wire.start
    if start + len(token_ids) > MAX_INT:
        raise RemoteProtocolError(f"positions {start} + {len(token_ids)} exceed {MAX_INT}")
    trace_context = _trace_context(wire.trace_context)
    round_, queue_us, verify_us, sent_us = wire.round, wire.queue_us, wire.verify_us, wire.sent_us
    if max(round_, queue_us, verify_us, sent_us) > MAX_COUNTER:
        _refuse_counters(round=round_, queue_us=queue_us, verify_us=verify_us, sent_us=sent_us)
    return Verdict(
        wire.session_id,
        wire.epoch,
        start,
        token_ids,
        check_range("num_accepted_tokens", wire.num_accepted_tokens, 0, len(token_ids)),
        check_range("limit_position", wire.limit_position, 0, MAX_INT),
        round_,
        trace_context,
        queue_us,
        verify_us,
        wire.has_rejection,
        check_range("fan_out", wire.fan_out, 0, MAX_FAN_OUT),
        sent_us,
    )


def _trace_context(trace_context: bytes) -> bytes:
    if trace_context and len(trace_context) != TRACE_CONTEXT_BYTES:
        raise RemoteProtocolError(
            f"a trace context of {len(trace_context)} bytes, 0 or {TRACE_CONTEXT_BYTES} expected"
        )
    return trace_context


def _refuse_counters(**values: int) -> None:
    for name, value in values.items():
        check_range(name, value, 0, MAX_COUNTER)


def _nack(wire: pb.Nack, _limits: WireLimits) -> Nack:
    return Nack(wire.session_id, wire.epoch, check_range("have_len", wire.have_len, 0, MAX_INT))


def _close_session(wire: pb.CloseSession, _limits: WireLimits) -> CloseSession:
    reason = known("close reason", CLOSE_REASONS, wire.reason)
    return CloseSession(wire.session_id, wire.epoch, reason)


def _ping(wire: pb.Ping, _limits: WireLimits) -> list[Ping]:
    return [
        Ping(
            sent_us=check_range("sent_us", wire.sent_us, 0, MAX_COUNTER),
            num_sessions=check_range("num_sessions", wire.num_sessions, 0, MAX_INT),
            queue_len=check_range("queue_len", wire.queue_len, 0, MAX_INT),
        )
    ]


def _pong(wire: pb.Pong, _limits: WireLimits) -> list[Pong]:
    return [
        Pong(
            ping_sent_us=check_range("ping_sent_us", wire.ping_sent_us, 0, MAX_COUNTER),
            received_us=check_range("received_us", wire.received_us, 0, MAX_COUNTER),
        )
    ]


def _drain(_wire: pb.Drain, _limits: WireLimits) -> list[Drain]:
    return [Drain()]


def _bye(wire: pb.Bye, _limits: WireLimits) -> list[Bye]:
    if len(wire.reason) > MAX_REASON_CHARS:
        raise RemoteProtocolError(f"a Bye of more than {MAX_REASON_CHARS} characters")
    return [Bye(check_printable("the reason of a Bye", wire.reason))]


def _batch(item: Callable[[Any, WireLimits], Item]) -> Callable[[Any, WireLimits], list[Item]]:
    def decode(wire: Any, limits: WireLimits) -> list[Item]:
        limits.check_num_items(len(wire.items))
        return [item(entry, limits) for entry in wire.items]

    return decode


# Keyed by the name of the member that is set in the frame's oneof.
Decoders = Mapping[str, Callable[[Any, WireLimits], list[Any]]]

_BOTH: Decoders = {
    "nack": _batch(_nack),
    "close_session": _batch(_close_session),
    "ping": _ping,
    "pong": _pong,
    "drain": _drain,
    "bye": _bye,
}
DRAFT_DECODERS: Decoders = {
    "hello": _hello,
    "opened": _batch(_opened),
    "draft_tokens": _batch(_draft_tokens),
    **_BOTH,
}
TARGET_DECODERS: Decoders = {
    "welcome": _welcome,
    "open_session": _batch(_open_session),
    "verdict": _batch(_verdict),
    **_BOTH,
}
