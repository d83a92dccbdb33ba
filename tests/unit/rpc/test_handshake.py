from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.protocol.messages import Hello, Welcome
from paceline.rpc.handshake import misfit
from paceline.sampling.params import VerificationMode

HELLO = Hello(1, "b", "d0", "small", 100, "h1", 64, 4, (VerificationMode.GREEDY,))
WELCOME = Welcome(1, "b", "t0", "large", 100, "h1")


def test_a_fit_has_no_sentence() -> None:
    assert misfit(HELLO, WELCOME) is None


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        (
            replace(HELLO, protocol_version=2),
            "protocol versions differ: draft 2, target 1; upgrade the older one",
        ),
        (
            replace(HELLO, vocab_size=99),
            "vocabulary sizes differ: draft 99 (small), target 100 (large)",
        ),
        (
            replace(HELLO, tokenizer_hash="h2"),
            "tokenizers differ: draft h2 (small), target h1 (large)",
        ),
    ],
    ids=["version", "vocabulary", "tokenizer"],
)
def test_a_misfit_names_both_sides(hello: Hello, sentence: str) -> None:
    assert misfit(hello, WELCOME) == sentence
