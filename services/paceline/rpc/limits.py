"""What a message may contain at most, and the checks that every decoder shares. Pure.

Knows no protobuf type: it sees numbers, strings and lists that came out of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.config import RpcConfig
from paceline.errors import RemoteProtocolError

MAX_INT = 2**31 - 1  # positions, lengths and counts fit a signed 32-bit tensor index
MAX_COUNTER = 2**53 - 1  # rounds and microseconds survive a trip through a double
MAX_NAME_CHARS = 256
MAX_REASON_CHARS = 1024
MAX_MODES = 16
NO_REPETITION_PENALTY = 1.0  # what an absent field means
# More than the largest encoding of an entry without its token ids, with every other field set.
ITEM_OVERHEAD_BYTES = 192
# More than the tags and lengths of a law's two lists, and of a Sampling's lists and grammar.
LAW_OVERHEAD_BYTES = 16
SAMPLING_OVERHEAD_BYTES = 32
WEIGHT_BYTES = 3  # the largest weight, 65536, as a varint
BIAS_BYTES = 8
MAX_CHAR_BYTES = 4  # of a character in UTF-8
# More than the checksum, the body's header, the oneof's and the batch's.
FRAME_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds of one stream; token ids lie below `vocab_size`, which both sides agreed on."""

    vocab_size: int
    max_message_bytes: int
    max_items_per_message: int
    max_tokens_per_item: int

    @classmethod
    def from_config(cls, config: RpcConfig, vocab_size: int) -> WireLimits:
        return cls(
            vocab_size=vocab_size,
            max_message_bytes=config.max_message_bytes,
            max_items_per_message=config.max_items_per_message,
            max_tokens_per_item=config.max_tokens_per_item,
        )

    @property
    def max_token_bytes(self) -> int:
        """Bytes of the largest token id as a varint."""
        return max(1, ((self.vocab_size - 1).bit_length() + 6) // 7)

    @property
    def max_body_bytes(self) -> int:
        """What the entries of one message may weigh."""
        return self.max_message_bytes - FRAME_OVERHEAD_BYTES

    def item_bytes(self, num_tokens: int, num_extra_bytes: int = 0) -> int:
        """An upper bound of the encoding of an entry with so many token ids."""
        return ITEM_OVERHEAD_BYTES + num_tokens * self.max_token_bytes + num_extra_bytes

    def laws_bytes(self, nums_entries: Iterable[int]) -> int:
        """An upper bound for the laws of proposals, with so many entries each."""
        entry_bytes = self.max_token_bytes + WEIGHT_BYTES
        return sum(LAW_OVERHEAD_BYTES + num * entry_bytes for num in nums_entries)

    def sampling_bytes(self, num_biases: int, num_stop_ids: int, grammar: str = "") -> int:
        """An upper bound for the lists of sampling parameters and their grammar; 0 for none, which
        is usual."""
        if not num_biases and not num_stop_ids and not grammar:
            return 0
        bias_bytes = num_biases * (self.max_token_bytes + BIAS_BYTES)
        grammar_bytes = len(grammar) if grammar.isascii() else MAX_CHAR_BYTES * len(grammar)
        list_bytes = bias_bytes + num_stop_ids * self.max_token_bytes
        return SAMPLING_OVERHEAD_BYTES + list_bytes + grammar_bytes

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        # Runs for every entry of every message: one pass in C, and only a refusal costs more.
        num_tokens = len(token_ids)
        if num_tokens == 0:
            raise RemoteProtocolError("an entry without token ids")
        if num_tokens > self.max_tokens_per_item:
            raise RemoteProtocolError(
                f"an entry with {num_tokens} token ids, at most {self.max_tokens_per_item} allowed"
            )
        self.check_vocabulary(token_ids)

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        if token_ids and max(token_ids) >= self.vocab_size:
            raise RemoteProtocolError(
                f"token id {max(token_ids)} is outside the vocabulary of {self.vocab_size}"
            )

    def check_num_items(self, num_items: int) -> None:
        if num_items == 0:
            raise RemoteProtocolError("a batch without entries")
        if num_items > self.max_items_per_message:
            raise RemoteProtocolError(
                f"a batch of {num_items} entries, at most {self.max_items_per_message} allowed"
            )


def check_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise RemoteProtocolError(f"{name} must be in [{low}, {high}], got {value}")
    return value


def check_name(name: str, value: str) -> str:
    if not 1 <= len(value) <= MAX_NAME_CHARS:
        raise RemoteProtocolError(
            f"{name} must have 1 to {MAX_NAME_CHARS} characters, got {len(value)}"
        )
    return check_printable(name, value)


def check_printable(name: str, value: str) -> str:
    """Names and reasons end up in log lines: a peer must not be able to forge one."""
    if not value.isprintable():
        raise RemoteProtocolError(f"{name} must be printable")
    return value
