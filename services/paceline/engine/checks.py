"""The checks that every engine makes before a pass touches anything. Pure; knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.engine.base import EngineInfo, Propose, StepItem, Verify
from paceline.engine.block_table import BlockTable
from paceline.engine.prefix_cache import adapter_salt
from paceline.engine.step_rows import draft_ids, needs_history, prompt_len
from paceline.engine.token_tree import tree_problem
from paceline.errors import LocalProtocolError
from paceline.sampling.acceptance import verifiable_len
from paceline.sampling.params import VerificationMode

_REJECTION_MODES = (VerificationMode.REJECTION, VerificationMode.BLOCK)
_MAX_SALT = 2**64 - 1
# As many as the wire lets a target ask for; `best_tokens` could name twice as many.
MAX_RUNNER_UPS = 16
MAX_HEAD_CANDIDATES = 16  # of each Medusa head: a tree has no use for more


class Tables(Protocol):
    """Where the cached tokens of a sequence are found."""

    def table(self, sequence_id: int) -> BlockTable:
        """`LocalProtocolError` when there is none."""


def check_items(items: Sequence[StepItem], info: EngineInfo, pool: Tables) -> None:
    """Raise `LocalProtocolError` for the first slip of the caller; change nothing.

    Ids are checked here because an id beyond the vocabulary is undefined behaviour further down
    (an index error on CPU, a poisoned device on CUDA).
    """
    seen: set[int] = set()
    for item in items:
        if item.sequence_id in seen:
            raise LocalProtocolError(f"sequence {item.sequence_id} is twice in one pass")
        seen.add(item.sequence_id)
        where = f"sequence {item.sequence_id}"
        table = pool.table(item.sequence_id)
        if item.fork_of is not None:
            table = _forked(where, item, table, pool)
        _check_rows(where, item, info, table.length)
        _check_salt(where, item, info, table)
        _check_sampling(where, item)
        if problem := tree_problem(item):
            raise LocalProtocolError(f"{where}: {problem}")
        _check_heads(where, item, info)
        if item.num_prompt_logprobs is not None or item.scored_token_ids:
            _check_scores(where, item, info)
        if isinstance(item.rule, Verify):
            _check_verify(where, item, item.rule)


def _forked(where: str, item: StepItem, table: BlockTable, pool: Tables) -> BlockTable:
    """The table that a fork begins with."""
    assert item.fork_of is not None
    if table.length:
        raise LocalProtocolError(f"{where}: a fork, but {table.length} tokens are cached already")
    return pool.table(item.fork_of)


def _check_rows(where: str, item: StepItem, info: EngineInfo, cached_len: int) -> None:
    num_rows = len(item.token_ids)
    if num_rows == 0:
        raise LocalProtocolError(f"{where}: no rows")
    if not 0 <= item.start <= cached_len:
        raise LocalProtocolError(f"{where}: start {item.start}, but {cached_len} are cached")
    if item.start + num_rows > info.max_model_len:
        raise LocalProtocolError(
            f"{where}: {item.start + num_rows} tokens exceed max_model_len {info.max_model_len}"
        )
    if not _are_known(item.token_ids, info):
        raise LocalProtocolError(f"{where}: token id outside [0, {info.vocab_size})")
    if item.max_rows is not None and item.max_rows < 1:
        raise LocalProtocolError(f"{where}: at most {item.max_rows} rows")


def _check_salt(where: str, item: StepItem, info: EngineInfo, table: BlockTable) -> None:
    if not 0 <= item.cache_salt <= _MAX_SALT:
        raise LocalProtocolError(f"{where}: cache salt {item.cache_salt} is no u64")
    if item.adapter and item.adapter not in info.adapters:
        raise LocalProtocolError(f"{where}: there is no adapter {item.adapter!r}")
    if item.start > 0 and adapter_salt(item.cache_salt, item.adapter) != table.cache_salt:
        raise LocalProtocolError(
            f"{where}: the cache salt changed in the middle of the text, or the adapter"
        )


def _check_sampling(where: str, item: StepItem) -> None:
    num_rows = len(item.token_ids)
    if not 0 <= item.num_samples <= num_rows:
        raise LocalProtocolError(f"{where}: {item.num_samples} samples of {num_rows} rows")
    if item.output_index < 0:
        raise LocalProtocolError(f"{where}: output index {item.output_index}")
    if item.num_logprobs is not None and item.num_logprobs < 0:
        raise LocalProtocolError(f"{where}: {item.num_logprobs} logprobs")
    if not 0 <= item.num_runner_ups <= MAX_RUNNER_UPS:
        raise LocalProtocolError(f"{where}: {item.num_runner_ups} runner-ups")
    if item.num_runner_ups and item.rule is not None:
        raise LocalProtocolError(f"{where}: a draw from a law has no runner-ups")
    if needs_history(item) and prompt_len(item) < 0:
        raise LocalProtocolError(
            f"{where}: output index {item.output_index} in a text of {item.start + num_rows} tokens"
        )


def _check_heads(where: str, item: StepItem, info: EngineInfo) -> None:
    count = item.num_head_candidates
    if not 0 <= count <= MAX_HEAD_CANDIDATES:
        raise LocalProtocolError(f"{where}: {count} candidates of each head")
    if count and not info.num_heads:
        raise LocalProtocolError(f"{where}: candidates of heads, but there are no heads")
    if count and isinstance(item.rule, Propose):
        raise LocalProtocolError(f"{where}: heads guess behind what a target commits, not a draft")


def _check_scores(where: str, item: StepItem, info: EngineInfo) -> None:
    if item.num_prompt_logprobs is not None and item.num_prompt_logprobs < 0:
        raise LocalProtocolError(f"{where}: {item.num_prompt_logprobs} prompt logprobs")
    scored = item.scored_token_ids
    if scored and item.num_prompt_logprobs is None:
        raise LocalProtocolError(f"{where}: scored ids, but no prompt logprobs are asked for")
    if len(scored) > len(item.token_ids):
        raise LocalProtocolError(f"{where}: {len(scored)} scores of {len(item.token_ids)} rows")
    if not _are_known(scored, info):
        raise LocalProtocolError(f"{where}: scored token id outside [0, {info.vocab_size})")


def _check_verify(where: str, item: StepItem, rule: Verify) -> None:
    num_drafts = len(rule.draft_probs)
    if rule.mode not in _REJECTION_MODES:
        raise LocalProtocolError(f"{where}: mode {rule.mode} needs no laws")
    if item.num_samples != num_drafts + 1:
        raise LocalProtocolError(
            f"{where}: {num_drafts} proposals need {num_drafts + 1} samples, not {item.num_samples}"
        )
    if verifiable_len(draft_ids(item), rule.draft_probs) != num_drafts:
        raise LocalProtocolError(f"{where}: a proposal has no mass in its own law")


def _are_known(token_ids: Sequence[int], info: EngineInfo) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < info.vocab_size)
