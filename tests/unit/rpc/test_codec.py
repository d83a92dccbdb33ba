"""Every field survives, everything out of range is refused with a sentence."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.config import RpcConfig
from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.protocol.messages import (
    Bye,
    DraftMessage,
    Drain,
    Hello,
    OpenSession,
    TargetMessage,
)
from paceline.rpc.codec import (
    check_sendable,
    decode_draft,
    decode_target,
    encode_draft,
    encode_target,
)
from paceline.rpc.limits import WireLimits
from paceline.rpc.v1 import speculation_pb2 as pb
from paceline.sampling.params import VerificationMode
from tests.rpc import messages as m

LIMITS = WireLimits.from_config(RpcConfig(), m.VOCAB_SIZE)
SMALL = WireLimits(
    vocab_size=m.VOCAB_SIZE, max_message_bytes=2048, max_items_per_message=4, max_tokens_per_item=8
)


def sealed_request(body: bytes) -> bytes:
    return pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()


def sealed_response(body: bytes) -> bytes:
    return pb.SpeculateResponse(crc32=zlib.crc32(body), body=body).SerializeToString()


@pytest.mark.parametrize("message", m.DRAFT_MESSAGES, ids=lambda message: type(message).__name__)
def test_draft_messages_survive(message: DraftMessage) -> None:
    (data,) = encode_draft([message], LIMITS)
    assert decode_draft(data, LIMITS) == [message]


@pytest.mark.parametrize("message", m.TARGET_MESSAGES, ids=lambda message: type(message).__name__)
def test_target_messages_survive(message: TargetMessage) -> None:
    (data,) = encode_target([message], LIMITS)
    assert decode_target(data, LIMITS) == [message]


def test_neighbours_of_a_kind_share_a_message_and_order_is_kept() -> None:
    tokens = [replace(m.DRAFT_TOKENS, session_id=n) for n in range(3)]
    said: list[DraftMessage] = [m.OPENED, *tokens, m.NACK, m.DRAFT_TOKENS]
    data = encode_draft(said, LIMITS)
    assert [len(decode_draft(one, LIMITS)) for one in data] == [1, 3, 1, 1]
    assert [message for one in data for message in decode_draft(one, LIMITS)] == said


def test_nothing_to_say_is_no_message() -> None:
    assert encode_draft([], LIMITS) == []


def test_batches_are_cut_at_the_item_limit() -> None:
    said = [replace(m.NACK, session_id=n) for n in range(9)]
    data = encode_target(said, SMALL)
    assert [len(decode_target(one, SMALL)) for one in data] == [4, 4, 1]


def test_batches_are_cut_at_the_byte_limit() -> None:
    limits = replace(LIMITS, max_message_bytes=64 << 10)
    opened = replace(m.OPEN, token_ids=tuple(n % 1000 for n in range(20_000)), prompt_len=1)
    data = encode_target([opened] * 3, limits)
    assert [len(decode_target(one, limits)) for one in data] == [1, 1, 1]
    assert max(map(len, data)) <= limits.max_message_bytes


def test_the_largest_sendable_entry_fits_a_message() -> None:
    for vocab_size in (2, 128, 129, 16_384, 16_385, 2**21, 2**21 + 1, 2**31 - 1):
        limits = replace(SMALL, vocab_size=vocab_size, max_tokens_per_item=4096)
        num_tokens = 0
        while limits.item_bytes(num_tokens + 1) <= limits.max_body_bytes:
            num_tokens += 1
        largest = replace(
            m.OPEN,
            token_ids=(vocab_size - 1,) * num_tokens,
            limit_position=2**31 - 1,
            sampling=replace(m.OPEN.sampling, logit_bias=(), stop_token_ids=(), grammar=""),
        )
        check_sendable(largest, limits)
        (data,) = encode_target([largest], limits)
        assert len(data) <= limits.max_message_bytes
        assert decode_target(data, limits) == [largest]
        longer = replace(largest, token_ids=(*largest.token_ids, 0))
        with pytest.raises(LocalProtocolError, match="may not fit a message of 2048 bytes"):
            check_sendable(longer, limits)


def test_too_many_tokens_are_not_sendable() -> None:
    check_sendable(replace(m.DRAFT_TOKENS, token_ids=(1,) * 8), SMALL)
    with pytest.raises(LocalProtocolError, match="9 token ids in one entry, at most 8 allowed"):
        check_sendable(replace(m.DRAFT_TOKENS, token_ids=(1,) * 9), SMALL)


@pytest.mark.parametrize(
    "message",
    [
        replace(m.DRAFT_TOKENS, token_ids=(-1,)),
        replace(m.DRAFT_TOKENS, context_hash=2**64),
        replace(m.DRAFT_TOKENS, epoch=-1),
        replace(m.DRAFT_TOKENS, sent_us=1.5),  # type: ignore[arg-type]
        m.VERDICT,
        replace(m.HELLO, boot_id="\ud800"),
    ],
    ids=["token", "hash", "epoch", "float", "wrong side", "surrogate"],
)
def test_our_own_bug_is_loud(message: DraftMessage) -> None:
    with pytest.raises(LocalProtocolError, match="cannot encode"):
        encode_draft([message], LIMITS)


def test_a_long_reason_is_shortened() -> None:
    (data,) = encode_draft([Bye("x" * 5000)], LIMITS)
    assert decode_draft(data, LIMITS) == [Bye("x" * 1024)]


def test_an_unprintable_reason_is_made_printable() -> None:
    (data,) = encode_draft([Bye("two\nlines\ud800")], LIMITS)
    assert decode_draft(data, LIMITS) == [Bye("two lines ")]


def spoil_draft(change: Callable[[pb.DraftFrame], object], *said: DraftMessage) -> bytes:
    (data,) = encode_draft(said, LIMITS)
    frame = pb.DraftFrame.FromString(pb.SpeculateRequest.FromString(data).body)
    change(frame)
    return sealed_request(frame.SerializeToString())


def spoil_target(change: Callable[[pb.TargetFrame], object], *said: TargetMessage) -> bytes:
    (data,) = encode_target(said, LIMITS)
    frame = pb.TargetFrame.FromString(pb.SpeculateResponse.FromString(data).body)
    change(frame)
    return sealed_response(frame.SerializeToString())


def setter(member: str, field: str, value: object) -> Callable[[object], None]:
    """Set a field of the only entry (or the only message) of a frame."""

    def change(frame: object) -> None:
        body = getattr(frame, member)
        entry = body.items[0] if hasattr(body, "items") else body
        if isinstance(value, list):
            del getattr(entry, field)[:]
            getattr(entry, field).extend(value)
        else:
            setattr(entry, field, value)

    return change


DRAFT_OFFENCES = [
    (m.DRAFT_TOKENS, "draft_tokens", "token_ids", [0, 1000], "outside the vocabulary of 1000"),
    (m.DRAFT_TOKENS, "draft_tokens", "token_ids", [2**32 - 1], "token id 4294967295 is outside"),
    (m.DRAFT_TOKENS, "draft_tokens", "token_ids", [], "an entry without token ids"),
    (m.DRAFT_TOKENS, "draft_tokens", "start", 2**31 - 1, "positions 2147483647 \\+ 3 exceed"),
    (m.DRAFT_TOKENS, "draft_tokens", "last_round", 2**53, "last_round must be in"),
    (m.DRAFT_TOKENS, "draft_tokens", "draft_us", 2**53, "draft_us must be in"),
    (m.DRAFT_TOKENS, "draft_tokens", "sent_us", 2**64 - 1, "sent_us must be in"),
    (m.OPENED, "opened", "status", 0, "open status 0 is not known"),
    (m.OPENED, "opened", "status", 4, "open status 4 is not known"),
    (m.NACK, "nack", "have_len", 2**31, "have_len must be in"),
    (m.CLOSE, "close_session", "reason", 0, "close reason 0 is not known"),
    (m.CLOSE, "close_session", "reason", -1, "close reason -1 is not known"),
    (m.PING, "ping", "sent_us", 2**53, "sent_us must be in"),
    (m.PING, "ping", "num_sessions", 2**31, "num_sessions must be in"),
    (m.PING, "ping", "queue_len", 2**31, "queue_len must be in"),
    (m.PONG, "pong", "ping_sent_us", 2**53, "ping_sent_us must be in"),
    (m.PONG, "pong", "received_us", 2**53, "received_us must be in"),
    (Bye("x"), "bye", "reason", "x" * 1025, "a Bye of more than 1024 characters"),
    (Bye("x"), "bye", "reason", "x\nERROR forged", "the reason of a Bye must be printable"),
    (m.HELLO, "hello", "boot_id", "x\ny", "boot_id must be printable"),
    (m.HELLO, "hello", "boot_id", "", "boot_id must have 1 to 256 characters, got 0"),
    (m.HELLO, "hello", "replica_id", "x" * 257, "replica_id must have 1 to 256 characters"),
    (m.HELLO, "hello", "model_id", "", "model_id must have"),
    (m.HELLO, "hello", "tokenizer_hash", "x" * 300, "tokenizer_hash must have"),
    (m.HELLO, "hello", "vocab_size", 0, "vocab_size must be in"),
    (m.HELLO, "hello", "vocab_size", 2**31, "vocab_size must be in"),
    (m.HELLO, "hello", "max_model_len", 0, "max_model_len must be in"),
    (m.HELLO, "hello", "max_sessions", 0, "max_sessions must be in"),
    (m.HELLO, "hello", "modes", [1] * 17, "17 modes, at most 16 allowed"),
]
TARGET_OFFENCES = [
    (m.VERDICT, "verdict", "token_ids", [1000], "outside the vocabulary of 1000"),
    (m.VERDICT, "verdict", "token_ids", [], "an entry without token ids"),
    (m.VERDICT, "verdict", "start", 2**32 - 1, "positions 4294967295 \\+ 3 exceed"),
    (m.VERDICT, "verdict", "num_accepted_tokens", 4, "num_accepted_tokens must be in \\[0, 3\\]"),
    (m.VERDICT, "verdict", "limit_position", 2**31, "limit_position must be in"),
    (m.VERDICT, "verdict", "round", 2**53, "round must be in"),
    (m.VERDICT, "verdict", "queue_us", 2**53, "queue_us must be in"),
    (m.VERDICT, "verdict", "verify_us", 2**53, "verify_us must be in"),
    (m.VERDICT, "verdict", "trace_context", b"x", "a trace context of 1 bytes, 0 or 25 expected"),
    (m.VERDICT, "verdict", "trace_context", b"x" * 26, "a trace context of 26 bytes"),
    (m.OPEN, "open_session", "token_ids", [5, 0, 1000], "outside the vocabulary of 1000"),
    (m.OPEN, "open_session", "token_ids", [], "an entry without token ids"),
    (m.OPEN, "open_session", "prompt_len", 0, "prompt_len must be in \\[1, 3\\], got 0"),
    (m.OPEN, "open_session", "prompt_len", 4, "prompt_len must be in \\[1, 3\\], got 4"),
    (m.OPEN, "open_session", "mode", 0, "verification mode 0 is not known"),
    (m.OPEN, "open_session", "mode", 5, "verification mode 5 is not known"),
    (m.OPEN, "open_session", "limit_position", 2**31, "limit_position must be in"),
    (m.WELCOME, "welcome", "boot_id", "", "boot_id must have"),
    (m.WELCOME, "welcome", "replica_id", "", "replica_id must have"),
    (m.WELCOME, "welcome", "model_id", "x" * 257, "model_id must have"),
    (m.WELCOME, "welcome", "tokenizer_hash", "", "tokenizer_hash must have"),
    (m.WELCOME, "welcome", "vocab_size", 0, "vocab_size must be in"),
]
SAMPLING_OFFENCES = [
    ("temperature", float("nan"), "temperature must be in"),
    ("temperature", float("inf"), "temperature must be in"),
    ("temperature", -0.1, "temperature must be in"),
    ("temperature", 100.1, "temperature must be in"),
    ("temperature", 1e-310, "temperature must be 0 or at least 1e-05"),
    ("top_p", float("nan"), "top_p must be in"),
    ("top_p", 0.0, "top_p must be in"),
    ("top_p", 1.1, "top_p must be in"),
    ("top_k", 2**31, "top_k must be"),
    ("choice", 2**24, "choice must be a u24"),
    ("min_p", 1.1, "min_p must be in"),
    ("min_p", float("nan"), "min_p must be in"),
    ("presence_penalty", 2.1, "presence_penalty must be in"),
    ("presence_penalty", float("nan"), "presence_penalty must be in"),
    ("frequency_penalty", -2.1, "frequency_penalty must be in"),
    ("repetition_penalty", 0.0, "repetition_penalty must be in"),
    ("repetition_penalty", float("inf"), "repetition_penalty must be in"),
    ("min_tokens", 2**31, "min_tokens must be"),
]


@pytest.mark.parametrize(("message", "member", "field", "value", "sentence"), DRAFT_OFFENCES)
def test_draft_offences_are_refused(
    message: DraftMessage, member: str, field: str, value: object, sentence: str
) -> None:
    data = spoil_draft(setter(member, field, value), message)
    with pytest.raises(RemoteProtocolError, match=sentence):
        decode_draft(data, LIMITS)


@pytest.mark.parametrize(("message", "member", "field", "value", "sentence"), TARGET_OFFENCES)
def test_target_offences_are_refused(
    message: TargetMessage, member: str, field: str, value: object, sentence: str
) -> None:
    data = spoil_target(setter(member, field, value), message)
    with pytest.raises(RemoteProtocolError, match=sentence):
        decode_target(data, LIMITS)


@pytest.mark.parametrize(("field", "value", "sentence"), SAMPLING_OFFENCES)
def test_sampling_offences_are_refused(field: str, value: float, sentence: str) -> None:
    def change(frame: pb.TargetFrame) -> None:
        setattr(frame.open_session.items[0].sampling, field, value)

    with pytest.raises(RemoteProtocolError, match=sentence):
        decode_target(spoil_target(change, m.OPEN), LIMITS)


def test_an_older_target_gives_no_salt() -> None:
    data = spoil_target(lambda frame: frame.open_session.items[0].ClearField("cache_salt"), m.OPEN)
    assert decode_target(data, LIMITS) == [replace(m.OPEN, cache_salt=0)]
    assert m.OPEN.cache_salt != 0


@pytest.mark.parametrize("salt", [-1, 2**64])
def test_a_salt_that_is_no_u64_is_our_own_bug(salt: int) -> None:
    with pytest.raises(LocalProtocolError, match="cannot encode OpenSession"):
        encode_target([replace(m.OPEN, cache_salt=salt)], LIMITS)


def test_sampling_is_required() -> None:
    data = spoil_target(lambda f: f.open_session.items[0].ClearField("sampling"), m.OPEN)
    with pytest.raises(RemoteProtocolError, match="without sampling parameters"):
        decode_target(data, LIMITS)


def test_one_bad_entry_costs_the_whole_message() -> None:
    def change(frame: pb.DraftFrame) -> None:
        frame.draft_tokens.items[1].token_ids.append(5000)

    with pytest.raises(RemoteProtocolError, match="token id 5000"):
        decode_draft(spoil_draft(change, m.DRAFT_TOKENS, m.DRAFT_TOKENS), LIMITS)


def test_modes_from_the_future_are_skipped() -> None:
    data = spoil_draft(setter("hello", "modes", [77, 2]), m.HELLO)
    (hello,) = decode_draft(data, LIMITS)
    assert isinstance(hello, Hello)
    assert hello.modes == (VerificationMode.COUPLED,)


def test_a_version_2_hello_is_decoded_so_that_it_gets_its_sentence() -> None:
    hello = replace(m.HELLO, protocol_version=2, vocab_size=5, tokenizer_hash="other")
    (data,) = encode_draft([hello], LIMITS)
    assert decode_draft(data, LIMITS) == [hello]


@pytest.mark.parametrize("member", ["opened", "draft_tokens", "nack", "close_session"])
def test_list_lengths_are_checked(member: str) -> None:
    empty, huge = pb.DraftFrame(), pb.DraftFrame()
    getattr(empty, member).SetInParent()
    for _ in range(1025):
        getattr(huge, member).items.add()
    with pytest.raises(RemoteProtocolError, match="a batch without entries"):
        decode_draft(sealed_request(empty.SerializeToString()), LIMITS)
    with pytest.raises(RemoteProtocolError, match="a batch of 1025 entries, at most 1024 allowed"):
        decode_draft(sealed_request(huge.SerializeToString()), LIMITS)


def test_too_many_tokens_are_refused() -> None:
    longer = replace(m.OPEN, token_ids=(1,) * 9, prompt_len=9)
    (data,) = encode_target([longer], LIMITS)
    assert decode_target(data, LIMITS) == [longer]
    with pytest.raises(RemoteProtocolError, match="an entry with 9 token ids, at most 8 allowed"):
        decode_target(data, SMALL)


def test_oversize_is_refused_before_parsing() -> None:
    with pytest.raises(RemoteProtocolError, match="a message of 2049 bytes, at most 2048 allowed"):
        decode_draft(bytes(2049), SMALL)


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"\x0a", bytes(64)])
def test_junk_is_refused(data: bytes) -> None:
    for decode in (decode_draft, decode_target):
        with pytest.raises(RemoteProtocolError):
            decode(data, LIMITS)


def test_junk_under_a_right_checksum_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="not a protobuf message"):
        decode_draft(sealed_request(b"\xff\xff\xff"), LIMITS)
    with pytest.raises(RemoteProtocolError, match="without a body that we know"):
        decode_draft(sealed_request(b""), LIMITS)
    future = b"\xd2\x0f\x00"  # member 250, empty
    with pytest.raises(RemoteProtocolError, match="without a body that we know"):
        decode_target(sealed_response(future), LIMITS)


@pytest.mark.parametrize("message", m.DRAFT_MESSAGES, ids=lambda message: type(message).__name__)
def test_every_single_bit_flip_is_caught(message: DraftMessage) -> None:
    (data,) = encode_draft([message], LIMITS)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            decode_draft(bytes(damaged), LIMITS)


@pytest.mark.parametrize("message", m.TARGET_MESSAGES, ids=lambda message: type(message).__name__)
def test_every_truncation_is_caught(message: TargetMessage) -> None:
    (data,) = encode_target([message], LIMITS)
    for length in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode_target(data[:length], LIMITS)


def test_default_values_survive() -> None:
    plain = OpenSession(
        session_id=0,
        epoch=0,
        prompt_len=1,
        token_ids=(0,),
        sampling=replace(m.OPEN.sampling, temperature=0.0, top_k=0, seed=0, choice=0),
        mode=VerificationMode.GREEDY,
        limit_position=0,
    )
    verdict = replace(
        m.VERDICT, session_id=0, token_ids=(0,), num_accepted_tokens=0, trace_context=b""
    )
    data = encode_target([plain, verdict, Drain(), Bye()], LIMITS)
    decoded = [message for one in data for message in decode_target(one, LIMITS)]
    assert decoded == [plain, verdict, Drain(), Bye()]
