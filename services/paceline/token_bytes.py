"""The bytes behind one entry of a vocabulary, by the rules of the tokenizer's own decoder.

A decoder turns whole lists into text and cannot show half a character; this reads its settings
instead. Pure: knows no tokenizer library, no id and no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# One step: the bytes when it knows them, else the spelling that the next step gets.
_Step = Callable[[str], bytes | str]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's: every byte as one printable character, those that have none from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(rest)}


class TokenSpelling:
    """`decoder` is the decoder section of a tokenizer.json, or None.

    Known steps are those of today's language models: byte-level (GPT-2, Llama 3, Qwen), byte
    fallback with a space mark (Llama 2, Phi-3, Gemma), Metaspace. Steps that work on a whole
    text (Fuse, Strip) say nothing about one token.
    """

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        self._steps = list(_steps(decoder)) if decoder else []

    def encode(self, spelling: str) -> bytes:
        """The token's bytes; not always whole UTF-8."""
        for step in self._steps:
            result = step(spelling)
            if isinstance(result, bytes):
                return result
            spelling = result
        return spelling.encode()


def _steps(decoder: Mapping[str, Any]) -> Iterator[_Step]:
    kind = decoder["type"]
    if kind == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    elif kind == "ByteLevel":
        yield _ByteLevel()
    elif kind == "ByteFallback":
        yield _byte_fallback
    elif kind == "Metaspace":
        yield _Replace(decoder["replacement"], " ")
    elif kind == "Replace" and "String" in decoder["pattern"]:
        yield _Replace(decoder["pattern"]["String"], decoder["content"])


class _ByteLevel:
    def __init__(self) -> None:
        self._alphabet = byte_alphabet()

    def __call__(self, spelling: str) -> bytes:
        """An added token may have characters outside the alphabet: then it is plain text."""
        if all(char in self._alphabet for char in spelling):
            return bytes(self._alphabet[char] for char in spelling)
        return spelling.encode()


class _Replace:
    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new

    def __call__(self, spelling: str) -> str:
        return spelling.replace(self._old, self._new)


def _byte_fallback(spelling: str) -> bytes | str:
    match = _BYTE_TOKEN.fullmatch(spelling)
    return bytes.fromhex(match[1]) if match else spelling
