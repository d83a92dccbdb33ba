"""The batched sampler is the pure reference, for any logits, parameters, keys and batch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.keyed_noise import gumbel, make_keys, token_words
from paceline.engine.logit_adjustments import adjust_rows
from paceline.engine.sampler import BatchedSampler, SampleRow
from paceline.sampling import noise
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import MAX_SEED, MIN_TEMPERATURE, SamplingParams
from paceline.sampling.processors import adjust_logits

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

# Some ids lie beyond the row: a draft's vocabulary may be the smaller one.
TOKEN_ID = st.integers(0, 27)
PENALTY = st.sampled_from([0.0, -2.0, 0.1, 0.7, 2.0])
EVERY_PARAM = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(MIN_TEMPERATURE, 100.0)),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.9137, 0.4111, 0.0123]),
    min_p=st.sampled_from([0.0, 1e-300, 0.05, 0.3, 1.0]),
    seed=st.integers(0, MAX_SEED),
    choice=st.integers(0, 2**24 - 1),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    repetition_penalty=st.sampled_from([1.0, 0.01, 0.7, 1.3, 10.0]),
    logit_bias=st.dictionaries(
        TOKEN_ID, st.one_of(st.sampled_from([-100.0, 100.0, 1.0]), st.floats(-100, 100)), max_size=4
    ).map(lambda biases: tuple(sorted(biases.items()))),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(TOKEN_ID, max_size=4).map(tuple),
)
HISTORY = st.lists(TOKEN_ID, max_size=12).map(tuple)
EVERY_ROW = st.builds(SampleRow, EVERY_PARAM, st.integers(0, 2**32 - 1), HISTORY, HISTORY)
Batch = tuple[list[list[float]], list[SampleRow]]


@st.composite
def batches(draw: st.DrawFn, sample_row: st.SearchStrategy[SampleRow] = ROW) -> Batch:
    vocab_size = draw(st.integers(1, 24))
    row = st.lists(LOGIT, min_size=vocab_size, max_size=vocab_size)
    logits = draw(st.lists(row.filter(lambda r: max(r) > float("-inf")), min_size=1, max_size=6))
    return logits, draw(st.lists(sample_row, min_size=len(logits), max_size=len(logits)))


def reference_token(values: list[float], row: SampleRow) -> int:
    return coupled_token(
        values, row.sampling, row.output_index, row.prompt_token_ids, row.output_token_ids
    )


@given(batches())
def test_every_row_gets_the_references_token(batch: Batch) -> None:
    logits, rows = batch
    expected = list(map(reference_token, logits, rows))
    assert BatchedSampler().sample(torch.tensor(logits), rows) == expected


@given(batches(EVERY_ROW), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_every_parameter_together_gives_the_references_token(
    batch: Batch, dtype: torch.dtype
) -> None:
    values, rows = batch
    logits = torch.tensor(values).to(dtype)
    expected = list(map(reference_token, logits.double().tolist(), rows))
    assert BatchedSampler().sample(logits, rows) == expected
    # as many noisy ids as there are: the draft's shortcut is the whole row, filters included
    assert BatchedSampler(draft_top_n=24).sample(logits, rows) == expected


@given(batches(EVERY_ROW))
def test_adjusted_logits_have_the_references_bits(batch: Batch) -> None:
    values, rows = batch
    adjusted = adjust_rows(torch.tensor(values), rows).tolist()
    for got, logits, row in zip(adjusted, values, rows, strict=True):
        histories = (row.prompt_token_ids, row.output_token_ids)
        want = adjust_logits(logits, row.sampling, *histories)
        assert [x.hex() for x in got] == [x.hex() for x in want]


@given(batches(EVERY_ROW))
def test_a_row_of_any_kind_is_the_same_alone(batch: Batch) -> None:
    values, rows = batch
    logits = torch.tensor(values)
    alone = [BatchedSampler().sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert BatchedSampler().sample(logits, rows) == alone


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
