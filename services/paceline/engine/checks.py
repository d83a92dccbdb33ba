"""The checks that every engine makes before a pass touches anything. Pure; knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.blocks import BlockPool
from paceline.errors import LocalProtocolError


def check_items(items: Sequence[StepItem], info: EngineInfo, pool: BlockPool) -> None:
    """Raise `LocalProtocolError` for the first slip of the caller; change nothing.

    Ids are checked here because an id beyond the vocabulary is undefined behaviour further down
    (an index error on CPU, a poisoned device on CUDA).
    """
    seen: set[int] = set()
    for item in items:
        if item.sequence_id in seen:
            raise LocalProtocolError(f"sequence {item.sequence_id} is twice in one pass")
        seen.add(item.sequence_id)
        _check_item(item, info, pool.table(item.sequence_id).length)


def _check_item(item: StepItem, info: EngineInfo, cached_len: int) -> None:
    where = f"sequence {item.sequence_id}"
    num_rows = len(item.token_ids)
    if num_rows == 0:
        raise LocalProtocolError(f"{where}: no rows")
    if not 0 <= item.start <= cached_len:
        raise LocalProtocolError(f"{where}: start {item.start}, but {cached_len} are cached")
    if item.start + num_rows > info.max_model_len:
        raise LocalProtocolError(
            f"{where}: {item.start + num_rows} tokens exceed max_model_len {info.max_model_len}"
        )
    if not 0 <= item.num_samples <= num_rows:
        raise LocalProtocolError(f"{where}: {item.num_samples} samples of {num_rows} rows")
    if item.output_index < 0:
        raise LocalProtocolError(f"{where}: output index {item.output_index}")
    if min(item.token_ids) < 0 or max(item.token_ids) >= info.vocab_size:
        raise LocalProtocolError(f"{where}: token id outside [0, {info.vocab_size})")
