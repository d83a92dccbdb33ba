"""A model without weights: logits are a hash of the prefix. Deterministic, no torch; it looks at
the clock only to say when a pass began to sample.

The hash runs over the *whole* prefix, so that a single slip of the cache (a lost, repeated or
misplaced token) changes every token after it and cannot heal. It knows nothing of text: ids only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from paceline.engine import toy_rules
from paceline.engine.base import EngineInfo, EngineStats, Propose, StepItem, StepResult
from paceline.engine.blocks import BlockPool, BlockTable, Reservation
from paceline.engine.checks import check_items
from paceline.engine.grammar_masks import GrammarMasks
from paceline.engine.step_rows import (
    deciding_row,
    draft_ids,
    head_sampling,
    histories,
    needs_history,
    num_sampled_rows,
    scored_ids,
    wanted_rows,
)
from paceline.engine.token_tree import accepted_rows, sample_offsets
from paceline.engine.toy_heads import guesses
from paceline.engine.toy_rules import ToyRow
from paceline.generation import TokenLogprobs
from paceline.grammars import allowed_token_ids
from paceline.sampling.sparse_probs import SparseProbs

_MASK = (1 << 64) - 1
_NUM_LIVE_IDS = 8
_LOGIT_RANGE = 4.0
_NOT_LIVE = float("-inf")
_HEAD_SEED = 1 << 40  # beyond token ids, so that a head errs whatever the text goes on with


def _mix(state: int, value: int) -> int:
    """One round of splitmix64 over state + value: well spread, and the same on every machine."""
    z = (state + (value + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _adapted(state: int, adapter: str) -> int:
    """The state that names the logits of a context under an adapter; the cache has `state`."""
    if not adapter:
        return state
    seed = int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "little")
    return _mix(state, seed + 1) if _mix(state, seed) & 1 else state


class ToyEngine:
    """`Engine` over a hashed prefix; see `engine/base.py` for the contract.

    Engines with equal `seed` and vocabulary agree on every context, except that a share
    `error_rate` of contexts, chosen by `error_seed`, gets unrelated logits. So a toy draft with
    error_rate e agrees with a toy target in about 1 - e of the contexts (plus chance hits).
    At most 8 ids per context have a finite logit, spread over 4 units.
    Its Medusa heads (`info.num_heads`) know the rule, and are wrong as often as `head_error_rate`
    says (`toy_heads`).
    An adapter of `info.adapters` has no weights: its name chooses half of all contexts, which get
    logits of their own.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        seed: int = 0,
        error_rate: float = 0.0,
        error_seed: int = 1,
        head_error_rate: float = 0.2,
        enable_prefix_caching: bool = True,
    ) -> None:
        self._info = info
        self._pool = BlockPool(
            info.num_blocks, info.block_size, enable_prefix_caching=enable_prefix_caching
        )
        self._masks = GrammarMasks(info.grammars)
        self._bitmasks: dict[int, tuple[bytes | None, ...]] = {}  # of the pass, per sampled row
        self._root = _mix(seed & _MASK, 0)
        self._error_bound = int(error_rate * 2**64)
        self._error_seed = error_seed
        self._head_error_rate = head_error_rate
        # The toy's KV cache, block -> slots: the slot of position i holds the hash of tokens
        # 0..i. A row is computed from the slot before it, as a model's would be, so a block in
        # the wrong hands gives wrong tokens.
        self._kv: dict[int, list[int]] = {}
        self._num_passes = 0
        self._num_rows = 0
        self._logits_us = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    def add(self, sequence_id: int) -> None:
        self._pool.add(sequence_id)

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        check_items(items, self._info, self._pool)
        reservations = self._pool.reserve(map(wanted_rows, items))
        try:
            results = self._run(items, reservations)
        except Exception:  # a grammar that costs too much: as if the pass had never begun
            for reservation in reservations:
                self._pool.abort(reservation)
            raise
        for reservation in reservations:
            self._pool.commit(reservation)
        return results

    def _run(
        self, items: Sequence[StepItem], reservations: Sequence[Reservation]
    ) -> list[StepResult]:
        self._bitmasks = {
            item.sequence_id: self._mask(item, reservation)
            for item, reservation in zip(items, reservations, strict=True)
        }
        self._num_passes += 1
        self._num_rows += sum(len(reservation.computed_ids) for reservation in reservations)
        self._copy(reservations)
        written = [
            self._write(reservation, item.tree_parents)
            for item, reservation in zip(items, reservations, strict=True)
        ]
        self._logits_us = time.monotonic_ns() // 1000
        results = [
            self._result(item, reservation, states)
            for item, reservation, states in zip(items, reservations, written, strict=True)
        ]
        for reservation in reservations:
            self._move(reservation)
        return results

    def cached_len(self, sequence_id: int) -> int:
        return self._pool.table(sequence_id).length

    def can_fit(self, items: Sequence[tuple[int, int]]) -> bool:
        return self._pool.can_fit(items)

    def free(self, sequence_id: int) -> None:
        self._pool.free(sequence_id)
        self._masks.free(sequence_id)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_free_blocks=self._pool.num_free_blocks,
            num_sequences=self._pool.num_sequences,
            num_passes=self._num_passes,
            num_rows=self._num_rows,
            num_prefix_tokens=self._pool.num_prefix_tokens,
            num_prefix_queries=self._pool.num_prefix_queries,
            logits_us=self._logits_us,
        )

    def check_integrity(self) -> None:
        """Also that every slot holds what its sequence's tokens make."""
        self._pool.check_integrity()
        for sequence_id, table in self._pool.tables.items():
            state = self._root
            for position, token_id in enumerate(table.token_ids):
                state = _mix(state, token_id)
                assert self._read(table, position) == state, (
                    f"sequence {sequence_id}: position {position} holds another text's state"
                )

    def logits(self, token_ids: Sequence[int], adapter: str = "") -> list[float]:
        """The logits [vocab_size] after a prefix, without any cache: the oracle of tests."""
        return self._logits(_adapted(self._state(token_ids), adapter))

    def full_logits(self, token_ids: Sequence[int]) -> list[float]:
        """The same where a grammar is to be followed, which seldom allows one of the few ids that
        are live: all others have a logit too, below those."""
        return self._full_logits(self._state(token_ids))

    def _state(self, token_ids: Sequence[int]) -> int:
        state = self._root
        for token_id in token_ids:
            state = _mix(state, token_id)
        return state

    def _mask(self, item: StepItem, reservation: Reservation) -> tuple[bytes | None, ...]:
        if not num_sampled_rows(item, reservation):
            return ()
        return self._masks.rows(item, self._pool.table(item.sequence_id).token_ids)

    def _result(
        self, item: StepItem, reservation: Reservation, states: Sequence[int]
    ) -> StepResult:
        written = states
        if item.adapter:
            states = [_adapted(state, item.adapter) for state in states]
        sampled = states[len(states) - num_sampled_rows(item, reservation) :]
        token_ids, num_accepted, laws = self._decide(item, sampled)
        first = len(written) - len(sampled)
        if item.tree_parents:
            path = accepted_rows(item, token_ids)
            token_ids, num_accepted = tuple(token_ids[row] for row in path), len(path) - 1
            reservation.accept(len(item.tree_parents), [row - 1 for row in path[1:]])
            sampled = [sampled[row] for row in path]
        logprobs: tuple[TokenLogprobs, ...] = ()
        if item.num_logprobs is not None:
            logprobs = self._score(sampled, token_ids, item.num_logprobs)
        scores: tuple[TokenLogprobs, ...] = ()
        if item.num_prompt_logprobs is not None:
            from_start = states[reservation.start - reservation.first :]
            scored = scored_ids(item, reservation)
            scores = self._score(from_start, scored, item.num_prompt_logprobs)
        runner_ups: tuple[tuple[int, ...], ...] = ()
        if item.num_runner_ups:
            runner_ups = self._runner_ups(item, sampled)
        head_token_ids: tuple[tuple[int, ...], ...] = ()
        if item.num_head_candidates and sampled:
            row = deciding_row(item, token_ids, num_accepted)
            state = written[first + row]
            depth = row if num_accepted is None else num_accepted
            head_token_ids = self._guess(item, _mix(state, token_ids[depth]), depth)
        return StepResult(
            item.sequence_id,
            token_ids,
            cached_len=reservation.end,
            num_accepted=num_accepted,
            draft_probs=laws,
            logprobs=logprobs,
            prompt_logprobs=scores,
            num_prefix_tokens=reservation.num_prefix_tokens,
            runner_ups=runner_ups,
            head_token_ids=head_token_ids,
        )

    def _copy(self, reservations: Sequence[Reservation]) -> None:
        """The last blocks that forks begin with, all of them as they were before the pass."""
        size = self._info.block_size
        copies = [
            (reservation.blocks[reservation.first // size], self._kv[reservation.copied_block][:])
            for reservation in reservations
            if reservation.copied_block is not None
        ]
        self._kv.update(copies)

    def _move(self, reservation: Reservation) -> None:
        size = self._info.block_size
        moved = [
            (destination, self._kv[source // size][source % size])
            for source, destination in reservation.moved_slots(size)
        ]
        for slot, state in moved:
            self._kv[slot // size][slot % size] = state

    def _write(self, reservation: Reservation, parents: Sequence[int]) -> list[int]:
        """The states of the computed rows, which are in the cache afterwards; the last ones are
        the nodes of a tree if it has `parents`."""
        block_size = self._info.block_size
        state = self._root
        if reservation.first:
            index, offset = divmod(reservation.first - 1, block_size)
            state = self._kv[reservation.blocks[index]][offset]
        states: list[int] = []
        num_committed = len(reservation.computed_ids) - len(parents)
        for row, token_id in enumerate(reservation.computed_ids):
            if row >= num_committed:
                state = states[num_committed + parents[row - num_committed]]
            index, offset = divmod(reservation.first + row, block_size)
            state = _mix(state, token_id)
            states.append(state)
            block = reservation.blocks[index]
            slots = self._kv.get(block)
            if slots is None:
                slots = self._kv[block] = [0] * block_size
            slots[offset] = state
        return states

    def _read(self, table: BlockTable, position: int) -> int:
        index, offset = divmod(position, self._info.block_size)
        return self._kv[table.blocks[index]][offset]

    def _decide(
        self, item: StepItem, states: Sequence[int]
    ) -> tuple[tuple[int, ...], int | None, tuple[SparseProbs, ...]]:
        """(tokens, number accepted, laws) of the sampled rows, by the item's rule."""
        if item.rule is None or not states:
            places = zip(states, sample_offsets(item), strict=False)  # no states before the end
            tokens = tuple(self._sample(state, item, offset) for state, offset in places)
            return tokens, None, ()
        rows = [self._row(state, item, offset) for offset, state in enumerate(states)]
        if isinstance(item.rule, Propose):
            drawn = [toy_rules.propose(row, item.rule.round) for row in rows]
            return tuple(token for token, _ in drawn), None, tuple(law for _, law in drawn)
        drafts = draft_ids(item)
        accepted = toy_rules.verify(rows, drafts, item.rule)
        kept = drafts[: accepted.num_accepted_tokens]
        return (*kept, accepted.next_token_id), accepted.num_accepted_tokens, ()

    def _sample(self, state: int, item: StepItem, offset: int) -> int:
        """The plain token `offset` places behind the first: a function of the text (`state`)."""
        return self._row(state, item, offset).token()

    def _runner_ups(self, item: StepItem, states: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        rows = (self._row(state, item, offset) for offset, state in enumerate(states))
        return tuple(toy_rules.best_tokens(row, 1 + item.num_runner_ups)[1:] for row in rows)

    def _guess(self, item: StepItem, state: int, depth: int) -> tuple[tuple[int, ...], ...]:
        """Candidates of each head; `state` includes the last committed token, which is the item's
        sampled one number `depth`. A head knows what comes before its place only if the rule does
        without a history."""
        law, count = head_sampling(item.sampling), item.num_head_candidates
        found = []
        for head in range(self._info.num_heads):
            logits = self._logits(_adapted(state, item.adapter))
            row = ToyRow(logits, law, item.output_index + depth + 1 + head)
            best = toy_rules.best_tokens(row, count + 1)
            chance = _mix(state, _HEAD_SEED + head)
            found.append(guesses(best, chance, self._head_error_rate, count))
            state = _mix(state, best[0])
        return tuple(found)

    def _row(self, state: int, item: StepItem, offset: int) -> ToyRow:
        row = ToyRow(self._logits(state), item.sampling, item.output_index + offset)
        if not needs_history(item):
            return row
        cached = self._pool.table(item.sequence_id).token_ids
        prompt, output = histories(item, cached)[offset]
        row = replace(row, prompt_token_ids=prompt, output_token_ids=output)
        bitmask = self._bitmasks[item.sequence_id][offset]
        if bitmask is None:
            return row
        allowed = allowed_token_ids(bitmask)
        return replace(row, logits=self._full_logits(state), allowed_token_ids=allowed)

    def _score(
        self, states: Sequence[int], token_ids: Sequence[int], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Row j's law of entry j; there may be more rows than tokens."""
        return tuple(
            toy_rules.logprobs(self._logits(state), token_id, num_top)
            for state, token_id in zip(states, token_ids, strict=False)
        )

    def _logits(self, state: int) -> list[float]:
        if _mix(state, self._error_seed) < self._error_bound:
            state = _mix(state, self._error_seed + 1)
        logits = [_NOT_LIVE] * self._info.vocab_size
        for index in range(_NUM_LIVE_IDS):
            word = _mix(state, index)
            token_id = (word >> 32) % self._info.vocab_size
            logits[token_id] = (word & 0xFFFFFFFF) / 2**32 * _LOGIT_RANGE
        return logits

    def _full_logits(self, state: int) -> list[float]:
        logits = self._logits(state)[:]
        for token_id, logit in enumerate(logits):
            if logit == _NOT_LIVE:
                word = _mix(state, _NUM_LIVE_IDS + token_id)
                logits[token_id] = ((word & 0xFFFFFFFF) / 2**32 - 1.0) * _LOGIT_RANGE
        return logits
