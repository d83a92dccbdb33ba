"""Codec round trip, and totality: any bytes decode to valid messages or raise one exception."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.config import RpcConfig
from paceline.errors import RemoteProtocolError
from paceline.protocol.messages import (
    MAX_FAN_OUT,
    Bye,
    CloseReason,
    CloseSession,
    DraftTokens,
    Drain,
    Hello,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
    Ping,
    Pong,
    Verdict,
    Welcome,
)
from paceline.rpc.codec import decode_draft, decode_target, encode_draft, encode_target
from paceline.rpc.limits import MAX_COUNTER, MAX_INT, WireLimits
from paceline.rpc.v1 import speculation_pb2 as pb
from paceline.sampling.params import (
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    SamplingParams,
    VerificationMode,
)
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs

VOCAB_SIZE = 50_000
LIMITS = WireLimits.from_config(RpcConfig(), VOCAB_SIZE)
TIGHT = replace(LIMITS, max_message_bytes=1024, max_items_per_message=3, max_tokens_per_item=64)

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
size = st.integers(1, MAX_INT)
counter = st.integers(0, MAX_COUNTER)
context = st.just(b"") | st.binary(min_size=25, max_size=25)
position = st.integers(0, MAX_INT)
start = st.integers(0, MAX_INT - 64)
printable = st.characters(codec="utf-8").filter(str.isprintable)
name = st.text(printable, min_size=1, max_size=256)
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40).map(tuple)
sampling = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(MIN_TEMPERATURE, 100.0)),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(0, MAX_INT),
    seed=u64,
    choice=st.integers(0, 2**24 - 1),
    min_p=st.floats(0.0, 1.0),
    presence_penalty=st.floats(-MAX_PENALTY, MAX_PENALTY),
    frequency_penalty=st.floats(-MAX_PENALTY, MAX_PENALTY),
    repetition_penalty=st.just(1.0) | st.floats(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB_SIZE - 1), st.floats(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS), max_size=6
    ).map(lambda biases: tuple(sorted(biases.items()))),
    min_tokens=position,
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6).map(tuple),
    grammar=st.text(st.characters(codec="utf-8"), max_size=40),
)
modes = st.sampled_from(VerificationMode)

hellos = st.builds(
    Hello,
    protocol_version=u32,
    boot_id=name,
    replica_id=name,
    model_id=name,
    vocab_size=size,
    tokenizer_hash=name,
    max_model_len=size,
    max_sessions=size,
    modes=st.lists(modes, max_size=16).map(tuple),
)
welcomes = st.builds(
    Welcome,
    protocol_version=u32,
    boot_id=name,
    replica_id=name,
    model_id=name,
    vocab_size=size,
    tokenizer_hash=name,
    unix_offset_us=counter,
)
opens = st.builds(
    OpenSession,
    session_id=u64,
    epoch=u32,
    prompt_len=st.just(1),
    token_ids=token_ids,
    sampling=sampling,
    mode=modes,
    limit_position=position,
    cache_salt=u64,
    fan_out=st.integers(0, MAX_FAN_OUT),
    trace_context=context,
)
openeds = st.builds(Opened, u64, u32, st.sampled_from(OpenStatus))


@st.composite
def draw_law(draw: st.DrawFn) -> SparseProbs:
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5, unique=True))
    cuts = st.lists(
        st.integers(1, TOTAL_WEIGHT - 1), min_size=len(ids) - 1, max_size=len(ids) - 1, unique=True
    )
    bounds = [0, *sorted(draw(cuts)), TOTAL_WEIGHT]
    return SparseProbs(tuple(ids), tuple(b - a for a, b in pairwise(bounds)))


drafts = st.builds(
    DraftTokens, u64, u32, start, u64, token_ids, last_round=counter, draft_us=counter,
    sent_us=counter, is_branch=st.booleans(), began_us=counter, received_us=counter,
)  # fmt: skip
drafts_with_laws = st.lists(draw_law(), min_size=1, max_size=4).flatmap(
    lambda laws: drafts.map(
        lambda draft: replace(
            draft,
            token_ids=tuple(law.token_ids[0] for law in laws),
            draft_probs=tuple(laws),
        )
    )
)
verdicts = token_ids.flatmap(
    lambda ids: st.builds(
        Verdict,
        u64,
        u32,
        start,
        st.just(ids),
        num_accepted_tokens=st.integers(0, len(ids)),
        limit_position=position,
        round=counter,
        trace_context=context,
        queue_us=counter,
        verify_us=counter,
        has_rejection=st.booleans(),
        fan_out=st.integers(0, MAX_FAN_OUT),
        sent_us=counter,
    )
)
both = (
    st.builds(Nack, u64, u32, position)
    | st.builds(CloseSession, u64, u32, st.sampled_from(CloseReason))
    | st.builds(Ping, counter, position, position)
    | st.builds(Pong, counter, counter)
    | st.just(Drain())
    | st.builds(Bye, st.text(printable, max_size=1024))
)
draft_messages = hellos | openeds | drafts | drafts_with_laws | both
target_messages = welcomes | opens | verdicts | both


def flatten(data: list[bytes], decode: Callable[..., list[Any]], limits: WireLimits) -> list[Any]:
    return [message for one in data for message in decode(one, limits)]


@given(st.lists(draft_messages, max_size=12))
def test_draft_round_trip(said: list[Any]) -> None:
    assert flatten(encode_draft(said, LIMITS), decode_draft, LIMITS) == said


@given(st.lists(target_messages, max_size=12))
def test_target_round_trip(said: list[Any]) -> None:
    assert flatten(encode_target(said, LIMITS), decode_target, LIMITS) == said


@given(st.lists(drafts | drafts_with_laws | openeds, max_size=12))
def test_round_trip_under_tight_limits(said: list[Any]) -> None:
    data = encode_draft(said, TIGHT)
    assert all(len(one) <= TIGHT.max_message_bytes for one in data)
    assert flatten(data, decode_draft, TIGHT) == said


def decodes_or_refuses(data: bytes) -> None:
    """Also: what decodes can be encoded again and means the same."""
    for decode, encode in ((decode_draft, encode_draft), (decode_target, encode_target)):
        try:
            messages: list[Any] = decode(data, LIMITS)
        except RemoteProtocolError:
            continue
        assert messages
        assert flatten(encode(messages, LIMITS), decode, LIMITS) == messages


@given(st.binary(max_size=300))
@example(b"")
def test_any_bytes(data: bytes) -> None:
    decodes_or_refuses(data)


@given(st.binary(max_size=300))
def test_any_body_under_a_right_checksum(body: bytes) -> None:
    """The checksum must not be what saves us: an enemy can compute it."""
    decodes_or_refuses(pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString())


@st.composite
def mutated_bodies(draw: st.DrawFn) -> bytes:
    """A valid message with a few bytes overwritten, removed, inserted or repeated."""
    said: list[Any] = draw(st.lists(draft_messages | target_messages, min_size=1, max_size=1))
    is_draft = isinstance(said[0], Hello | Opened | DraftTokens)
    (data,) = encode_draft(said, LIMITS) if is_draft else encode_target(said, LIMITS)
    body = bytearray(pb.SpeculateRequest.FromString(data).body)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        match draw(st.integers(0, 3)):
            case 0:
                body[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del body[at : at + draw(st.integers(1, 4))]
            case 2:
                body[at:at] = draw(st.binary(min_size=1, max_size=8))
            case _:
                body[at:at] = body[at : at + draw(st.integers(1, 16))]
    return bytes(body)


@given(mutated_bodies())
def test_mutated_messages(body: bytes) -> None:
    decodes_or_refuses(pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString())


COUNTERS = ("last_round", "draft_us", "sent_us", "began_us", "received_us")
fields_of_any_size = st.fixed_dictionaries(
    {
        "session_id": u64,
        "epoch": u32,
        "start": u32,
        "context_hash": u64,
        "token_ids": st.lists(u32, max_size=8),
        "last_round": u64,
        "draft_us": u64,
        "sent_us": u64,
        "began_us": u64,
        "received_us": u64,
        "is_branch": st.booleans(),
    }
)


@given(st.lists(fields_of_any_size, max_size=4))
def test_random_fields_are_refused_exactly_when_out_of_range(entries: list[dict[str, Any]]) -> None:
    frame = pb.DraftFrame()
    frame.draft_tokens.SetInParent()
    for entry in entries:
        frame.draft_tokens.items.add(**entry)
    body = frame.SerializeToString()
    data = pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()
    is_valid = bool(entries) and all(
        entry["token_ids"]
        and max(entry["token_ids"]) < VOCAB_SIZE
        and entry["start"] + len(entry["token_ids"]) <= MAX_INT
        and max(value for name, value in entry.items() if name in COUNTERS) <= MAX_COUNTER
        for entry in entries
    )
    try:
        decoded = decode_draft(data, LIMITS)
    except RemoteProtocolError:
        assert not is_valid
    else:
        assert is_valid
        assert [one.session_id for one in decoded if isinstance(one, DraftTokens)] == [
            entry["session_id"] for entry in entries
        ]


any_law = st.tuples(
    st.lists(st.integers(0, 3) | u32, max_size=4),
    st.lists(st.sampled_from([0, 1, 32768, 65535, 65536]) | u32, max_size=4),
)


def is_law(ids: list[int], weights: list[int]) -> bool:
    return (
        1 <= len(ids) == len(weights) == len(set(ids))
        and max(ids) < VOCAB_SIZE
        and min(weights) > 0
        and sum(weights) == TOTAL_WEIGHT
    )


@given(st.integers(1, 3), st.lists(any_law, max_size=3))
@example(2, [([0, 1], [1, 65535]), ([5], [65536])])
def test_random_laws_are_refused_exactly_when_they_are_none(
    num_tokens: int, laws: list[tuple[list[int], list[int]]]
) -> None:
    frame = pb.DraftFrame()
    item = frame.draft_tokens.items.add(token_ids=[0] * num_tokens)
    for ids, weights in laws:
        item.distributions.add(token_ids=ids, weights=weights)
    body = frame.SerializeToString()
    data = pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()
    is_valid = not laws or (len(laws) == num_tokens and all(is_law(*law) for law in laws))
    try:
        (decoded,) = decode_draft(data, LIMITS)
    except RemoteProtocolError:
        assert not is_valid
    else:
        assert is_valid
        assert isinstance(decoded, DraftTokens)
        assert [(list(law.token_ids), list(law.weights)) for law in decoded.draft_probs] == laws


any_float = st.floats() | st.sampled_from([0.0, 1.0, 2.0, -2.0, 100.0])


@given(
    st.fixed_dictionaries(
        {
            "temperature": st.just(1.0),
            "top_p": st.just(1.0),
            "min_p": any_float,
            "presence_penalty": any_float,
            "frequency_penalty": any_float,
            "min_tokens": u32,
        },
        optional={"repetition_penalty": any_float},
    ),
    st.lists(st.integers(0, 9) | u32, max_size=3),
    st.lists(any_float, max_size=3),
    st.lists(st.integers(0, 9) | u32, max_size=3),
)
def test_random_sampling_is_refused_exactly_when_out_of_range(
    fields: dict[str, Any], ids: list[int], biases: list[float], stops: list[int]
) -> None:
    frame = pb.TargetFrame()
    item = frame.open_session.items.add(token_ids=[1], prompt_len=1, mode=2)
    item.sampling.MergeFrom(
        pb.Sampling(**fields, logit_bias_token_ids=ids, logit_biases=biases, stop_token_ids=stops)
    )
    body = frame.SerializeToString()
    data = pb.SpeculateResponse(crc32=zlib.crc32(body), body=body).SerializeToString()
    is_valid = (
        0 <= fields["min_p"] <= 1
        and -2 <= fields["presence_penalty"] <= 2
        and -2 <= fields["frequency_penalty"] <= 2
        and 0.01 <= fields.get("repetition_penalty", 1.0) <= 10
        and fields["min_tokens"] <= MAX_INT
        and len(ids) == len(biases)
        and ids == sorted(set(ids))
        and all(-100 <= bias <= 100 for bias in biases)
        and all(token_id < VOCAB_SIZE for token_id in (*ids, *stops))
    )
    try:
        (decoded,) = decode_target(data, LIMITS)
    except RemoteProtocolError:
        assert not is_valid
    else:
        assert is_valid
        assert isinstance(decoded, OpenSession)
        assert decoded.sampling.logit_bias == tuple(zip(ids, biases, strict=True))
        assert decoded.sampling.repetition_penalty == fields.get("repetition_penalty", 1.0)


@given(drafts, st.integers(0, 10_000), st.integers(1, 2**32 - 1))
def test_a_burst_of_damage_is_caught(message: DraftTokens, at: int, burst: int) -> None:
    """Up to 32 flipped bits in a row inside the body: CRC-32's guarantee."""
    (data,) = encode_draft([message], LIMITS)
    header = len(data) - len(pb.SpeculateRequest.FromString(data).body)
    num_bits = 8 * (len(data) - header)
    flips = burst << at % num_bits
    damaged = int.from_bytes(data[header:], "little") ^ flips & ((1 << num_bits) - 1)
    if flips & ((1 << num_bits) - 1) == 0:
        return
    body = damaged.to_bytes(len(data) - header, "little")
    with pytest.raises(RemoteProtocolError, match="checksum does not match"):
        decode_draft(data[:header] + body, LIMITS)
