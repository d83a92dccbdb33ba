"""Laws of proposals and sampling lists on the wire: what survives, what is refused, what fits."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.config import RpcConfig
from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.protocol.messages import DraftTokens, OpenSession
from paceline.rpc.codec import (
    check_sendable,
    decode_draft,
    decode_target,
    encode_draft,
    encode_target,
)
from paceline.rpc.limits import WireLimits
from paceline.rpc.v1 import speculation_pb2 as pb
from paceline.sampling.params import (
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from paceline.sampling.sparse_probs import MAX_ENTRIES, TOTAL_WEIGHT, SparseProbs
from tests.rpc import messages as m

LIMITS = WireLimits.from_config(RpcConfig(), m.VOCAB_SIZE)
SMALLEST = WireLimits.from_config(RpcConfig(max_message_bytes=64 << 10), 2**31 - 1)

Law = tuple[list[int], list[int]]
GOOD: Law = ([1, 2], [65535, 1])


def with_laws(*laws: Law) -> bytes:
    """`m.DRAFT_TOKENS` (three proposals) with these distributions."""
    (data,) = encode_draft([m.DRAFT_TOKENS], LIMITS)
    frame = pb.DraftFrame.FromString(pb.SpeculateRequest.FromString(data).body)
    for token_ids, weights in laws:
        frame.draft_tokens.items[0].distributions.add(token_ids=token_ids, weights=weights)
    body = frame.SerializeToString()
    return pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()


def with_sampling(change: Callable[[pb.Sampling], object]) -> bytes:
    (data,) = encode_target([m.OPEN], LIMITS)
    frame = pb.TargetFrame.FromString(pb.SpeculateResponse.FromString(data).body)
    change(frame.open_session.items[0].sampling)
    body = frame.SerializeToString()
    return pb.SpeculateResponse(crc32=zlib.crc32(body), body=body).SerializeToString()


def widest_law(first_id: int = 0) -> SparseProbs:
    ids = tuple(range(first_id, first_id + MAX_ENTRIES))
    return SparseProbs(ids, (TOTAL_WEIGHT - MAX_ENTRIES + 1, *(1,) * (MAX_ENTRIES - 1)))


def opened(data: bytes) -> SamplingParams:
    (message,) = decode_target(data, LIMITS)
    assert isinstance(message, OpenSession)
    return message.sampling


class TestLaws:
    def test_one_per_proposal(self) -> None:
        (message,) = decode_draft(with_laws(GOOD, GOOD, GOOD), LIMITS)
        law = SparseProbs((1, 2), (65535, 1))
        assert message == replace(m.DRAFT_TOKENS, draft_probs=(law, law, law))

    def test_as_many_entries_as_a_law_may_have(self) -> None:
        said = replace(m.DRAFT_TOKENS, draft_probs=(widest_law(),) * 3)
        (data,) = encode_draft([said], LIMITS)
        assert decode_draft(data, LIMITS) == [said]

    @pytest.mark.parametrize("num", [1, 2, 4])
    def test_another_number_of_laws(self, num: int) -> None:
        with pytest.raises(RemoteProtocolError, match=f"{num} distributions for 3 token ids"):
            decode_draft(with_laws(*[GOOD] * num), LIMITS)

    @pytest.mark.parametrize(
        ("bad", "sentence"),
        [
            (([], []), "need 1 to 64 entries, got 0"),
            ((list(range(65)), [65472] + [1] * 64), "need 1 to 64 entries, got 65"),
            (([1, 2], [65536]), "2 ids but 1 weights"),
            (([1], [65535, 1]), "1 ids but 2 weights"),
            (([1, 1], [65535, 1]), "must be distinct"),
            (([1, 2], [65536, 0]), "weights must be positive"),
            (([1, 2], [65535, 2]), "sum to 65536"),
            (([1], [2**32 - 1]), "sum to 65536"),
            (([1, 1000], [65535, 1]), "token id 1000 is outside the vocabulary of 1000"),
            (([2**32 - 1], [65536]), "token id 4294967295 is outside"),
        ],
    )
    @pytest.mark.parametrize("place", range(3))
    def test_what_is_no_law(self, place: int, bad: Law, sentence: str) -> None:
        laws = [GOOD] * 3
        laws[place] = bad
        with pytest.raises(RemoteProtocolError, match=sentence):
            decode_draft(with_laws(*laws), LIMITS)

    def test_batches_count_the_bytes_of_laws(self) -> None:
        big = replace(
            m.DRAFT_TOKENS,
            token_ids=(2**31 - 65,) * 64,
            draft_probs=(widest_law(2**31 - 65),) * 64,
        )
        check_sendable(big, SMALLEST)
        data = encode_draft([big, big, big], SMALLEST)
        assert [len(decode_draft(one, SMALLEST)) for one in data] == [1, 1, 1]
        assert max(map(len, data)) <= SMALLEST.max_message_bytes

    def test_more_laws_than_a_message_holds_are_not_sendable(self) -> None:
        def proposals(num: int) -> DraftTokens:
            return replace(m.DRAFT_TOKENS, token_ids=(5,) * num, draft_probs=(widest_law(),) * num)

        num = 64
        while SMALLEST.item_bytes(num + 1, SMALLEST.laws_bytes([64] * (num + 1))) <= (
            SMALLEST.max_body_bytes
        ):
            num += 1
        check_sendable(proposals(num), SMALLEST)
        with pytest.raises(LocalProtocolError, match=f"{num + 1} token ids may not fit a message"):
            check_sendable(proposals(num + 1), SMALLEST)


class TestSampling:
    def test_what_an_older_peer_does_not_say_is_off(self) -> None:
        """Only the five fields that the first protocol had."""

        def forget(sampling: pb.Sampling) -> None:
            for field in list(sampling.DESCRIPTOR.fields):
                if field.number > 5:
                    sampling.ClearField(field.name)

        first = m.OPEN.sampling
        assert opened(with_sampling(forget)) == SamplingParams(
            temperature=first.temperature,
            top_p=first.top_p,
            top_k=first.top_k,
            seed=first.seed,
            choice=first.choice,
        )

    def test_off_takes_no_bytes(self) -> None:
        plain = replace(m.OPEN, sampling=SamplingParams(temperature=1.0))
        (data,) = encode_target([plain], LIMITS)
        frame = pb.TargetFrame.FromString(pb.SpeculateResponse.FromString(data).body)
        set_fields = frame.open_session.items[0].sampling.ListFields()
        assert {field.name for field, _ in set_fields} == {"temperature", "top_p"}
        assert opened(data) == plain.sampling

    def test_as_much_as_there_may_be(self) -> None:
        limits = replace(LIMITS, vocab_size=2000)
        biases = tuple((token_id, -99.5) for token_id in range(MAX_LOGIT_BIASES))
        stops = tuple(range(MAX_STOP_TOKEN_IDS))
        sampling = SamplingParams(logit_bias=biases, stop_token_ids=stops, repetition_penalty=10.0)
        said = replace(m.OPEN, sampling=sampling)
        (data,) = encode_target([said], limits)
        assert decode_target(data, limits) == [said]

    @pytest.mark.parametrize(
        ("ids", "biases", "sentence"),
        [
            ([1, 2], [0.5], "1 logit biases for 2 token ids"),
            ([1], [0.5, 0.5], "2 logit biases for 1 token ids"),
            ([1, 1], [0.5, 0.5], "distinct token ids in ascending order"),
            ([2, 1], [0.5, 0.5], "distinct token ids in ascending order"),
            ([1000], [0.5], "token id 1000 is outside the vocabulary of 1000"),
            ([1], [100.5], "a logit bias must be in"),
            ([1], [float("nan")], "a logit bias must be in"),
            (list(range(1000)) * 2, [0.0] * 2000, "too many logit biases"),
        ],
    )
    def test_biases_that_are_none(self, ids: list[int], biases: list[float], sentence: str) -> None:
        def change(sampling: pb.Sampling) -> None:
            sampling.logit_bias_token_ids[:] = ids
            sampling.logit_biases[:] = biases

        with pytest.raises(RemoteProtocolError, match=sentence):
            decode_target(with_sampling(change), LIMITS)

    @pytest.mark.parametrize(
        ("ids", "sentence"),
        [
            ([5, 1000], "token id 1000 is outside the vocabulary of 1000"),
            ([5] * (MAX_STOP_TOKEN_IDS + 1), "too many logit biases or stop token ids"),
        ],
    )
    def test_stop_ids_that_are_none(self, ids: list[int], sentence: str) -> None:
        def change(sampling: pb.Sampling) -> None:
            sampling.stop_token_ids[:] = ids

        with pytest.raises(RemoteProtocolError, match=sentence):
            decode_target(with_sampling(change), LIMITS)

    def test_as_long_a_grammar_as_there_may_be(self) -> None:
        grammar = "\U0001f600" * MAX_GRAMMAR_CHARS
        said = replace(m.OPEN, sampling=replace(m.OPEN.sampling, grammar=grammar))
        (data,) = encode_target([said], LIMITS)
        assert decode_target(data, LIMITS) == [said]

        def lengthen(sampling: pb.Sampling) -> None:
            sampling.grammar = grammar + "x"

        with pytest.raises(RemoteProtocolError, match="at most 131072 characters"):
            decode_target(with_sampling(lengthen), LIMITS)

    @pytest.mark.parametrize("char", ["x", "é", "\U0001f600"])
    def test_batches_count_the_bytes_of_grammars(self, char: str) -> None:
        grammar = char * 9000
        heavy = replace(m.OPEN, sampling=replace(m.OPEN.sampling, grammar=grammar))
        check_sendable(heavy, SMALLEST)
        data = encode_target([heavy] * 9, SMALLEST)
        assert [one for each in data for one in decode_target(each, SMALLEST)] == [heavy] * 9
        assert 1 < len(data) <= 9
        assert max(map(len, data)) <= SMALLEST.max_message_bytes
        with pytest.raises(LocalProtocolError, match="may not fit a message"):
            check_sendable(
                replace(heavy, sampling=replace(heavy.sampling, grammar=8 * grammar)), SMALLEST
            )

    def test_batches_count_the_bytes_of_lists(self) -> None:
        biases = tuple((2**31 - 2000 + i, 0.1) for i in range(MAX_LOGIT_BIASES))
        stops = (2**31 - 2,) * MAX_STOP_TOKEN_IDS
        sampling = replace(m.OPEN.sampling, logit_bias=biases, stop_token_ids=stops)
        heavy = replace(m.OPEN, sampling=sampling)
        check_sendable(heavy, SMALLEST)
        data = encode_target([heavy] * 9, SMALLEST)
        assert sum(len(decode_target(one, SMALLEST)) for one in data) == 9
        assert len(data) == 3
        assert max(map(len, data)) <= SMALLEST.max_message_bytes
        longest = replace(heavy, token_ids=(1,) * 12_000)
        check_sendable(replace(longest, sampling=m.OPEN.sampling), SMALLEST)
        with pytest.raises(LocalProtocolError, match="12000 token ids may not fit a message"):
            check_sendable(longest, SMALLEST)
