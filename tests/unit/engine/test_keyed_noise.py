"""Bit equality with the pure reference, on random keys and on the edges of every u32."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.engine.keyed_noise import group_words, gumbel, make_keys, portable_log, token_words
from paceline.sampling import noise

CPU = torch.device("cpu")
EDGE_WORDS = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]


def random_keys(rng: random.Random, count: int) -> list[tuple[int, int, int]]:
    edges = [(0, 0, 0), (2**64 - 1, 2**24 - 1, 2**32 - 1), (2**63, 0, 1), (2**32, 1, 0)]
    return edges + [
        (rng.getrandbits(64), rng.getrandbits(24), rng.getrandbits(rng.choice((4, 32))))
        for _ in range(count)
    ]


def test_words_equal_the_reference_for_random_keys() -> None:
    rng = random.Random(1)
    rows = random_keys(rng, 60)
    token_ids = [[rng.randrange(2 ** rng.choice((3, 17, 32))) for _ in range(9)] for _ in rows]
    words = token_words(torch.tensor(token_ids), make_keys(rows, CPU))
    expected = [
        [noise.noise_word(seed, index, v, choice=choice) for v in ids]
        for (seed, choice, index), ids in zip(rows, token_ids, strict=True)
    ]
    assert words.tolist() == expected


@pytest.mark.parametrize("purpose", list(noise.Purpose))
def test_words_equal_the_reference_for_every_purpose(purpose: noise.Purpose) -> None:
    round = 0 if purpose is noise.Purpose.COUPLED else 77
    keys = make_keys([(42, 3, 7)], CPU, purpose, round)
    words = token_words(torch.tensor([[0, 5, 151643]]), keys)
    assert words[0].tolist() == [
        noise.noise_word(42, 7, v, choice=3, purpose=purpose, round=round) for v in (0, 5, 151643)
    ]


def test_known_answers() -> None:
    """The recipe vectors of the design notes."""
    keys = make_keys([(0, 0, 0), (42, 0, 7), (0x123456789ABCDEF0, 1, 1000)], CPU)
    words = token_words(torch.tensor([[0], [151643], [5]]), keys)
    assert words[:, 0].tolist() == [0x6627E8D5, 0x77AFA79F, 0x788A2D55]


def test_a_group_is_four_neighbouring_ids() -> None:
    keys = make_keys([(9, 0, 2), (8, 1, 3)], CPU)
    words = torch.stack(group_words(torch.tensor([[3, 0], [1, 7]]), keys), dim=-1)
    assert words[0].flatten().tolist() == [
        noise.noise_word(9, 2, v) for v in (12, 13, 14, 15, 0, 1, 2, 3)
    ]
    assert words[1, 1].tolist() == [noise.noise_word(8, 3, 28 + v, choice=1) for v in range(4)]


def test_gumbel_bits_equal_the_reference() -> None:
    rng = random.Random(2)
    words = EDGE_WORDS + [rng.getrandbits(32) >> rng.randrange(32) for _ in range(5000)]
    twin = gumbel(torch.tensor(words)).tolist()
    assert [value.hex() for value in twin] == [noise.gumbel(word).hex() for word in words]


def test_log_bits_equal_the_reference_over_all_magnitudes() -> None:
    rng = random.Random(3)
    values = [1.0, noise.SQRT_HALF, 2.0**-33, 1 - 2.0**-33, 22.9]
    values += [rng.random() * 2.0 ** rng.randint(-300, 300) for _ in range(5000)]
    twin = portable_log(torch.tensor(values, dtype=torch.float64)).tolist()
    assert [value.hex() for value in twin] == [noise.portable_log(x).hex() for x in values]


def test_the_largest_gumbel_belongs_to_word_zero() -> None:
    words = torch.arange(100_000)
    assert float(gumbel(words).max()) == noise.gumbel(0)


def test_each_row_may_have_a_round_of_its_own() -> None:
    rows = [(42, 3, 7), (42, 3, 7), (5, 0, 1)]
    rounds = [0, 9, 2**32 - 1]
    keys = make_keys(rows, CPU, noise.Purpose.RESIDUAL, rounds)
    words = token_words(torch.tensor([[6]] * 3), keys)[:, 0].tolist()
    assert words == [
        noise.noise_word(s, t, 6, choice=c, purpose=noise.Purpose.RESIDUAL, round=round)
        for (s, c, t), round in zip(rows, rounds, strict=True)
    ]
