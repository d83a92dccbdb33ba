"""The integer-weight wire law: validation, exact draws, quantisation that keeps its promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling.sparse_probs import (
    MAX_ENTRIES,
    TOTAL_WEIGHT,
    SparseProbs,
    quantize_probs,
)


@pytest.mark.parametrize(
    ("token_ids", "weights"),
    [
        ((), ()),
        (tuple(range(MAX_ENTRIES + 1)), (1,) * MAX_ENTRIES + (TOTAL_WEIGHT - MAX_ENTRIES,)),
        ((1, 2), (TOTAL_WEIGHT,)),
        ((1, 1), (TOTAL_WEIGHT - 1, 1)),
        ((-1, 1), (TOTAL_WEIGHT - 1, 1)),
        ((1, 2), (TOTAL_WEIGHT, 0)),
        ((1, 2), (TOTAL_WEIGHT, 1)),
        ((1, 2), (1, 1)),
    ],
)
def test_malformed_is_refused(token_ids, weights):
    with pytest.raises(ValueError):
        SparseProbs(token_ids, weights)


def test_draw_hits_every_token_as_often_as_its_weight():
    probs = SparseProbs((7, 3, 9), (1, 65534, 1))
    draws = [probs.draw(word) for word in range(TOTAL_WEIGHT)]
    assert [draws.count(token_id) for token_id in (7, 3, 9)] == [1, 65534, 1]
    assert (draws[0], draws[1], draws[-1]) == (7, 3, 9)


@pytest.mark.parametrize("word", [-1, TOTAL_WEIGHT])
def test_draw_refuses_what_is_no_u16(word):
    with pytest.raises(ValueError, match="u16"):
        SparseProbs((0,), (TOTAL_WEIGHT,)).draw(word)


def test_weight_outside_the_support_is_zero():
    assert SparseProbs((4,), (TOTAL_WEIGHT,)).weight(5) == 0


def test_quantize_breaks_ties_by_lowest_id_and_drops_the_tail():
    assert quantize_probs([0.25, 0.25, 0.25, 0.25], 2) == SparseProbs((0, 1), (32768, 32768))
    assert quantize_probs([0.0, 1e-30, 1.0]) == SparseProbs((2, 1), (65535, 1))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=100).filter(any), st.integers(1, MAX_ENTRIES))
def test_quantize_is_valid_ordered_and_close(probs, num_entries):
    law = quantize_probs(probs, num_entries)
    assert sum(law.weights) == TOTAL_WEIGHT
    assert list(law.weights) == sorted(law.weights, reverse=True)
    mass = sum(probs[i] for i in law.token_ids)
    for token_id, weight in zip(law.token_ids, law.weights, strict=True):
        assert abs(weight / TOTAL_WEIGHT - probs[token_id] / mass) <= (
            (len(law.token_ids) + 1) / TOTAL_WEIGHT
        )


@pytest.mark.parametrize(("max_dropped_mass", "num"), [(0.0, 4), (0.01, 3), (0.05, 2), (0.4, 1)])
def test_quantize_leaves_out_what_it_may(max_dropped_mass, num):
    probs = [0.02, 0.67, 0.3, 0.01]
    law = quantize_probs(probs, max_dropped_mass=max_dropped_mass + 1e-9 * bool(max_dropped_mass))
    assert law.token_ids == (1, 2, 0, 3)[:num]
    assert quantize_probs(probs, 2, 0.01).token_ids == (1, 2)
