"""A tokenizer as byte strings: which bytes every id writes, and ids for any bytes.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and BPE with byte fallback and a space mark (Llama 2,
Gemma). It works on bytes because a token may end in the middle of a character. Reads tokenizer
files only; knows no model, no tensor and no second tokenizer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline import models
from paceline.engine.json_files import read_json
from paceline.errors import ConfigError
from paceline.token_bytes import TokenSpelling, byte_alphabet

TOKENIZER_FILE = "tokenizer.json"
_HUB_PATTERNS = ["*.json"]
# What Python decodes bytes to that are no part of UTF-8, and the first of these characters.
_NO_TEXT = re.compile("([\udc80-\udcff]+)")
_ESCAPE = 0xDC00
# Stands for a byte that a vocabulary has no token for (SmolLM2: 21, nearly all of them in no UTF-8
# text). The lookups below need it themselves.
SUBSTITUTE = b"?"
# Ids beyond it are none of a real model's; a table is as long as the largest id.
MAX_TOKEN_IDS = 1 << 24


class Vocabulary:
    """The tokenizer of `folder`. `ConfigError` for one whose tokens are no byte strings.

    `token_bytes[id]`: what the token writes; empty for ids without an entry. `specials`: control
    tokens, content -> id. They have bytes too, but no text is ever encoded to one. `size`: the
    largest id plus one. `bos_token_ids`: what the tokenizer begins every text with, if anything.
    """

    def __init__(self, folder: Path) -> None:
        data = _read(folder / TOKENIZER_FILE)
        self._tokenizer = _load(folder, data)  # first: it knows what every section may be
        kinds = [part.get("type") for part in _parts(data.get("decoder"), "decoders")]
        self._is_byte_level = "ByteLevel" in kinds
        if not self._is_byte_level and "ByteFallback" not in kinds:
            raise ConfigError(
                f"the tokenizer in {folder} does not work on bytes (byte-level BPE, or BPE with"
                " byte fallback): its tokens cannot be translated"
            )
        ids = _checked_ids(folder, self._tokenizer)
        self.bos_token_ids = self._find_bos(folder)
        self._space = " " if self._is_byte_level else _space_mark(data.get("decoder"))
        self._literal = _load(folder, _without_changes(data, self._is_byte_level))
        self._literal.encode_special_tokens = True
        self.size = max(ids.values()) + 1
        spelling = TokenSpelling(data.get("decoder"))
        self.token_bytes = [b""] * self.size
        for content, token_id in ids.items():
            self.token_bytes[token_id] = spelling.encode(content)
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: i for i, token in added.items() if token.special}
        self._alphabet = {byte: char for char, byte in byte_alphabet().items()}
        self._byte_ids = self._find_bytes(ids)
        if SUBSTITUTE[0] not in self._byte_ids:
            raise ConfigError(f"the tokenizer in {folder} has no token for {SUBSTITUTE!r}")
        self._known = bytes(b if b in self._byte_ids else SUBSTITUTE[0] for b in range(256))

    def _find_bos(self, folder: Path) -> tuple[int, ...]:
        try:
            with_specials = self._tokenizer.encode("a").ids
            plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        except Exception as error:  # as in `_load`
            raise ConfigError(f"the tokenizer in {folder} encodes no text: {error}") from error
        num_before = next(
            (i for i in range(len(with_specials)) if with_specials[i : i + len(plain)] == plain), 0
        )
        return tuple(with_specials[:num_before])

    def _find_bytes(self, ids: dict[str, int]) -> dict[int, int]:
        """byte -> id of the token that is this byte."""
        spelt = self._alphabet
        if not self._is_byte_level:
            spelt = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        return {byte: ids[token] for byte, token in spelt.items() if token in ids}

    @property
    def missing_bytes(self) -> bytes:
        """Those without a token: in what is encoded, `SUBSTITUTE` takes their place."""
        return bytes(byte for byte in range(256) if byte not in self._byte_ids)

    def known(self, data: bytes) -> bytes:
        """`data` with `SUBSTITUTE` for each byte that has no token: the same length."""
        return data.translate(self._known)

    def encode(self, data: bytes) -> list[int]:
        """Ids that together write `known(data)`, as the tokenizer itself would cut it wherever it
        is text. A control token that is spelt out in it stays text."""
        data = self.known(data)
        ids: list[int] = []
        for index, piece in enumerate(_NO_TEXT.split(data.decode("utf-8", "surrogateescape"))):
            if index % 2:
                ids += self._encode_bytes(bytes(ord(char) - _ESCAPE for char in piece))
            elif piece:
                encoded = self._literal.encode(
                    piece.replace(" ", self._space), add_special_tokens=False
                )
                ids += encoded.ids
        if self.decode(ids) == data:
            return ids
        # A pre-tokenizer that changes text: then byte by byte.
        return [self._byte_ids[byte] for byte in data]

    def _encode_bytes(self, data: bytes) -> list[int]:
        """Of what is no text: there may be tokens for it, but no pre-tokenizer lets it through."""
        if not self._is_byte_level:
            return [self._byte_ids[byte] for byte in data]
        spelt = "".join(self._alphabet[byte] for byte in data)
        return [token.id for token in self._literal.model.tokenize(spelt)]

    def decode(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self.token_bytes[token_id] for token_id in token_ids)


def find_tokenizer(source: str, *, is_offline: bool = False) -> Path:
    """The folder with the tokenizer of `source`: a folder, an alias or a Hub id, as for models, but
    no weights are needed. `ConfigError` with the fix when there is none; `is_offline`: also when
    it would have to be downloaded."""
    if source in models.BUILTIN_SOURCES:
        raise ConfigError(f"{source} has no tokenizer file: name a real model")
    folder = Path(os.path.expanduser(source))
    if source not in models.ALIASES and not os.path.isdir(folder):
        if not models.HUB_ID.fullmatch(source) or os.path.exists(folder):
            return models.resolve(source)  # which says what is wrong with it
        folder = _from_hub(source, is_offline)
    elif source in models.ALIASES:
        folder = models.resolve(source)
    if not (folder / TOKENIZER_FILE).is_file():
        raise ConfigError(
            f"{folder} has no {TOKENIZER_FILE}: save the model with its fast tokenizer"
        )
    return folder


def _from_hub(repo_id: str, is_offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(repo_id, allow_patterns=_HUB_PATTERNS, local_files_only=is_offline)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"the tokenizer of {repo_id!r} is not in the local Hub cache and "
            + ("is not looked for elsewhere" if is_offline else "cannot be downloaded")
            + f": run `hf download {repo_id} --include '*.json'`, or name a local folder"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is no tokenizer file: save it again")
    return data


def _load(folder: Path, data: dict[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises nothing more special
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"no usable tokenizer in {folder}: {reason}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _checked_ids(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """token -> id, added tokens included; `ConfigError` when no table can be made of them."""
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise ConfigError(f"the tokenizer in {folder} has no tokens: save it again")
    if max(ids.values()) >= MAX_TOKEN_IDS:
        raise ConfigError(
            f"the tokenizer in {folder} has the id {max(ids.values())}; ids must be below"
            f" {MAX_TOKEN_IDS}: save it again"
        )
    return ids


def _without_changes(data: dict[str, Any], is_byte_level: bool) -> dict[str, Any]:
    """The same tokenizer without the steps that change a text before it is cut."""
    kept: dict[str, Any] = {**data, "normalizer": None}
    if not is_byte_level:
        return {**kept, "pre_tokenizer": None}
    kept = json.loads(json.dumps(kept))
    for part in _parts(kept.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
    return kept


def _space_mark(decoder: Any) -> str:
    for part in _parts(decoder, "decoders"):
        if part.get("type") == "Metaspace":
            return str(part["replacement"])
        if part.get("type") == "Replace" and part.get("content") == " ":
            return str(part["pattern"].get("String", " "))
    return " "


def _parts(step: Any, key: str) -> Iterator[dict[str, Any]]:
    """The simple steps of a section of a tokenizer.json."""
    if not isinstance(step, dict):
        return
    if step.get("type") == "Sequence":
        for part in step.get(key, []):
            yield from _parts(part, key)
    else:
        yield step
