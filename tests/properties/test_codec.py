"""Codec round trip, and totality: any bytes decode to valid messages or raise one exception."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.config import RpcConfig
from paceline.errors import RemoteProtocolError
from paceline.protocol.messages import (
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
from paceline.sampling.params import MIN_TEMPERATURE, SamplingParams, VerificationMode

VOCAB_SIZE = 50_000
LIMITS = WireLimits.from_config(RpcConfig(), VOCAB_SIZE)
TIGHT = replace(LIMITS, max_message_bytes=1024, max_items_per_message=3, max_tokens_per_item=64)

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
size = st.integers(1, MAX_INT)
counter = st.integers(0, MAX_COUNTER)
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
)
openeds = st.builds(Opened, u64, u32, st.sampled_from(OpenStatus))
drafts = st.builds(
    DraftTokens, u64, u32, start, u64, token_ids, last_round=counter, draft_us=counter,
    sent_us=counter,
)  # fmt: skip
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
        trace_context=st.just(b"") | st.binary(min_size=25, max_size=25),
        queue_us=counter,
        verify_us=counter,
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
draft_messages = hellos | openeds | drafts | both
target_messages = welcomes | opens | verdicts | both


def flatten(data: list[bytes], decode: Callable[..., list[Any]], limits: WireLimits) -> list[Any]:
    return [message for one in data for message in decode(one, limits)]


@given(st.lists(draft_messages, max_size=12))
def test_draft_round_trip(said: list[Any]) -> None:
    assert flatten(encode_draft(said, LIMITS), decode_draft, LIMITS) == said


@given(st.lists(target_messages, max_size=12))
def test_target_round_trip(said: list[Any]) -> None:
    assert flatten(encode_target(said, LIMITS), decode_target, LIMITS) == said


@given(st.lists(drafts | openeds, max_size=12))
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
        and max(entry["last_round"], entry["draft_us"], entry["sent_us"]) <= MAX_COUNTER
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
