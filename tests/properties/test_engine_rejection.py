"""Verification by stated laws in torch is the pure reference, fed with the same keyed noise.

Probabilities are rounded differently in the two (exp and the order of sums), by about 1e-15. A
decision differs only where a uniform falls into such a gap, which no test will ever meet, except
where laws are equal on purpose: those cases have their own tests below.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.base import Verify
from paceline.engine.rejection import DraftBlock
from paceline.engine.sampler import BatchedSampler, SampleRow
from paceline.errors import LocalProtocolError
from paceline.sampling.acceptance import accept_block, accept_rejection
from paceline.sampling.noise import Purpose, exponential, noise_word, noise_words, unit
from paceline.sampling.params import MAX_SEED, SamplingParams, VerificationMode
from paceline.sampling.processors import process_logits, softmax
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs, quantize_probs

torch.set_num_threads(1)

RULES = {VerificationMode.REJECTION: accept_rejection, VerificationMode.BLOCK: accept_block}
UNIFORMS = {
    VerificationMode.REJECTION: Purpose.ACCEPT_UNIFORM,
    VerificationMode.BLOCK: Purpose.BLOCK_UNIFORM,
}
MODES = st.sampled_from(list(RULES))


def reference_verify(logits: torch.Tensor, block: DraftBlock) -> tuple[tuple[int, ...], int]:
    rows, rule = block.rows, block.rule
    probs = [
        softmax(process_logits(values, row.sampling, row.prompt_token_ids, row.output_token_ids))
        for values, row in zip(logits.double().tolist(), rows, strict=True)
    ]

    def words(row: SampleRow, token_ids: range, purpose: Purpose) -> list[int]:
        return noise_words(
            row.sampling.seed,
            row.output_index,
            token_ids,
            choice=row.sampling.choice,
            purpose=purpose,
            round=rule.round,
        )

    uniforms = [unit(words(row, range(1), UNIFORMS[rule.mode])[0]) for row in rows[:-1]]
    every_id = range(logits.shape[1])
    noise = [[exponential(w) for w in words(row, every_id, Purpose.RESIDUAL)] for row in rows]
    got = RULES[rule.mode](block.draft_token_ids, rule.draft_probs, probs, uniforms, noise)
    accepted = block.draft_token_ids[: got.num_accepted_tokens]
    return (*accepted, got.next_token_id), got.num_accepted_tokens


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    def pick(*values: float) -> float:
        return rng.choice(values)

    ids = sorted(rng.sample(range(vocab_size), min(2, vocab_size)))
    return SamplingParams(
        temperature=pick(0.0, 0.3, 1.0, 1.0, 5.0),
        top_k=int(pick(0, 0, 2, 6)),
        top_p=pick(1.0, 1.0, 0.9137),
        min_p=pick(0.0, 0.0, 0.07),
        seed=rng.randint(0, MAX_SEED),
        choice=rng.getrandbits(24),
        presence_penalty=pick(0.0, 0.0, 0.9),
        frequency_penalty=pick(0.0, 0.0, -0.4),
        repetition_penalty=pick(1.0, 1.0, 1.3),
        logit_bias=tuple((i, rng.uniform(-3, 3)) for i in ids) if rng.random() < 0.3 else (),
        min_tokens=int(pick(0, 0, 6)),
        stop_token_ids=(ids[0],),
    )


def random_law(rng: random.Random, values: list[float]) -> SparseProbs:
    """Near the target's law, or anything; sometimes with ids that the target does not have."""
    kind = rng.random()
    if kind < 0.6:
        probs = softmax([logit + rng.gauss(0, 0.5) for logit in values])
        return quantize_probs(probs, rng.randint(1, 64), 0.01)
    if kind < 0.7:
        return SparseProbs((rng.randrange(len(values)),), (TOTAL_WEIGHT,))
    token_ids = rng.sample(range(len(values)), rng.randint(1, min(6, len(values))))
    if kind < 0.8:
        token_ids.append(len(values) + 3)
    cuts = sorted(rng.sample(range(1, TOTAL_WEIGHT), len(token_ids) - 1))
    weights = [b - a for a, b in zip([0, *cuts], [*cuts, TOTAL_WEIGHT], strict=True)]
    return SparseProbs(tuple(token_ids), tuple(weights))


def random_block(
    rng: random.Random, mode: VerificationMode, vocab_size: int
) -> tuple[torch.Tensor, DraftBlock]:
    num = rng.randint(0, 5)
    params = random_params(rng, vocab_size)
    logits = torch.tensor([[rng.gauss(0, 2) for _ in range(vocab_size)] for _ in range(num + 1)])
    prompt = tuple(rng.randrange(vocab_size) for _ in range(4))
    output = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 6))]
    output_index = len(output)
    rows, draft_token_ids, laws = [], [], []
    for i, values in enumerate(logits.tolist()):
        rows.append(SampleRow(params, output_index + i, prompt, tuple(output)))
        if i < num:
            laws.append(random_law(rng, values))
            token_id = laws[i].draw(rng.getrandbits(16))
            if token_id >= vocab_size:
                token_id = next(t for t in laws[i].token_ids if t < vocab_size)
            draft_token_ids.append(token_id)
            output.append(token_id)
    return logits, DraftBlock(rows, draft_token_ids, Verify(mode, tuple(laws), rng.getrandbits(32)))


@given(st.integers(0, 2**64), MODES, st.integers(1, 70), st.integers(1, 6))
def test_every_block_ends_as_in_the_reference(
    seed: int, mode: VerificationMode, vocab_size: int, num_blocks: int
) -> None:
    rng = random.Random(seed)
    cases = [random_block(rng, mode, vocab_size) for _ in range(num_blocks)]
    expected = [reference_verify(_with_room(logits), block) for logits, block in cases]
    blocks = [block for _, block in cases]
    together = BatchedSampler().verify_blocks(torch.cat([logits for logits, _ in cases]), blocks)
    assert together == expected
    for (logits, block), want in zip(cases, expected, strict=True):
        got = BatchedSampler().verify(logits, block.rows, block.draft_token_ids, block.rule)
        assert got == want


@pytest.mark.parametrize("mode", list(RULES))
def test_many_small_blocks_end_as_in_the_reference(mode: VerificationMode) -> None:
    """Enough of them for what is rare: blocks that end inside, at a scale below 1."""
    rng = random.Random(9)
    cases = [random_block(rng, mode, vocab_size=6) for _ in range(1500)]
    blocks = [block for _, block in cases]
    got = BatchedSampler().verify_blocks(torch.cat([logits for logits, _ in cases]), blocks)
    assert got == [reference_verify(_with_room(logits), block) for logits, block in cases]
    assert {num_accepted for _, num_accepted in got} == set(range(6))


def _with_room(logits: torch.Tensor) -> torch.Tensor:
    """Columns for the ids that only a draft has; the reference wants a weight for every id."""
    return torch.nn.functional.pad(logits, (0, 4), value=float("-inf"))


@given(st.integers(0, 2**64), st.integers(1, 200))
def test_proposals_come_from_the_law_that_is_stated(seed: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    values = [[rng.gauss(0, 2) for _ in range(vocab_size)] for _ in range(4)]
    rows = [
        SampleRow(random_params(rng, vocab_size), rng.getrandbits(32), (0,), (0, 0)) for _ in values
    ]
    rounds = [rng.getrandbits(32) for _ in rows]
    logits = torch.tensor(values)
    token_ids, laws = BatchedSampler().propose(logits, rows, rounds)
    for i, (row, law, round) in enumerate(zip(rows, laws, rounds, strict=True)):
        word = noise_word(
            row.sampling.seed,
            row.output_index,
            0,
            choice=row.sampling.choice,
            purpose=Purpose.DRAFT_PROPOSAL,
            round=round,
        )
        assert token_ids[i] == law.draw(word >> 16)
        probs = softmax(process_logits(logits[i].double().tolist(), row.sampling, (0,), (0, 0)))
        want = quantize_probs(probs, max_dropped_mass=0.01)
        assert law.token_ids == want.token_ids
        # a remainder that ties is rounded up for one id or the other
        assert all(abs(a - b) <= 1 for a, b in zip(law.weights, want.weights, strict=True))


@pytest.mark.parametrize("mode", list(RULES))
def test_equal_laws_accept_everything_and_fall_back_to_the_target(mode: VerificationMode) -> None:
    """Dyadic laws, equal in both: each proposal stays, whatever the uniforms are."""
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0]] * 4)
    even = SparseProbs((0, 1, 2, 3), (TOTAL_WEIGHT // 4,) * 4)
    for seed in range(200):
        rows = [SampleRow(SamplingParams(seed=seed), i) for i in range(4)]
        rule = Verify(mode, (even,) * 3, seed)
        committed, num_accepted = BatchedSampler().verify(logits, rows, [3, 0, 1], rule)
        assert (committed[:3], num_accepted) == ((3, 0, 1), 3)


@pytest.mark.parametrize("mode", list(RULES))
def test_a_token_the_target_excludes_is_never_accepted_nor_chosen(mode: VerificationMode) -> None:
    """Peers no. 6: top_p = .1 leaves one id; a draft that proposes another never gets it in."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    third = SparseProbs((2,), (TOTAL_WEIGHT,))
    for seed in range(200):
        rows = [SampleRow(SamplingParams(seed=seed, top_p=0.1), i) for i in range(3)]
        rule = Verify(mode, (third, third), 5)
        assert BatchedSampler().verify(logits, rows, [2, 2], rule) == ((0,), 0)


@pytest.mark.parametrize("mode", list(RULES))
def test_odd_target_rows_commit_something_and_hurt_no_other_block(mode: VerificationMode) -> None:
    inf, nan = float("inf"), float("nan")
    good = torch.tensor([[0.5, 3.0, 2.0, 1.0]] * 3)
    even = SparseProbs((0, 1, 2, 3), (TOTAL_WEIGHT // 4,) * 4)
    rule = Verify(mode, (even, even), 2)
    rows = [SampleRow(SamplingParams(seed=8, min_tokens=9, stop_token_ids=(0,)), 0)] * 3
    block = DraftBlock(rows, [1, 2], rule)
    sampler = BatchedSampler()
    for odd in ([nan] * 4, [-inf] * 4, [inf, 1.0, -inf, nan], [-inf, inf, 0.0, 0.0]):
        logits = torch.cat((torch.tensor([odd] * 3), good))
        first, second = sampler.verify_blocks(logits, [block, block])
        assert all(0 <= token_id < 4 for token_id in first[0])
        assert second == BatchedSampler().verify(good, rows, [1, 2], rule)
        token_ids, laws = sampler.propose(logits, [*rows, *rows], [1] * 6)
        assert all(law.weight(t) > 0 for t, law in zip(token_ids, laws, strict=True))
    assert sampler.num_bad_rows == 18


def test_what_no_session_lets_through_is_our_own_bug() -> None:
    even = SparseProbs((0, 1), (TOTAL_WEIGHT // 2,) * 2)
    rows = [SampleRow(SamplingParams(), i) for i in range(2)]
    logits = torch.zeros(2, 4)
    rejection = VerificationMode.REJECTION
    with pytest.raises(LocalProtocolError, match="no mass"):
        BatchedSampler().verify(logits, rows, [3], Verify(rejection, (even,), 0))
    with pytest.raises(LocalProtocolError, match="do not fit"):
        BatchedSampler().verify(logits, rows, [1], Verify(rejection, (even, even), 0))
    with pytest.raises(LocalProtocolError, match="stated laws"):
        BatchedSampler().verify(logits, rows, [1], Verify(VerificationMode.COUPLED, (even,), 0))


def test_a_law_leaves_out_one_percent_at_most_unless_64_entries_are_too_few() -> None:
    rows = [SampleRow(SamplingParams(seed=1), 0)]
    flat = torch.zeros(1, 1000)
    peaked = torch.zeros(1, 1000)
    peaked[0, 17] = 20.0
    (_, (wide,)), (_, (narrow,)) = (
        BatchedSampler().propose(logits, rows, [0]) for logits in (flat, peaked)
    )
    assert len(wide.token_ids) == 64
    assert narrow == SparseProbs((17,), (TOTAL_WEIGHT,))
