"""Bounds of what a sampler accepts."""

import pytest

from paceline.sampling.params import MAX_SEED, MIN_TEMPERATURE, SamplingParams, VerificationMode


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
