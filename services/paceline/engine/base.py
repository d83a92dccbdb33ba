"""The one seam between the service and a model: `Engine.step`.

An engine owns KV caches of numbered sequences and turns ragged batches into tokens. One call is
one forward pass over decode rows, verify rows and prefill chunks together. It knows nothing of
drafts, targets, requests, text or the network; the same class serves both sides.
Synchronous; exactly one thread may use an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What both ends compare at the handshake, and what admission needs.

    `vocab_size` counts logits per row (ids >= it are refused). `max_model_len` is in tokens.
    `num_blocks` * `block_size` is the KV capacity in tokens. `eos_token_ids` end a generation.
    """

    model_id: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    tokenizer_hash: str = ""
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepItem:
    """Rows of one sequence in one pass.

    The engine first truncates the sequence's cache to `start` (a rewind; `start` may not exceed
    the cached length), then appends `token_ids` (at least one) at absolute positions
    `start, start+1, ...`. The logits of the LAST `num_samples` rows are sampled; row j of those
    decides output index `output_index + j` (0-based count of generated tokens: the noise key).
    decode = 1 token, 1 sample; verify = 1 + k tokens, k + 1 samples; a prefill chunk that is not
    the last one = n tokens, 0 samples.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    output_index: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """`token_ids` has `num_samples` entries: the sampler's own token at each sampled row."""

    sequence_id: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since start; `num_free_blocks` and `num_sequences` are current."""

    num_free_blocks: int
    num_sequences: int
    num_passes: int = 0
    num_rows: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Errors: `LocalProtocolError` for a caller's slip (unknown sequence, start beyond the
    cache, id out of range); `OutOfBlocks` when the pool is exhausted, before anything changed."""

    @property
    def info(self) -> EngineInfo: ...

    def add(self, sequence_id: int) -> None:
        """Begin an empty sequence."""

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        """One forward pass; results in the order of `items`, one per item."""

    def cached_len(self, sequence_id: int) -> int:
        """Tokens whose KV is in the cache."""

    def can_fit(self, items: Sequence[tuple[int, int]]) -> bool:
        """Whether sequences can grow to the given lengths: pairs (sequence_id, length)."""

    def free(self, sequence_id: int) -> None:
        """Forget a sequence and return its blocks; unknown ids are ignored."""

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None:
        """Raise AssertionError when bookkeeping is inconsistent (blocks lost or shared twice)."""


class OutOfBlocks(Exception):
    """The KV pool cannot hold the rows of this pass; nothing was changed."""
