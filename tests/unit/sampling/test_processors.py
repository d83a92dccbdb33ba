"""Every processor by itself, ties, and their order."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling.params import MIN_TEMPERATURE, SamplingParams
from paceline.sampling.processors import (
    MASKED,
    adjust_logits,
    greedy_token,
    process_logits,
    softmax,
)


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


def adjusted(logits, prompt=(), output=(), **params):
    return adjust_logits(logits, SamplingParams(**params), prompt, output)


def test_repetition_penalty_is_for_prompt_and_output_once_each():
    got = adjusted([4.0, -4.0, 4.0, 0.0], (0, 1, 1), (1, 3), repetition_penalty=2.0)
    assert got == [2.0, -8.0, 4.0, 0.0]


def test_presence_and_frequency_penalties_are_for_the_output_alone():
    got = adjusted([4.0] * 3, (0,), (1, 1, 2), presence_penalty=0.5, frequency_penalty=1.0)
    assert got == [4.0, 1.5, 2.5]
    assert adjusted([4.0] * 2, (), (1,), presence_penalty=-0.5) == [4.0, 4.5]


def test_repetition_comes_first_then_counts_then_bias():
    got = adjusted(
        [4.0],
        output=(0,),
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias=((0, 10.0),),
    )
    assert got == [4.0 / 2.0 - 0.5 - 1.0 + 10.0]


@pytest.mark.parametrize(("num_output", "best"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_min_tokens_holds_the_stop_ids_back_until_there_are_enough(num_output, best):
    params = {"min_tokens": 2, "stop_token_ids": (0, 2)}
    got = adjusted([9.0, 1.0, 8.0], output=(1,) * num_output, **params)
    assert greedy_token(got) == best
    assert got.count(MASKED) == (2 if best else 0)


def test_min_tokens_gives_way_where_only_an_end_is_left():
    params = {"min_tokens": 9, "stop_token_ids": (1, 2)}
    assert adjusted([MASKED, 1.0, 3.0], **params) == [MASKED, 1.0, 3.0]
    assert adjusted([1.0, 1.0], min_tokens=9, stop_token_ids=(0, 1)) == [1.0, 1.0]


def test_a_bias_cannot_bring_back_what_the_model_excludes():
    assert adjusted([MASKED, 1.0], logit_bias=((0, 100.0),)) == [MASKED, 1.0]


def test_ids_beyond_the_row_are_ignored():
    got = adjusted(
        [1.0, 2.0],
        (5, 1),
        (7, 0),
        repetition_penalty=2.0,
        presence_penalty=0.25,
        logit_bias=((1, 1.0), (9, 3.0)),
        min_tokens=3,
        stop_token_ids=(8,),
    )
    assert got == [0.25, 2.0]


def test_greedy_is_the_argmax_after_the_adjustments():
    assert kept([1.0, 2.0], temperature=0.0, logit_bias=((0, 1.5),)) == [0]


@pytest.mark.parametrize(
    ("min_p", "ids"), [(0.0, [0, 1, 2, 3]), (0.25, [0, 1, 2]), (0.26, [0, 1]), (1.0, [0])]
)
def test_min_p_is_a_share_of_the_best(min_p, ids):
    logits = [math.log(prob) for prob in (0.4, 0.2, 0.1, 0.02)]
    assert kept(logits, min_p=min_p * (1 - 1e-12)) == ids


def test_min_p_keeps_all_that_tie_with_the_best_and_decides_by_logits():
    """One ulp below the peak has the same exp(), but is not the peak."""
    assert kept([1.0, math.nextafter(1.0, 0.0), 1.0], min_p=1.0) == [0, 2]


def test_min_p_comes_after_the_temperature():
    logits = [0.0, math.log(0.25)]
    assert kept(logits, min_p=0.3) == [0]
    assert kept(logits, min_p=0.3, temperature=2.0) == [0, 1]


def masked(logits, allowed, **params):
    return adjust_logits(logits, SamplingParams(**params), (), (), allowed)


def test_a_grammar_leaves_what_it_allows():
    assert masked([1.0, 2.0, 3.0], {0, 2}) == [1.0, MASKED, 3.0]
    assert masked([1.0, 2.0, 3.0], [2]) == [MASKED, MASKED, 3.0]
    assert masked([1.0, 2.0], None) == [1.0, 2.0]


def test_a_grammar_comes_after_the_bias_and_before_min_tokens():
    law = {"logit_bias": ((0, 5.0), (1, 50.0)), "min_tokens": 1, "stop_token_ids": (0,)}
    assert masked([1.0, 2.0, 3.0], {0, 2}, **law) == [MASKED, MASKED, 3.0]
    assert masked([1.0, 2.0, 3.0], {0}, **law) == [6.0, MASKED, MASKED]  # the end is all there is


def test_a_grammar_holds_even_against_the_model():
    assert masked([MASKED, 1.0, MASKED], {0, 2}) == [0.0, MASKED, 0.0]
    assert masked([MASKED, 1.0, -3.0], {0, 2}) == [MASKED, MASKED, -3.0]


def test_ids_beyond_the_row_are_no_choice():
    assert masked([1.0, 2.0], {1, 7}) == [MASKED, 2.0]
    assert masked([1.0, 2.0], {7}) == [1.0, 2.0]


def test_filters_see_only_what_the_grammar_allows():
    law = SamplingParams(temperature=2.0, top_k=1)
    assert process_logits([9.0, 1.0, 3.0], law, (), (), {1, 2}) == [MASKED, MASKED, 0.0]
    greedy = SamplingParams(temperature=0.0)
    assert process_logits([9.0, 1.0, 3.0], greedy, (), (), {1, 2}) == [MASKED, MASKED, 0.0]
