"""Temperature, top-k, top-p: masks, ties and their order."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling.params import MIN_TEMPERATURE, SamplingParams
from paceline.sampling.processors import MASKED, greedy_token, process_logits, softmax


def kept(logits, **params):
    processed = process_logits(logits, SamplingParams(**params))
    return [i for i, logit in enumerate(processed) if logit != MASKED]


def test_defaults_only_shift_the_peak_to_zero():
    assert process_logits([1.0, -2.0, 0.5], SamplingParams()) == [0.0, -3.0, -0.5]


def test_temperature_divides():
    assert process_logits([1.0, -2.0], SamplingParams(temperature=0.5)) == [0.0, -6.0]


FLOAT32_MAX = 3.4028234663852886e38


@pytest.mark.parametrize("peak", [FLOAT32_MAX, -FLOAT32_MAX, 1.7e308, 0.0])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.5}, {"top_k": 1}, {"top_k": 2, "top_p": 0.9}])
def test_no_finite_logits_overflow(peak, fields):
    """Divided first, a logit of 3e38 at temperature 1e-5 would still fit, but 1e304 would not."""
    params = SamplingParams(temperature=MIN_TEMPERATURE, **fields)
    processed = process_logits([-1.7e308, peak, -FLOAT32_MAX], params)
    assert max(processed) == 0.0
    assert math.isclose(math.fsum(softmax(processed)), 1.0)


def test_greedy_is_the_law_of_the_lowest_best_id():
    assert process_logits([1.0, 3.0, 3.0], SamplingParams(temperature=0.0)) == [MASKED, 0.0, MASKED]
    assert greedy_token([1.0, 3.0, 3.0]) == 1


def test_greedy_ignores_the_other_fields():
    assert kept([0.0, 1.0, 2.0], temperature=0.0, top_k=2, top_p=0.1) == [2]


@pytest.mark.parametrize(
    ("top_k", "ids"),
    [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 2, 3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])],
)
def test_top_k_keeps_ties_with_the_kth(top_k, ids):
    assert kept([0.0, 3.0, 2.0, 2.0], top_k=top_k) == ids


@pytest.mark.parametrize(
    ("top_p", "ids"), [(0.01, [1]), (0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.76, [0, 1, 2])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, ids):
    logits = [math.log(prob) for prob in (0.125, 0.5, 0.25, 0.125)]
    assert kept(logits, top_p=top_p) == ids


def test_top_p_ties_enter_by_lowest_id():
    assert kept([0.0] * 4, top_p=0.5) == [0, 1]


def test_top_p_counts_after_top_k():
    """With a fifth of the mass removed by top-k, the first two hold three quarters of the rest."""
    logits = [math.log(prob) for prob in (0.3, 0.3, 0.2, 0.1, 0.1)]
    assert kept(logits, top_p=0.7) == [0, 1, 2]
    assert kept(logits, top_k=3, top_p=0.7) == [0, 1]


def test_masked_logits_stay_masked():
    assert kept([MASKED, 0.0, MASKED, 1.0], top_k=3, top_p=0.99) == [1, 3]


def test_softmax_of_a_row_without_mass_is_an_error():
    with pytest.raises(ValueError, match="finite"):
        softmax([MASKED, MASKED])


rows = st.lists(st.floats(-30, 30), min_size=1, max_size=12)


@given(rows, st.floats(0.05, 5), st.integers(0, 12), st.floats(0.01, 1))
def test_never_empty_and_survivors_keep_their_ratios(logits, temperature, top_k, top_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    processed = process_logits(logits, params)
    assert processed[greedy_token(logits)] != MASKED
    assert all(
        new in ((old - max(logits)) / temperature, MASKED)
        for old, new in zip(logits, processed, strict=True)
    )
    assert math.isclose(sum(softmax(processed)), 1)


@given(rows, st.floats(0.01, 1))
def test_top_p_mass_reaches_the_bound_and_no_member_is_idle(logits, top_p):
    probs = softmax(logits)
    mass = [probs[i] for i in kept(logits, top_p=top_p)]
    assert sum(mass) >= top_p - 1e-12
    assert sum(mass) - min(mass) < top_p + 1e-12
