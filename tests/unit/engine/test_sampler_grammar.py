"""Rows with a grammar in the batched sampler: the reference's tokens, laws and verdicts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from paceline.engine import toy_rules
from paceline.engine.base import Verify
from paceline.engine.rejection import DraftBlock
from paceline.engine.sampler import BatchedSampler, SampleRow
from paceline.engine.toy_rules import ToyRow
from paceline.grammars import allowed_token_ids
from paceline.sampling.params import SamplingParams, VerificationMode

VOCAB_SIZE = 203
INF = float("inf")


def bitmask(token_ids: list[int], num_bytes: int = 26) -> bytes:
    mask = bytearray(num_bytes)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


def params(rng: random.Random, seed: int) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.3)), "seed": seed}
    if rng.random() < 0.5:
        fields |= {
            "repetition_penalty": rng.choice((1.0, 1.3)),
            "presence_penalty": rng.choice((0.0, 0.5)),
            "logit_bias": ((3, 2.0), (90, -100.0)),
            "top_k": rng.choice((0, 3)),
            "top_p": rng.choice((1.0, 0.8)),
            "min_p": rng.choice((0.0, 0.1)),
            "min_tokens": rng.choice((0, 50)),
            "stop_token_ids": (5, 202),
        }
    return SamplingParams(grammar="g" if rng.random() < 0.8 else "", **fields)


def rows_of(rng: random.Random, count: int) -> list[SampleRow]:
    rows = []
    for index in range(count):
        law = params(rng, index)
        output = tuple(rng.choices(range(VOCAB_SIZE), k=rng.randrange(9)))
        mask = None
        if law.grammar and rng.random() < 0.9:
            # some beyond the row, which is shorter than the mask
            mask = bitmask(rng.sample(range(208), rng.choice((1, 1, 2, 20, 150))))
        rows.append(SampleRow(law, len(output), (1, 2, 90), output, bitmask=mask))
    return rows


def twin(logits: list[float], row: SampleRow) -> ToyRow:
    allowed = None if row.bitmask is None else allowed_token_ids(row.bitmask)
    return ToyRow(
        logits,
        row.sampling,
        row.output_index,
        row.prompt_token_ids,
        row.output_token_ids,
        allowed,
    )


def twins(logits: torch.Tensor, rows: list[SampleRow]) -> list[ToyRow]:
    return [twin(values, row) for values, row in zip(logits.double().tolist(), rows, strict=True)]


def random_logits(rng: random.Random, count: int) -> torch.Tensor:
    """Every third row has a few ids alone, as a draft with a cut output layer gives them."""
    torch.manual_seed(rng.randrange(1000))
    logits = torch.randn(count, VOCAB_SIZE) * 3
    for index in range(0, count, 3):
        banned = rng.sample(range(VOCAB_SIZE), VOCAB_SIZE - 10)
        logits[index, banned] = -INF
    return logits


@pytest.mark.parametrize("num_best", [1, 4])
def test_tokens_and_runner_ups_are_the_references(num_best: int) -> None:
    rng = random.Random(num_best)
    for _ in range(5):
        rows = rows_of(rng, 40)
        logits = random_logits(rng, 40)
        expected = [toy_rules.best_tokens(row, num_best) for row in twins(logits, rows)]
        assert BatchedSampler().rank(logits, rows, num_best) == expected
        assert [best[0] for best in expected] == [row.token() for row in twins(logits, rows)]


def test_rows_outside_the_arithmetic_follow_their_grammar() -> None:
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[0, 7] = float("nan")
    logits[1, 9] = INF
    logits[2] = -INF
    logits[3, 150] = INF
    law = SamplingParams(0.0, grammar="g")
    rows = [SampleRow(law, 0, bitmask=bitmask([7, 9, 20])) for _ in range(4)]
    assert BatchedSampler().sample(logits, rows) == [9, 9, 7, 7]
    for mode in (VerificationMode.REJECTION, VerificationMode.BLOCK):
        blocks = [DraftBlock([row], (), Verify(mode, (), 0)) for row in rows]
        ends = BatchedSampler().verify_blocks(logits, blocks)
        assert {token_ids[-1] for token_ids, _ in ends} <= {7, 9, 20}


def test_proposals_and_their_laws_are_the_references() -> None:
    rng = random.Random(3)
    rows = rows_of(rng, 60)
    logits = random_logits(rng, 60)
    tokens, laws = BatchedSampler().propose(logits, rows, range(60))
    num_equal = 0
    for index, row in enumerate(twins(logits, rows)):
        assert laws[index].weight(tokens[index]) > 0
        allowed = {i for i in row.allowed_token_ids or range(VOCAB_SIZE) if i < VOCAB_SIZE}
        assert not allowed or allowed.issuperset(laws[index].token_ids)
        probs = row.probs()
        if len({*probs}) < sum(prob > 0 for prob in probs):
            continue  # which of equally likely ids come first is the device's choice
        assert (tokens[index], laws[index]) == toy_rules.propose(row, index)
        num_equal += 1
    assert num_equal > 30


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.BLOCK])
def test_blocks_are_judged_as_the_reference_does(mode: VerificationMode) -> None:
    """Draft laws with other masks, so that forbidden proposals come in every place."""
    rng, num_forbidden = random.Random(11), 0
    for round in range(60):
        law = params(rng, round)
        output = tuple(rng.choices(range(VOCAB_SIZE), k=3))
        num = rng.randrange(5)
        logits = random_logits(rng, num + 1)
        rows: list[SampleRow] = []
        drafts: list[int] = []
        laws = []
        for index in range(num + 1):
            mask = bitmask(rng.sample(range(VOCAB_SIZE), 60)) if law.grammar else None
            rows.append(SampleRow(law, 3 + index, (1,), (*output, *drafts), bitmask=mask))
            if index < num:
                other = bitmask(rng.sample(range(VOCAB_SIZE), 60))
                drafting = SampleRow(law, 3 + index, (1,), (*output, *drafts), bitmask=other)
                own = rng.choice((drafting, rows[-1]))
                token_id, stated = toy_rules.propose(twin(logits[index].tolist(), own), round)
                drafts.append(token_id)
                laws.append(stated)
                num_forbidden += mask is not None and token_id not in allowed_token_ids(mask)
        rule = Verify(mode, tuple(laws), round)
        expected = toy_rules.verify(twins(logits, rows), drafts, rule)
        token_ids, num_accepted = BatchedSampler().verify(logits, rows, drafts, rule)
        assert num_accepted == expected.num_accepted_tokens
        assert token_ids == (*drafts[:num_accepted], expected.next_token_id)
        for row, token_id in zip(rows, token_ids, strict=False):
            if row.bitmask is not None:
                assert token_id in allowed_token_ids(row.bitmask)
    assert num_forbidden > 20


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    rng = random.Random(5)
    rows, logits = rows_of(rng, 30), random_logits(rng, 30)
    together = BatchedSampler().sample(logits, rows)
    for index, row in enumerate(rows):
        assert BatchedSampler().sample(logits[index : index + 1], [row]) == [together[index]]
