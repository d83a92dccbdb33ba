"""A model without weights: logits are a hash of the prefix. Pure, deterministic, no torch.

The hash runs over the *whole* prefix, so that a single slip of the cache (a lost, repeated or
misplaced token) changes every token after it and cannot heal. It knows nothing of text: ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.base import EngineInfo, EngineStats, StepItem, StepResult
from paceline.engine.blocks import BlockPool
from paceline.engine.checks import check_items
from paceline.sampling.acceptance import coupled_token, greedy_token

_MASK = (1 << 64) - 1
_NUM_LIVE_IDS = 8
_LOGIT_RANGE = 4.0
_NOT_LIVE = float("-inf")


def _mix(state: int, value: int) -> int:
    """One round of splitmix64 over state + value: well spread, and the same on every machine."""
    z = (state + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class ToyEngine:
    """`Engine` over a hashed prefix; see `engine/base.py` for the contract.

    Engines with equal `seed` and vocabulary agree on every context, except that a share
    `error_rate` of contexts, chosen by `error_seed`, gets unrelated logits. So a toy draft with
    error_rate e agrees with a toy target in about 1 - e of the contexts (plus chance hits).
    At most 8 ids per context have a finite logit, spread over 4 units.
    """

    def __init__(
        self, info: EngineInfo, *, seed: int = 0, error_rate: float = 0.0, error_seed: int = 1
    ) -> None:
        self._info = info
        self._pool = BlockPool(info.num_blocks, info.block_size)
        self._root = _mix(seed & _MASK, 0)
        self._error_bound = int(error_rate * 2**64)
        self._error_seed = error_seed
        # The toy's KV cache: states[i] is the hash of tokens 0..i. Invariant: as long as the
        # block pool's length of that sequence.
        self._states: dict[int, list[int]] = {}
        self._num_passes = 0
        self._num_rows = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    def add(self, sequence_id: int) -> None:
        self._pool.add(sequence_id)
        self._states[sequence_id] = []

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        check_items(items, self._info, self._pool)
        self._pool.reserve((item.sequence_id, item.start, len(item.token_ids)) for item in items)
        self._num_passes += 1
        self._num_rows += sum(len(item.token_ids) for item in items)
        return [self._run(item) for item in items]

    def cached_len(self, sequence_id: int) -> int:
        return self._pool.table(sequence_id).length

    def can_fit(self, items: Sequence[tuple[int, int]]) -> bool:
        return self._pool.can_fit(items)

    def free(self, sequence_id: int) -> None:
        self._pool.free(sequence_id)
        self._states.pop(sequence_id, None)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_free_blocks=self._pool.num_free_blocks,
            num_sequences=self._pool.num_sequences,
            num_passes=self._num_passes,
            num_rows=self._num_rows,
        )

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        assert self._pool.num_sequences == len(self._states)
        for sequence_id, states in self._states.items():
            assert len(states) == self._pool.table(sequence_id).length

    def logits(self, token_ids: Sequence[int]) -> list[float]:
        """The logits [vocab_size] after a prefix, without any cache: the oracle of tests."""
        state = self._root
        for token_id in token_ids:
            state = _mix(state, token_id)
        return self._logits(state)

    def _run(self, item: StepItem) -> StepResult:
        states = self._states[item.sequence_id]
        del states[item.start :]
        for token_id in item.token_ids:
            states.append(_mix(states[-1] if states else self._root, token_id))
        self._pool.commit(item.sequence_id, len(states))
        sampled = states[len(states) - item.num_samples :]
        return StepResult(
            item.sequence_id,
            tuple(self._sample(state, item, offset) for offset, state in enumerate(sampled)),
        )

    def _sample(self, state: int, item: StepItem, offset: int) -> int:
        logits = self._logits(state)
        if item.sampling.is_greedy:
            return greedy_token(logits)
        return coupled_token(logits, item.sampling, item.output_index + offset)

    def _logits(self, state: int) -> list[float]:
        if _mix(state, self._error_seed) < self._error_bound:
            state = _mix(state, self._error_seed + 1)
        logits = [_NOT_LIVE] * self._info.vocab_size
        for index in range(_NUM_LIVE_IDS):
            word = _mix(state, index)
            token_id = (word >> 32) % self._info.vocab_size
            logits[token_id] = (word & 0xFFFFFFFF) / 2**32 * _LOGIT_RANGE
        return logits
