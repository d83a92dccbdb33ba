"""Tokenizers as byte strings: whatever the bytes, ids that write them again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from paceline.engine.vocabulary import SUBSTITUTE, Vocabulary, find_tokenizer
from paceline.errors import ConfigError
from paceline.token_bytes import byte_alphabet
from tests.unit.engine.two_tokenizers import DRAFT_TEXT, save_tokenizers

ALL_BYTES = bytes(range(256))
LACKED = b"\x04\xc0\xff"


def sentence_piece(folder: Path) -> Path:
    """As Llama 2 and Gemma have it: a space mark, and bytes where a character is unknown."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", *fallback], show_progress=False
    )
    tokenizer.train_from_iterator(DRAFT_TEXT, trainer)
    folder.mkdir()
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:1]  # bytes are ordinary tokens
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    root = tmp_path_factory.mktemp("tokenizers")
    inverse = {byte: char for char, byte in byte_alphabet().items()}
    lacking = save_tokenizers(root / "lacking", dropped="".join(inverse[b] for b in LACKED))
    folders = save_tokenizers(root / "whole")
    folders |= {"lacking": lacking["draft"], "fallback": sentence_piece(root / "fallback")}
    return {name: Vocabulary(folder) for name, folder in folders.items()}


NAMES = ["target", "draft", "lacking", "fallback"]


@pytest.mark.parametrize("name", NAMES)
def test_every_byte(name: str, vocabularies: dict[str, Vocabulary]) -> None:
    vocabulary = vocabularies[name]
    lacked = LACKED if name == "lacking" else b""
    assert vocabulary.missing_bytes == lacked
    for byte in ALL_BYTES:
        expected = SUBSTITUTE if byte in lacked else bytes([byte])
        ids = vocabulary.encode(bytes([byte]))
        assert (len(ids), vocabulary.decode(ids)) == (1, expected)
    assert vocabulary.decode(vocabulary.encode(ALL_BYTES)) == vocabulary.known(ALL_BYTES)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_come_back(name: str, vocabularies: dict[str, Vocabulary], data: bytes) -> None:
    vocabulary = vocabularies[name]
    expected = bytes(b"?"[0] if b in vocabulary.missing_bytes else b for b in data)
    assert vocabulary.decode(vocabulary.encode(data)) == expected


def test_text_is_cut_as_the_tokenizer_cuts_it(vocabularies: dict[str, Vocabulary]) -> None:
    """Also beside half a character, which no text can hold."""
    vocabulary = vocabularies["draft"]
    text = "the morning news; schöne Bäume"
    ids = vocabulary.encode(text.encode())
    assert ids == vocabulary._tokenizer.encode(text).ids
    assert len(ids) < len(text) / 2
    cut = vocabulary.encode(b"\xa4" + text.encode())
    assert cut[1:] == ids


def test_a_control_token_that_is_spelt_out_stays_text(vocabularies: dict[str, Vocabulary]) -> None:
    for name in ("target", "draft"):
        vocabulary = vocabularies[name]
        ids = vocabulary.encode(b"so <|end|> it is")
        assert vocabulary.specials["<|end|>"] not in ids
        assert vocabulary.decode(ids) == b"so <|end|> it is"
        assert vocabulary.token_bytes[vocabulary.specials["<|end|>"]] == b"<|end|>"


@pytest.mark.parametrize("part", ["normalizer", "add_prefix_space", "pre_tokenizer"])
def test_steps_that_change_a_text_are_left_out(part: str, tmp_path: Path) -> None:
    """A pre-tokenizer that cannot be: then byte by byte."""
    folder = save_tokenizers(tmp_path)["draft"]
    data = json.loads((folder / "tokenizer.json").read_text())
    if part == "normalizer":
        data["normalizer"] = {"type": "Lowercase"}
    elif part == "add_prefix_space":
        data["pre_tokenizer"]["add_prefix_space"] = True
    else:
        data["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    vocabulary = Vocabulary(folder)
    ids = vocabulary.encode(b"The news\tof THE Sea")
    assert vocabulary.decode(ids) == b"The news\tof THE Sea"
    assert (len(ids) == 19) == (part == "pre_tokenizer")


def test_what_every_text_begins_with(tmp_path: Path) -> None:
    folder = save_tokenizers(tmp_path)["draft"]
    assert Vocabulary(folder).bos_token_ids == ()
    data = json.loads((folder / "tokenizer.json").read_text())
    special = {"id": "<|start|>", "ids": [0], "tokens": ["<|start|>"]}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|start|>": special},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert Vocabulary(folder).bos_token_ids == (0,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read"),
        ("[]", "is no tokenizer file"),
        ('{"decoder": {"type": "ByteLevel"}}', "no usable tokenizer"),
        ('{"decoder": {"type": "WordPiece"}}', "does not work on bytes"),
        ("{}", "does not work on bytes"),
    ],
)
def test_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        Vocabulary(tmp_path)


def test_without_the_substitute(tmp_path: Path) -> None:
    folder = save_tokenizers(tmp_path, dropped="?")["draft"]
    with pytest.raises(ConfigError, match="no token for"):
        Vocabulary(folder)


def test_found_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tokenizers(tmp_path / "here")["target"]
    assert find_tokenizer(str(folder)) == folder
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for source, sentence in [
        (str(tmp_path), "has no tokenizer.json"),
        (str(tmp_path / "absent"), "neither a folder here"),
        (str(folder / "tokenizer.json"), "is a file"),
        ("toy", "has no tokenizer file"),
        ("nobody/has-this", "not in the local Hub cache"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            find_tokenizer(source, is_offline=True)
