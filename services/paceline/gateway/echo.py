"""Where the tokens of an echoed prompt begin in its text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.gateway.text import IncrementalDetokenizer
from paceline.gateway.tokenizer import Tokenizer


def token_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The character of `text` at which each token begins; all tokens of one character share it.

    A control token takes up room only where the text spells it out. Where a tokenizer changes
    what it reads (lower case, Unicode forms), later offsets may be off, but never past the end.
    """
    detokenizer = IncrementalDetokenizer(tokenizer)
    offsets = []
    num_chars = 0
    for token_id in token_ids:
        offsets.append(min(num_chars + detokenizer.num_waiting, len(text)))
        if tokenizer.is_special(token_id):
            spelling = tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
            num_chars += len(spelling) * text.startswith(spelling, num_chars)
        num_chars += len(detokenizer.push(token_id))
    return tuple(offsets)
