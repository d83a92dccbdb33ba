"""The batched sampler is the pure reference, for any logits, parameters, keys and batch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.keyed_noise import gumbel, make_keys, token_words
from paceline.engine.sampler import BatchedSampler, SampleRow
from paceline.sampling import noise
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import MAX_SEED, MIN_TEMPERATURE, SamplingParams

torch.set_num_threads(1)

LOGIT = st.one_of(
    st.floats(-60, 60, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 3.5, float("-inf")]),  # ties and masks
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(MIN_TEMPERATURE, 100.0)),
    top_k=st.integers(0, 12),
    # values that no sum of a few tied probabilities hits exactly (see test_sampler for ties)
    top_p=st.sampled_from([1.0, 0.9137, 0.4111, 0.0123]),
    seed=st.integers(0, MAX_SEED),
    choice=st.integers(0, 2**24 - 1),
)
ROW = st.builds(SampleRow, PARAMS, st.integers(0, 2**32 - 1))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SampleRow]]:
    vocab_size = draw(st.integers(1, 24))
    row = st.lists(LOGIT, min_size=vocab_size, max_size=vocab_size)
    logits = draw(st.lists(row.filter(lambda r: max(r) > float("-inf")), min_size=1, max_size=6))
    return logits, draw(st.lists(ROW, min_size=len(logits), max_size=len(logits)))


@given(batches())
def test_every_row_gets_the_references_token(
    batch: tuple[list[list[float]], list[SampleRow]],
) -> None:
    logits, rows = batch
    expected = [
        coupled_token(values, row.sampling, row.output_index)
        for values, row in zip(logits, rows, strict=True)
    ]
    assert BatchedSampler().sample(torch.tensor(logits), rows) == expected


@given(
    seed=st.integers(0, MAX_SEED),
    choice=st.integers(0, 2**24 - 1),
    output_index=st.integers(0, 2**32 - 1),
    token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
)
def test_noise_has_the_references_bits(
    seed: int, choice: int, output_index: int, token_ids: list[int]
) -> None:
    keys = make_keys([(seed, choice, output_index)], torch.device("cpu"))
    words = token_words(torch.tensor([token_ids]), keys)
    expected = [noise.noise_word(seed, output_index, v, choice=choice) for v in token_ids]
    assert words[0].tolist() == expected
    bits = [value.hex() for value in gumbel(words)[0].tolist()]
    assert bits == [noise.gumbel(word).hex() for word in expected]
