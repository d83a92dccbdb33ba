"""Decoding a token at a time = decoding at once, at a bounded cost per token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.gateway.text import IncrementalDetokenizer, TokenDecoder
from paceline.gateway.tokenizer import ToyTokenizer

CORPUS = [
    "hello hello world, the cat sat",
    "naïve café 😀😀 日本語 日本",
    "  def f(x):\n    return x\n",
]


class FastDecoder:
    """A tokenizers object as a TokenDecoder; counts what decoding costs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0
        self._size = tokenizer.get_vocab_size()
        self._special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special or token_id >= self._size


def byte_level_bpe() -> FastDecoder:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return FastDecoder(tokenizer)


def sentencepiece_like() -> FastDecoder:
    """Llama's decoder: leading space dropped at the start, bytes as <0xNN> tokens."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "lo", "wor", "é", "▁日", "本", "\n", ".", "▁▁", "a"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return FastDecoder(tokenizer)


BPE = byte_level_bpe()
PIECES = sentencepiece_like()
WORD_IDS = [0, *range(257, PIECES.tokenizer.get_vocab_size())]


def incremental(decoder: TokenDecoder, token_ids: Sequence[int]) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(decoder)
    return [detokenizer.push(token_id) for token_id in token_ids], detokenizer.finish()


def at_once(decoder: TokenDecoder, token_ids: Sequence[int]) -> str:
    kept = [token_id for token_id in token_ids if not decoder.is_special(token_id)]
    return decoder.decode(kept) if kept else ""


@given(st.lists(st.integers(0, 330), max_size=60))
def test_byte_level_bpe_any_ids(token_ids: list[int]) -> None:
    pieces, rest = incremental(BPE, token_ids)
    assert "".join(pieces) + rest == at_once(BPE, token_ids)


@given(st.text(max_size=40))
@example("😀")
@example("a\ufffdb")
@example("👩\u200d👩\u200d👧 é́")
def test_byte_level_bpe_text_comes_back_whole(text: str) -> None:
    pieces, rest = incremental(BPE, BPE.tokenizer.encode(text).ids)
    assert "".join(pieces) + rest == text
    if "\ufffd" not in text:
        assert rest == ""
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=60))
@example(b"\xf0\x9f\x98\x80")
@example(b"\x98" * 30 + b"ok")
@example(b"\xf0\x9f" * 20)
@example(b"\xe2\x98\x98" * 9 + b"\x98" * 9)
def test_toy_bytes_any_garbage(data: bytes) -> None:
    decoder = ToyTokenizer()
    pieces, rest = incremental(decoder, list(data))
    assert "".join(pieces) + rest == at_once(decoder, list(data))


@given(st.lists(st.sampled_from(WORD_IDS) | st.text(min_size=1, max_size=3), max_size=30))
def test_sentencepiece_words_and_byte_fallback(parts: list[int | str]) -> None:
    """Bytes of whole characters, anywhere between words."""
    token_ids: list[int] = []
    for part in parts:
        token_ids += [part] if isinstance(part, int) else [1 + byte for byte in part.encode()]
    pieces, rest = incremental(PIECES, token_ids)
    assert "".join(pieces) + rest == at_once(PIECES, token_ids)


@pytest.mark.parametrize(
    "token_ids",
    [
        pytest.param([1 + 0x98] * 500, id="garbage bytes"),
        pytest.param([257] * 500, id="spaces"),
        pytest.param([0] * 500, id="special tokens"),
        pytest.param([99_999] * 500, id="ids outside the vocabulary"),
        pytest.param([1 + byte for byte in "日".encode()] * 170, id="byte fallback"),
    ],
)
def test_cost_per_token_is_bounded(token_ids: list[int]) -> None:
    decoder = sentencepiece_like()
    incremental(decoder, token_ids)
    assert decoder.num_decoded <= 32 * len(token_ids)


@given(st.binary(max_size=200))
def test_cost_per_byte_is_bounded(data: bytes) -> None:
    class Counting(ToyTokenizer):
        num_decoded = 0

        def decode(self, token_ids: Sequence[int]) -> str:
            self.num_decoded += len(token_ids)
            return super().decode(token_ids)

    decoder = Counting()
    incremental(decoder, list(data))
    assert decoder.num_decoded <= 32 * len(data)
