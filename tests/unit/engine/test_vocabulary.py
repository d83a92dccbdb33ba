"""Tokenizers as byte strings: whatever the bytes, ids that write them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from paceline.engine import json_files, vocabulary
from paceline.engine.draft_head import DRAFT_VOCAB, read_draft_vocab
from paceline.engine.translated_folder import load_translation
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
    subject = vocabularies[name]
    lacked = LACKED if name == "lacking" else b""
    assert subject.missing_bytes == lacked
    for byte in ALL_BYTES:
        expected = SUBSTITUTE if byte in lacked else bytes([byte])
        ids = subject.encode(bytes([byte]))
        assert (len(ids), subject.decode(ids)) == (1, expected)
    assert subject.decode(subject.encode(ALL_BYTES)) == subject.known(ALL_BYTES)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_come_back(name: str, vocabularies: dict[str, Vocabulary], data: bytes) -> None:
    subject = vocabularies[name]
    expected = bytes(b"?"[0] if b in subject.missing_bytes else b for b in data)
    assert subject.decode(subject.encode(data)) == expected


def test_text_is_cut_as_the_tokenizer_cuts_it(vocabularies: dict[str, Vocabulary]) -> None:
    """Also beside half a character, which no text can hold."""
    subject = vocabularies["draft"]
    text = "the morning news; schöne Bäume"
    ids = subject.encode(text.encode())
    assert ids == subject._tokenizer.encode(text).ids
    assert len(ids) < len(text) / 2
    cut = subject.encode(b"\xa4" + text.encode())
    assert cut[1:] == ids


def test_a_control_token_that_is_spelt_out_stays_text(vocabularies: dict[str, Vocabulary]) -> None:
    for name in ("target", "draft"):
        subject = vocabularies[name]
        ids = subject.encode(b"so <|end|> it is")
        assert subject.specials["<|end|>"] not in ids
        assert subject.decode(ids) == b"so <|end|> it is"
        assert subject.token_bytes[subject.specials["<|end|>"]] == b"<|end|>"


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
    subject = Vocabulary(folder)
    ids = subject.encode(b"The news\tof THE Sea")
    assert subject.decode(ids) == b"The news\tof THE Sea"
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
        ("{}", "no usable tokenizer"),
        ('{"added_tokens": []}', "no usable tokenizer"),
    ],
)
def test_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        Vocabulary(tmp_path)


def changed(folder: Path, **sections: Any) -> Path:
    """A draft's tokenizer with other sections; those of `model` are put into its own."""
    path = save_tokenizers(folder)["draft"] / "tokenizer.json"
    data = json.loads(path.read_text())
    model = data["model"] | sections.pop("model", {})
    path.write_text(json.dumps(data | {"model": model} | sections))
    return path.parent


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "#", "cleanup": False}}, "work on bytes"),
        ({"decoder": None}, "work on bytes"),
        ({"decoder": {"type": "Sequence", "decoders": 5}}, "no usable tokenizer"),
        ({"decoder": {"type": "Sequence", "decoders": None}}, "no usable tokenizer"),
        ({"decoder": {"type": "Sequence", "decoders": [5]}}, "no usable tokenizer"),
        ({"decoder": 5}, "no usable tokenizer"),
        ({"model": {"vocab": {}, "merges": []}, "added_tokens": []}, "has no tokens"),
    ],
)
def test_sections_that_are_refused(sections: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, **sections)
    with pytest.raises(ConfigError, match=sentence):
        Vocabulary(folder)


def test_as_large_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tokenizers(tmp_path)["draft"]
    size = Vocabulary(folder).size
    monkeypatch.setattr(vocabulary, "MAX_TOKEN_IDS", size)
    assert Vocabulary(folder).size == size
    monkeypatch.setattr(vocabulary, "MAX_TOKEN_IDS", size - 1)
    with pytest.raises(ConfigError, match=f"ids must be below {size - 1}"):
        Vocabulary(folder)


def test_an_id_that_no_table_can_hold(tmp_path: Path) -> None:
    path = save_tokenizers(tmp_path)["draft"] / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["far"] = 4294967290
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="has the id 4294967290"):
        Vocabulary(path.parent)


def test_as_large_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tokenizers(tmp_path)["draft"]
    size = (folder / "tokenizer.json").stat().st_size
    monkeypatch.setattr(json_files, "MAX_JSON_BYTES", size)
    assert Vocabulary(folder).size
    monkeypatch.setattr(json_files, "MAX_JSON_BYTES", size - 1)
    with pytest.raises(ConfigError, match=f"more than {size - 1} bytes"):
        Vocabulary(folder)


def test_a_device_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="is no file"):
        Vocabulary(tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"{", b"5", b"{}", b"[]", b"[[1]]", b"[true]", b"[3, 2]", b"[-1]", b"\xff", b"[16777216]"],
    ids=repr,
)
def test_a_list_of_a_drafts_ids_is_checked(data: bytes, tmp_path: Path) -> None:
    folders = save_tokenizers(tmp_path)
    (folders["draft"] / DRAFT_VOCAB).write_bytes(data)
    with pytest.raises(ConfigError, match=DRAFT_VOCAB):
        load_translation(folders["draft"], folders["target"])
    (folders["draft"] / DRAFT_VOCAB).write_text("[0, 16777215]")
    assert read_draft_vocab(folders["draft"]) == [0, 16777215]


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
