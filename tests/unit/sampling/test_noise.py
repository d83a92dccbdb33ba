"""The keyed recipe: published vectors, independence of purposes, and a log that needs no libm."""

import ast
import inspect
import math
import random
import struct
from decimal import Decimal, localcontext

import pytest

from paceline.sampling import noise
from paceline.sampling.noise import (
    Purpose,
    exponential,
    gumbel,
    noise_word,
    noise_words,
    portable_log,
    unit,
)

PINNED_BITS = [
    ("3de0000000040000", "4036dfb516f1cbbf"),
    ("3df8000000120000", "4035c6766f467b8e"),
    ("3fe04baccc3a60d2", "3fe5984af8a32404"),
    ("3fe62e42ff1a39ef", "3fd774f29b811682"),
    ("3ff003bb37b77ade", "bf4dd64338179ee8"),
    ("4036dfb516f20bbf", "c0090a3aa15a0b5d"),
]

# (seed, output index, purpose, choice, round, token id) -> word, E
VECTORS = [
    ((0, 0, 0, 0, 0, 0), 0x6627E8D5, 0.509237670),
    ((42, 7, 0, 0, 0, 151643), 0x77AFA79F, 0.630217508),
    ((0x123456789ABCDEF0, 1000, 0, 1, 0, 5), 0x788A2D55, 0.636499236),
    ((42, 7, 1, 0, 3, 151643), 0x015FC973, 0.005382301),
]


@pytest.mark.parametrize(("where", "word", "value"), VECTORS)
def test_recipe_vectors(where, word, value):
    seed, output_index, purpose, choice, round_, token_id = where
    got = noise_word(
        seed, output_index, token_id, choice=choice, purpose=Purpose(purpose), round=round_
    )
    assert got == word
    assert round(exponential(got), 9) == value


def test_recipe_vector_of_the_accept_uniform():
    word = noise_word(42, 7, 0, purpose=Purpose.ACCEPT_UNIFORM)
    assert word == 0x527C0306
    assert f"{unit(word):.8f}" == "0.32220477"  # 8 digits


def test_bits_that_the_torch_twin_must_reproduce():
    """Pinned bit patterns of E and g: a change here breaks replay of every past seed."""
    bits = [
        (struct.pack(">d", exponential(word)).hex(), struct.pack(">d", gumbel(word)).hex())
        for word in (0, 1, 0x6627E8D5, 0x80000000, 0xA1E89B12, 0xFFFFFFFF)
    ]
    assert bits == PINNED_BITS


def test_words_of_a_row_equal_single_words():
    for token_ids in ([], [0], [0, 1, 2, 3, 4, 5], [3, 151643, 2]):
        for options in ({"choice": 3}, {"purpose": Purpose.RESIDUAL, "round": 9}):
            row = noise_words(2**63 + 5, 11, token_ids, **options)
            assert row == [noise_word(2**63 + 5, 11, v, **options) for v in token_ids]


def test_every_key_field_changes_the_word():
    base = {"choice": 0, "purpose": Purpose.RESIDUAL, "round": 1}
    words = {
        noise_word(1, 2, 3, **base),
        noise_word(2, 2, 3, **base),
        noise_word(1 + 2**32, 2, 3, **base),
        noise_word(1, 3, 3, **base),
        noise_word(1, 2, 4, **base),
        noise_word(1, 2, 3, **{**base, "choice": 1}),
        noise_word(1, 2, 3, **{**base, "purpose": Purpose.DRAFT_PROPOSAL}),
        noise_word(1, 2, 3, **{**base, "round": 2}),
    }
    assert len(words) == 8


def test_coupled_noise_may_not_be_keyed_by_round():
    with pytest.raises(ValueError, match="round must be 0"):
        noise_word(0, 0, 0, round=1)


def test_unit_is_open_symmetric_and_exact():
    assert unit(0) == 2.0**-33
    assert unit(2**32 - 1) == 1 - 2.0**-33
    assert 1.0 - unit(12345) == unit(2**32 - 1 - 12345)


def test_extremes_are_finite():
    for word in (0, 1, 2**31, 2**32 - 1):
        assert exponential(word) > 0
        assert math.isfinite(gumbel(word))
    assert exponential(0) < exponential(1) < exponential(2**32 - 1) < 23


def test_portable_log_is_within_one_ulp():
    """Against 40-digit decimals, with the small units (the winning tail) over-represented."""
    rng = random.Random(20)
    worst = 0.0
    with localcontext() as context:
        context.prec = 40
        for i in range(4000):
            word = rng.getrandbits(32) >> (i % 32)
            for x in (1.0 - unit(word), exponential(word), rng.uniform(0.5, 2.0)):
                true = Decimal(x).ln()
                error = abs(Decimal(portable_log(x)) - true) / Decimal(math.ulp(float(true)))
                worst = max(worst, float(error))
    assert worst < 1.0


def test_portable_log_at_its_joints():
    assert portable_log(1.0) == 0.0
    assert portable_log(2.0) == math.log(2.0)
    below = math.nextafter(noise.SQRT_HALF, 0)
    for x in (noise.SQRT_HALF, below, math.nextafter(1, 0), math.nextafter(1, 2), 2.0**-33):
        assert math.isclose(portable_log(x), math.log(x), rel_tol=3e-16, abs_tol=0)


def test_noise_uses_no_library_logarithm():
    """libm differs between machines: only frexp, which is exact, may come from `math`."""
    tree = ast.parse(inspect.getsource(noise))
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_math(n)}
    assert used == {"frexp"}


def _is_math(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "math"
