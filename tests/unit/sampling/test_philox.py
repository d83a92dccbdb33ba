"""Known answers of Random123."""

import pytest

from paceline.sampling.philox import MASK32, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def test_words_are_u32_and_counters_matter_one_by_one():
    base = philox4x32((1, 2, 3, 4), (5, 6))
    variants = {
        philox4x32(counter, key)
        for counter, key in [
            ((2, 2, 3, 4), (5, 6)),
            ((1, 3, 3, 4), (5, 6)),
            ((1, 2, 4, 4), (5, 6)),
            ((1, 2, 3, 5), (5, 6)),
            ((1, 2, 3, 4), (6, 6)),
            ((1, 2, 3, 4), (5, 7)),
        ]
    }
    assert len(variants | {base}) == 7
    assert all(0 <= word <= MASK32 for words in variants for word in words)
