"""Bounds of what a sampler accepts."""

import pytest

from paceline.sampling.params import (
    MAX_LOGIT_BIASES,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    SamplingParams,
    VerificationMode,
)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": 100.1},
        {"temperature": 1e-310},
        {"temperature": MIN_TEMPERATURE * 0.999},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2**31},
        {"seed": -1},
        {"seed": MAX_SEED + 1},
        {"choice": -1},
        {"choice": 2**24},
        {"min_p": -0.01},
        {"min_p": 1.01},
        {"presence_penalty": 2.01},
        {"frequency_penalty": -2.01},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 10.5},
        {"min_tokens": -1},
    ],
)
def test_out_of_range_is_refused(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=name):
        SamplingParams(**fields)


def test_limits_are_inside():
    params = SamplingParams(temperature=100.0, top_k=2**31 - 1, seed=MAX_SEED, choice=2**24 - 1)
    assert SamplingParams(temperature=MIN_TEMPERATURE).mode is VerificationMode.COUPLED
    assert params.mode is VerificationMode.COUPLED
    assert not params.is_greedy


def test_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0.0).mode is VerificationMode.GREEDY


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": ((1, 0.0), (1, 1.0))},
        {"logit_bias": ((2, 0.0), (1, 1.0))},
        {"logit_bias": ((-1, 0.0),)},
        {"logit_bias": ((1, 100.1),)},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": tuple((i, 0.0) for i in range(MAX_LOGIT_BIASES + 1))},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS + 1))},
    ],
)
def test_malformed_tables_are_refused(fields):
    with pytest.raises(ValueError, match=r"bias|stop token ids"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({}, []),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.3}, []),
        ({"stop_token_ids": (1,)}, []),
        ({"min_tokens": 2}, []),
        ({"min_tokens": 2, "stop_token_ids": (1,)}, [0, 1]),
        ({"presence_penalty": 0.1}, [0, 1, 2, 3]),
        ({"frequency_penalty": -0.1}, [0, 1, 2, 3]),
        ({"repetition_penalty": 1.1}, [0, 1, 2, 3]),
        ({"logit_bias": ((3, 1.0),)}, [0, 1, 2, 3]),
    ],
)
def test_adjusting_is_known_before_any_logit_is_seen(fields, lengths):
    params = SamplingParams(**fields)
    assert [n for n in range(4) if params.is_adjusting(n)] == lengths
