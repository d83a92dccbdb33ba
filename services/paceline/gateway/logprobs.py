"""Log-probabilities of tokens in the shapes of OpenAI and vLLM.

Pure. An entry holds a token's bytes, since one token may be half a character. Knows no request,
no tokenizer library and no target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.generation import TokenLogprobs

# OpenAI's stand-in for what JSON cannot say: the token cannot occur.
MIN_LOGPROB = -9999.0


class TokenBytes(Protocol):
    """What an entry needs from a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and its log-probability under the model's own law; None for a first prompt token,
    which has no law."""

    token_id: int
    spelling: bytes
    logprob: float | None

    @property
    def text(self) -> str:
        return self.spelling.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of a text, `offset` characters after its beginning.

    `top` are the most likely tokens in descending order, whether or not this one is among them.
    """

    token: Candidate
    rank: int
    top: tuple[Candidate, ...]
    offset: int


def token_entry(
    scored: TokenLogprobs, num_top: int, offset: int, vocabulary: TokenBytes
) -> TokenEntry:
    """At most `num_top` of the target's list: it may have more, asked for by another field."""

    def candidate(token_id: int, logprob: float) -> Candidate:
        finite = logprob if math.isfinite(logprob) else MIN_LOGPROB
        return Candidate(token_id, vocabulary.token_bytes(token_id), max(finite, MIN_LOGPROB))

    return TokenEntry(
        candidate(scored.token_id, scored.logprob),
        scored.rank,
        tuple(candidate(*pair) for pair in scored.top[:num_top]),
        offset,
    )


def prompt_entries(
    first_token_id: int,
    scored: Sequence[TokenLogprobs],
    num_top: int,
    offsets: Sequence[int],
    vocabulary: TokenBytes,
) -> tuple[TokenEntry, ...]:
    """An entry for every token of a prompt; `scored` begins with the second one."""
    spelling = vocabulary.token_bytes(first_token_id)
    first = TokenEntry(Candidate(first_token_id, spelling, None), 0, (), offsets[0])
    return (
        first,
        *(
            token_entry(item, num_top, offset, vocabulary)
            for item, offset in zip(scored, offsets[1:], strict=True)
        ),
    )


def chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """OpenAI's chat shape: text, exact bytes, and as many top tokens as were asked for."""
    content = [
        _chat_token(entry.token) | {"top_logprobs": [_chat_token(item) for item in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: Candidate) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.spelling)}


def completion_logprobs(entries: Sequence[TokenEntry], base: int = 0) -> dict[str, Any]:
    """OpenAI's completion shape: parallel lists. `base` characters precede the entries' text.

    As there, the chosen token is in its `top_logprobs` even when it is not a top one.
    """
    return {
        "tokens": [_completion_token(entry.token) for entry in entries],
        "token_logprobs": [entry.token.logprob for entry in entries],
        "top_logprobs": [_top_table(entry) for entry in entries],
        "text_offset": [base + entry.offset for entry in entries],
    }


def _completion_token(token: Candidate) -> str:
    """This shape has no bytes; as OpenAI, half a character is spelt out, so that it is not lost
    and two of them do not share a key."""
    try:
        return token.spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.spelling)


def _top_table(entry: TokenEntry) -> dict[str, float] | None:
    if entry.token.logprob is None:
        return None
    table: dict[str, float] = {}
    for item in (*entry.top, entry.token):
        # Of two ids with one spelling the likelier stays.
        if item.logprob is not None:
            table.setdefault(_completion_token(item), item.logprob)
    return table


def prompt_logprobs(entries: Sequence[TokenEntry], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's list: null for the first token, then the token itself and the most likely ones."""
    return [
        None if entry.token.logprob is None else _ranked_table(entry, num_top) for entry in entries
    ]


def _ranked_table(entry: TokenEntry, num_top: int) -> dict[str, Any]:
    table = {str(entry.token.token_id): _ranked(entry.token, entry.rank)}
    num_likelier, last = 0, None
    for index, item in enumerate(entry.top[:num_top]):
        if item.logprob != last:  # equals share a rank, as in `TokenLogprobs`
            num_likelier, last = index, item.logprob
        table.setdefault(str(item.token_id), _ranked(item, num_likelier + 1))
    return table


def _ranked(token: Candidate, rank: int) -> dict[str, Any]:
    return {"logprob": token.logprob, "rank": rank, "decoded_token": token.text}
