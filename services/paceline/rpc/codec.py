"""Messages <-> bytes, with a checksum around every message and every field checked. Pure.

Any bytes either decode to messages that hold the promises of `protocol.messages` or raise
`RemoteProtocolError`. Knows no stream, no session and no peer.

The checksum is zlib's CRC-32: it finds every burst of up to 32 flipped bits, the standard library
has it in C, and CRC-32C would be a dependency for the same strength. It guards against damage,
not against an enemy (mTLS does that).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.protocol.messages import (
    DraftMessage,
    DraftTokens,
    OpenSession,
    TargetMessage,
    Verdict,
)
from paceline.rpc.decoders import DRAFT_DECODERS, TARGET_DECODERS
from paceline.rpc.encoders import BATCHED, SINGLE
from paceline.rpc.limits import WireLimits
from paceline.rpc.v1 import speculation_pb2 as pb

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")
Frame = TypeVar("Frame", pb.DraftFrame, pb.TargetFrame)
AnyMessage = DraftMessage | TargetMessage


def encode_draft(messages: Sequence[DraftMessage], limits: WireLimits) -> list[bytes]:
    """Serialised SpeculateRequests, in order; a run of one kind becomes one, or a few if large."""
    return [_seal(pb.SpeculateRequest, frame) for frame in _frames(pb.DraftFrame, messages, limits)]


def encode_target(messages: Sequence[TargetMessage], limits: WireLimits) -> list[bytes]:
    """Serialised SpeculateResponses; see `encode_draft`."""
    return [
        _seal(pb.SpeculateResponse, frame) for frame in _frames(pb.TargetFrame, messages, limits)
    ]


def decode_draft(data: bytes, limits: WireLimits) -> list[DraftMessage]:
    """The messages of one serialised SpeculateRequest; never empty."""
    frame = _unseal(pb.SpeculateRequest, pb.DraftFrame, data, limits)
    kind = frame.WhichOneof("body")
    if kind is None:
        raise RemoteProtocolError("a request without a body that we know")
    return DRAFT_DECODERS[kind](getattr(frame, kind), limits)


def decode_target(data: bytes, limits: WireLimits) -> list[TargetMessage]:
    """The messages of one serialised SpeculateResponse; never empty."""
    frame = _unseal(pb.SpeculateResponse, pb.TargetFrame, data, limits)
    kind = frame.WhichOneof("body")
    if kind is None:
        raise RemoteProtocolError("a response without a body that we know")
    return TARGET_DECODERS[kind](getattr(frame, kind), limits)


def check_sendable(message: AnyMessage, limits: WireLimits) -> None:
    """Raise LocalProtocolError for an entry that no message could carry.

    Callers ask before they queue: found later, one long prompt would cost the stream, and again
    after every redial.
    """
    if not isinstance(message, DraftTokens | Verdict | OpenSession):
        return
    num_tokens = len(message.token_ids)
    if num_tokens > limits.max_tokens_per_item:
        raise LocalProtocolError(
            f"{num_tokens} token ids in one entry, at most {limits.max_tokens_per_item} allowed"
        )
    if _item_bytes(message, limits) > limits.max_body_bytes:
        raise LocalProtocolError(
            f"{num_tokens} token ids may not fit a message of {limits.max_message_bytes} bytes"
        )


@dataclass(frozen=True, slots=True)
class Codec(Generic[SendT, ReceiveT]):
    """One end's view of the wire: what it says and what it hears."""

    encode: Callable[[Sequence[SendT]], list[bytes]]
    decode: Callable[[bytes], list[ReceiveT]]
    check_sendable: Callable[[SendT], None]


def draft_codec(limits: WireLimits) -> Codec[DraftMessage, TargetMessage]:
    """For the draft's end."""
    return Codec(
        encode=lambda messages: encode_draft(messages, limits),
        decode=lambda data: decode_target(data, limits),
        check_sendable=lambda message: check_sendable(message, limits),
    )


def target_codec(limits: WireLimits) -> Codec[TargetMessage, DraftMessage]:
    """For the target's end."""
    return Codec(
        encode=lambda messages: encode_target(messages, limits),
        decode=lambda data: decode_draft(data, limits),
        check_sendable=lambda message: check_sendable(message, limits),
    )


def _frames(
    frame_type: type[Frame], messages: Sequence[AnyMessage], limits: WireLimits
) -> Iterator[Frame]:
    """Only neighbours are merged, so the order of a sequence's messages never changes."""
    for kind, run in groupby(messages, type):
        try:
            if kind in BATCHED:
                yield from _batches(frame_type, kind, list(run), limits)
            else:
                yield from _singles(frame_type, kind, list(run))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LocalProtocolError(f"cannot encode {kind.__name__}: {error}") from error


def _singles(frame_type: type[Frame], kind: type, run: Sequence[Any]) -> Iterator[Frame]:
    member, encode = SINGLE[kind]
    for message in run:
        frame = frame_type()
        encode(message, getattr(frame, member))
        yield frame


def _batches(
    frame_type: type[Frame], kind: type, run: Sequence[Any], limits: WireLimits
) -> Iterator[Frame]:
    member, encode = BATCHED[kind]
    for batch in _split(run, limits):
        frame = frame_type()
        items = getattr(frame, member).items
        for message in batch:
            encode(message, items.add())
        yield frame


def _split(run: Sequence[Any], limits: WireLimits) -> Iterator[Sequence[Any]]:
    """Cut where the count or the bytes of one message would be exceeded."""
    first, num_bytes = 0, 0
    for index, message in enumerate(run):
        item_bytes = _item_bytes(message, limits)
        is_full = index - first == limits.max_items_per_message
        if is_full or (index > first and num_bytes + item_bytes > limits.max_body_bytes):
            yield run[first:index]
            first, num_bytes = index, 0
        num_bytes += item_bytes
    yield run[first:]


def _item_bytes(message: AnyMessage, limits: WireLimits) -> int:
    """An upper bound of the encoding of one entry of a batch."""
    match message:
        case OpenSession():
            sampling = message.sampling
            num_bytes = limits.sampling_bytes(
                len(sampling.logit_bias), len(sampling.stop_token_ids), sampling.grammar
            )
            return limits.item_bytes(len(message.token_ids), num_bytes)
        case DraftTokens():
            laws = limits.laws_bytes(len(probs.token_ids) for probs in message.draft_probs)
            return limits.item_bytes(len(message.token_ids), laws)
        case Verdict():
            return limits.item_bytes(len(message.token_ids))
        case _:
            return limits.item_bytes(0)


def _seal(
    outer_type: type[pb.SpeculateRequest] | type[pb.SpeculateResponse],
    frame: pb.DraftFrame | pb.TargetFrame,
) -> bytes:
    body = frame.SerializeToString()
    return outer_type(crc32=zlib.crc32(body), body=body).SerializeToString()


def _unseal(
    outer_type: type[pb.SpeculateRequest] | type[pb.SpeculateResponse],
    frame_type: type[Frame],
    data: bytes,
    limits: WireLimits,
) -> Frame:
    if len(data) > limits.max_message_bytes:
        raise RemoteProtocolError(
            f"a message of {len(data)} bytes, at most {limits.max_message_bytes} allowed"
        )
    try:
        outer = outer_type.FromString(data)
        body = outer.body
        if zlib.crc32(body) != outer.crc32:
            raise RemoteProtocolError("the checksum does not match: the message was damaged")
        return frame_type.FromString(body)
    except DecodeError as error:
        raise RemoteProtocolError(f"not a protobuf message: {error}") from error
