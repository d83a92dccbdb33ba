"""The one seam between the service and a model: `Engine.step`.

An engine owns KV caches of numbered sequences and turns ragged batches into tokens. One call is
one forward pass over decode rows, verify rows and prefill chunks together. It knows nothing of
drafts, targets, requests, text or the network; the same class serves both sides.
Synchronous; exactly one thread may use an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from paceline.generation import TokenLogprobs
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

if TYPE_CHECKING:
    from paceline.grammars import TokenGrammars


NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What both ends compare at the handshake, and what admission needs.

    `vocab_size` counts the ids that the tokenizer has: ids >= it are refused and never sampled,
    even where the model's output layer is padded to more. `max_model_len` is in tokens.
    `num_blocks` * `block_size` is the KV capacity in tokens. `eos_token_ids` end a generation.
    `grammars`: over its tokenizer; None where grammars cannot be applied. `adapters`: names of the
    LoRA adapters that it has. `num_heads`: of its Medusa heads.
    """

    model_id: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    tokenizer_hash: str = ""
    eos_token_ids: tuple[int, ...] = ()
    grammars: TokenGrammars | None = field(default=None, compare=False, repr=False)
    adapters: tuple[str, ...] = ()
    num_heads: int = 0

    @property
    def has_grammars(self) -> bool:
        return self.grammars is not None


@dataclass(frozen=True, slots=True)
class Propose:
    """Draw each sampled row from its own sparse law and return that law (rejection modes, draft).

    The law is the processed one, quantised before the draw, so that what is stated is what the
    token came from. `round` keys the noise; the caller never uses a value twice for one sequence.
    """

    round: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Accept proposals by their stated laws (rejection modes, target).

    The item's last `len(draft_probs)` tokens are the proposals, drawn from `draft_probs`, and
    num_samples is one more. `mode` is REJECTION or BLOCK; `round` keys the noise.
    """

    mode: VerificationMode
    draft_probs: tuple[SparseProbs, ...]
    round: int


# One for every row of every pass, and never changed: not frozen only because that makes them twice
# as slow to build.
@dataclass(slots=True)
class StepItem:
    """Rows of one sequence in one pass.

    The engine first truncates the sequence's cache to `start` (a rewind; `start` may not exceed
    the cached length), then appends `token_ids` (at least one) at absolute positions
    `start, start+1, ...`. The logits of the LAST `num_samples` rows are sampled; row j of those
    decides output index `output_index + j` (0-based count of generated tokens: the noise key).
    decode = 1 token, 1 sample; verify = 1 + k tokens, k + 1 samples; a prefill chunk that is not
    the last one = n tokens, 0 samples.

    `rule` None: each sampled row gives the sampler's own token (argmax or keyed noise).
    `max_rows` None: all rows are computed, or found in the prefix cache. With a number the item
    is a prefill of unknown cost: after whatever the prefix cache holds, at most `max_rows` rows
    are computed; if they do not reach the end, nothing is sampled and `cached_len` of the result
    says how far it got.
    `num_logprobs`: log-probabilities for the sampled rows, with so many top tokens; None = none.
    `num_prompt_logprobs`: the same for `scored_token_ids`, where row j of the item (from its
    first) predicts entry j; the prefix cache is then not read, so that every row is computed.
    `cache_salt` (u64): the prefix cache shares blocks only between sequences of equal salt. It is
    the same in every item of a sequence.
    `adapter`: the LoRA adapter (one of `info.adapters`) that the rows are computed with; empty:
    the model itself. The same in every item of a text. It counts as part of the salt: see
    `prefix_cache.adapter_salt`.
    `fork_of`: the sequence is empty, and begins with the cache that another one had before this
    pass, up to `start` (at most what is cached there): none of that is computed again.
    `num_runner_ups`: with no `rule`, also name the ids that come next after each sampled row's
    token, best first, under the same logits and noise (what the target most likely commits when
    it does not commit that token).

    `tree_parents`: the item's last tokens are a tree, not a chain. Node j (of as many as there are
    parents) goes on from node `tree_parents[j]` < j, or from the committed tokens before the tree
    (at least one) if that is -1: it sees these and its ancestors alone, and decides the output
    index of its depth. num_samples is one more than the nodes. The engine takes the path that its
    own tokens name and keeps no other node in the cache. Only with no `rule` and no runner-ups,
    `max_rows` or prompt logprobs, and with `sampling` that needs no history. During the pass each
    node takes a place in the cache, so `start` + all rows may not exceed `max_model_len`.

    The grammar of `sampling` is part of each sampled row's law, after the proposals before that
    row; an engine without `info.grammars` leaves it out, which is good enough for a draft alone.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    output_index: int = 0
    rule: Propose | Verify | None = None
    max_rows: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    scored_token_ids: tuple[int, ...] = ()
    cache_salt: int = 0
    num_runner_ups: int = 0
    fork_of: int | None = None
    adapter: str = ""
    tree_parents: tuple[int, ...] = ()
    num_head_candidates: int = 0


@dataclass(slots=True)  # as above
class StepResult:
    """`token_ids` has an entry per sampled row: the sampler's own token. None at all where the rows
    did not reach the end (`max_rows`), or where they did but have no room (`TranslatedEngine`).

    Under `Verify` it is what to commit instead, `num_accepted` proposals and the token after
    them; under `Propose` `draft_probs` has each token's law. `cached_len`: tokens in the cache
    after the step (None: all of the item's rows). `logprobs` has an entry per token of
    `token_ids` if asked for, `prompt_logprobs` one per scored row that was computed.
    `num_prefix_tokens`: rows of this item that the prefix cache already held.
    `runner_ups`: one tuple per sampled row if asked for; shorter where fewer ids are possible.
    Of a tree, `token_ids` are the accepted nodes and the sampler's token behind them, with
    `num_accepted`, and `cached_len` ends behind the last accepted node.
    `head_token_ids`: entry h has the candidates of head h, best first, for the place h + 1 behind
    the last token that is committed; drawn like that place's token (same noise) if sampled.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    cached_len: int | None = None
    num_accepted: int | None = None
    draft_probs: tuple[SparseProbs, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_prefix_tokens: int = 0
    runner_ups: tuple[tuple[int, ...], ...] = ()
    head_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since start; `num_free_blocks` and `num_sequences` are current.

    A block that only the prefix cache holds counts as free: it is given up when needed.
    `num_prefix_tokens` were found in the prefix cache, of `num_prefix_queries` looked up.
    `logits_us`: when the last pass had its logits and began to sample, on the process's monotonic
    clock in microseconds; 0 where that is not known.
    """

    num_free_blocks: int
    num_sequences: int
    num_passes: int = 0
    num_rows: int = 0
    num_prefix_tokens: int = 0
    num_prefix_queries: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    logits_us: int = field(default=0, compare=False)


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
        """Whether sequences can grow to the given lengths: pairs (sequence_id, length).

        What the prefix cache would spare is not counted. After a rewind over blocks that another
        sequence shares, `step` may need more than is said here.
        """

    def free(self, sequence_id: int) -> None:
        """Forget a sequence and return its blocks; unknown ids are ignored."""

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None:
        """Raise AssertionError when bookkeeping is inconsistent (blocks lost or shared twice)."""


class OutOfBlocks(Exception):
    """The KV pool cannot hold the rows of this pass; nothing was changed."""


class EngineBroken(Exception):
    """The engine can do no pass any more (a rank died or hangs): its replica must be replaced."""
