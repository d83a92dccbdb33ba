"""The bytes of single tokens, over every kind of decoder that language models use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.gateway.echo import token_offsets
from paceline.gateway.tokenizer import ToyTokenizer, load_tokenizer
from paceline.token_bytes import TokenSpelling, byte_alphabet

TEXTS = ["hello", "a 😀 😀b", "naïve 日本語 😀\n\n", "a\u200bb", "  two  spaces ", "\x00\x7f"]


def byte_level() -> Tokenizer:
    """GPT-2's kind: one token for each byte, and a merge that cuts an emoji in two."""
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    first, second = (alphabet[byte] for byte in "😀".encode()[:2])
    vocabulary[first + second] = 256
    space = alphabet[ord(" ")]
    vocabulary[space + first] = 257
    tokenizer = Tokenizer(models.BPE(vocabulary, [(space, first), (first, second)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("a tool call")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's, Phi-3's and Gemma's kind: a mark for spaces, bytes for what has no entry."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for char in "▁abdehlnopstw":
        vocabulary[char] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> Any:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(str(folder))


def all_bytes(tokenizer: Any, token_ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)


def test_the_alphabet_is_the_librarys_own() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    decoder = decoders.ByteLevel()
    for char, byte in alphabet.items():
        if byte < 128:
            assert decoder.decode([char]) == chr(byte)
    # Above: two at a time are a character.
    bytes_to_chars = {byte: char for char, byte in alphabet.items()}
    for code in range(0x80, 0x800):
        spelling = "".join(bytes_to_chars[byte] for byte in chr(code).encode())
        assert decoder.decode([spelling]) == chr(code)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level(text: str, tmp_path: Path) -> None:
    tokenizer = saved(byte_level(), tmp_path)
    assert all_bytes(tokenizer, tokenizer.encode(text)) == text.encode()


def test_byte_level_half_an_emoji(tmp_path: Path) -> None:
    tokenizer = saved(byte_level(), tmp_path)
    emoji = "😀".encode()
    token_ids = tokenizer.encode("😀")
    assert [tokenizer.token_bytes(i) for i in token_ids] == [emoji[:2], emoji[2:3], emoji[3:]]
    assert token_offsets(tokenizer.encode("a😀b"), "a😀b", tokenizer) == (0, 1, 1, 1, 2)


def test_added_tokens(tmp_path: Path) -> None:
    """A control token as it is spelt; one with characters outside the alphabet is plain text."""
    tokenizer = saved(byte_level(), tmp_path)
    assert tokenizer.token_bytes(258) == b"<|end|>"
    assert tokenizer.is_special(258)
    assert tokenizer.token_bytes(259) == b"a tool call" == tokenizer.decode([259]).encode()
    assert [tokenizer.has_token(i) for i in (-1, 0, 259, 260)] == [False, True, True, False]
    assert tokenizer.token_bytes(260) == b""


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback(text: str, tmp_path: Path) -> None:
    """The one space that the normalizer puts first is the first token's."""
    tokenizer = saved(byte_fallback(), tmp_path)
    token_ids = tokenizer.encode(text)
    assert all_bytes(tokenizer, token_ids) == b" " + text.encode()
    assert tokenizer.decode(token_ids) == text


def test_offsets_with_control_tokens(tmp_path: Path) -> None:
    """They take up room where the prompt spells them out, and none where ids were sent."""
    tokenizer = saved(byte_level(), tmp_path)
    token_ids = tokenizer.encode("é<|end|>a")
    assert token_ids == [0xC3, 0xA9, 258, 97]
    assert token_offsets(token_ids, "é<|end|>a", tokenizer) == (0, 0, 1, 8)
    assert token_offsets(token_ids, tokenizer.decode(token_ids), tokenizer) == (0, 0, 1, 1)


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_where_the_tokens_are(text: str, tmp_path: Path) -> None:
    for tokenizer in (ToyTokenizer(), saved(byte_level(), tmp_path)):
        token_ids = tokenizer.encode(text)
        offsets = token_offsets(token_ids, text, tokenizer)
        written = b""
        for token_id, offset in zip(token_ids, offsets, strict=True):
            assert offset == len(written.decode(errors="ignore"))
            written += tokenizer.token_bytes(token_id)


@pytest.mark.parametrize(
    ("decoder", "spelling", "expected"),
    [
        (None, "▁a", "▁a".encode()),
        ({"type": "Metaspace", "replacement": "▁"}, "▁a▁", b" a "),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}, "<0xfF>", b"\xff"),
        ({"type": "ByteFallback"}, "<0xFFF>", b"<0xFFF>"),
        ({"type": "Fuse"}, "é", "é".encode()),
        ({"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}, "a", b"a"),
    ],
)
def test_single_steps(decoder: Any, spelling: str, expected: bytes) -> None:
    assert TokenSpelling(decoder).encode(spelling) == expected


def test_toy() -> None:
    toy = ToyTokenizer()
    assert [toy.token_bytes(i) for i in (0, 255, 256, 257)] == [b"\x00", b"\xff", b"", b""]
    assert [toy.has_token(i) for i in (-1, 0, 256, 257)] == [False, True, True, False]
