"""Small hand-made cases of every rule; the laws are proved in tests/properties."""

from fractions import Fraction

import pytest

from paceline.errors import LocalProtocolError
from paceline.sampling.acceptance import (
    Acceptance,
    accept_block,
    accept_matching,
    accept_rejection,
    coupled_token,
    race,
    verifiable_len,
)
from paceline.sampling.noise import exponential, noise_word
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import softmax
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs

RULES = [accept_rejection, accept_block]
EVEN = [0.5, 0.5, 0.0]
NOISE = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("draft", "sampled", "acceptance"),
    [
        ([], [4], Acceptance(0, 4)),
        ([1, 2], [1, 2, 3], Acceptance(2, 3)),
        ([1, 2], [9, 2, 3], Acceptance(0, 9)),
        ([1, 2], [1, 9, 3], Acceptance(1, 9)),
    ],
)
def test_matching(draft, sampled, acceptance):
    assert accept_matching(draft, sampled) == acceptance


@pytest.mark.parametrize("sampled", [[1], [1, 2, 3]])
def test_matching_needs_one_sample_more(sampled):
    with pytest.raises(LocalProtocolError, match="need 2 samples"):
        accept_matching([1], sampled)


@pytest.mark.parametrize("rule", RULES)
def test_no_draft_is_a_plain_step(rule):
    assert rule([], [], [[0.2, 0.3, 0.5]], [], [[9.0, 9.0, 1.0]]) == Acceptance(0, 2)


@pytest.mark.parametrize("rule", RULES)
def test_full_acceptance_takes_the_bonus_from_the_last_row(rule):
    got = rule([0], [EVEN], [EVEN, [0.0, 0.0, 1.0]], [0.999], [NOISE, NOISE])
    assert got == Acceptance(1, 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_the_target_excludes_is_refused_even_by_uniform_zero(rule):
    got = rule([0], [EVEN, EVEN][:1], [[0.0, 0.4, 0.6], EVEN], [0.0], [NOISE, NOISE])
    assert got == Acceptance(0, 2)


def test_recovered_token_comes_from_the_residual_only():
    """Target (.5, .3, .2), draft (.5, .5, 0): only token 2 has more mass than was proposed."""
    got = accept_rejection([1], [EVEN], [[0.5, 0.3, 0.2], EVEN], [0.7], [[1e-9, 1e-9, 9.0], NOISE])
    assert got == Acceptance(0, 2)


def test_threshold_of_the_token_rule_is_strict():
    rows = [[0.5, 0.25, 0.25], EVEN]
    assert accept_rejection([1], [EVEN], rows, [0.4999], [NOISE, NOISE]).num_accepted_tokens == 1
    assert accept_rejection([1], [EVEN], rows, [0.5], [NOISE, NOISE]).num_accepted_tokens == 0


def test_block_rule_rescues_an_earlier_failure():
    """Token 0 fails its own test, token 1 passes; a port that stops at the failure is wrong."""
    draft = [[0.5, 0.5], [0.5, 0.5]]
    target = [[0.25, 0.75], [1.0, 0.0], [0.0, 1.0]]
    got = accept_block([0, 0], draft, target, [0.99, 0.0], [[1.0, 1.0]] * 3)
    assert got == Acceptance(2, 1)


@pytest.mark.parametrize("rule", RULES)
def test_equal_laws_up_to_rounding_fall_back_to_the_target_row(rule):
    """The residual of equal rows is dust; the dust must not decide."""
    draft = [0.5 + 1e-14, 0.5 - 1e-14, 0.0]
    got = rule([0], [draft], [EVEN, EVEN], [1 - 1e-16], [[1.0, 9.0, 0.0], NOISE])
    assert got == Acceptance(0, 0)


@pytest.mark.parametrize("rule", RULES)
def test_sparse_equals_dense(rule):
    sparse = SparseProbs((2, 0), (TOTAL_WEIGHT // 4, 3 * TOTAL_WEIGHT // 4))
    dense = [Fraction(3, 4), Fraction(0), Fraction(1, 4)]
    target = [[Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]] * 3
    noise = [[Fraction(2), Fraction(1), Fraction(3)]] * 3
    for first in (Fraction(1, 10), Fraction(9, 10)):
        for second in (Fraction(1, 10), Fraction(6, 10), Fraction(9, 10)):
            args = (target, [first, second], noise)
            assert rule([0, 2], [sparse] * 2, *args) == rule([0, 2], [dense] * 2, *args)


def test_a_lying_draft_is_cut_where_it_lies():
    sparse = SparseProbs((2, 0), (1, TOTAL_WEIGHT - 1))
    assert verifiable_len([0, 2, 1, 0], [sparse] * 4) == 2
    assert verifiable_len([0, 1], [EVEN] * 2) == 2
    assert verifiable_len([2], [EVEN]) == 0


@pytest.mark.parametrize("rule", RULES)
def test_an_uncut_block_is_our_own_bug(rule):
    with pytest.raises(LocalProtocolError, match="no mass"):
        rule([2], [EVEN], [EVEN, EVEN], [0.5], [NOISE, NOISE])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("short", range(4))
def test_shapes_are_checked(rule, short):
    args = [[EVEN], [EVEN, EVEN], [0.5], [NOISE, NOISE]]
    args[short] = args[short][:-1]
    with pytest.raises(LocalProtocolError, match="fit rows"):
        rule([0], *args)


def test_race_prefers_heavy_early_and_lowest():
    assert race([0.0, 1.0, 2.0], [0.0, 1.0, 1.0]) == 2
    assert race([0.0, 1.0, 1.0], [0.0, 1.0, 1.0]) == 1
    with pytest.raises(LocalProtocolError, match="without mass"):
        race([0.0, 0.0], [1.0, 1.0])


def test_coupled_token_is_the_winner_of_the_exponential_race():
    """argmax of logits + Gumbel and argmin of E / prob are the same choice."""
    params = SamplingParams(temperature=0.7, top_k=5, seed=99, choice=2)
    logits = [0.3, -1.0, 2.0, 0.9, 1.1, 0.0, -0.2]
    masked = [logit / 0.7 if logit >= 0.0 else float("-inf") for logit in logits]
    for output_index in range(200):
        noise = [
            exponential(noise_word(99, output_index, token_id, choice=2)) for token_id in range(7)
        ]
        assert coupled_token(logits, params, output_index) == race(softmax(masked), noise)


def test_coupled_token_depends_on_the_keys_and_only_on_them():
    logits = [0.0] * 16
    base = SamplingParams(seed=1)

    def row(params):
        return [coupled_token(logits, params, t) for t in range(20)]

    assert row(base) == row(SamplingParams(seed=1))
    assert row(base) != row(SamplingParams(seed=2))
    assert row(base) != row(SamplingParams(seed=1, choice=1))


def test_coupled_token_with_temperature_zero_is_greedy():
    assert coupled_token([1.0, 5.0, 5.0], SamplingParams(temperature=0.0, seed=3), 8) == 1
