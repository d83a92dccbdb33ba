"""A model whose agreement with its draft is a number: for benchmarks of the scheduling. Pure.

A token costs a few integer operations, whatever the vocabulary, so that thousands of rows fit
into one millisecond-scale pass (the toy engine, which makes logits, is for exactness). The text
is a hash of all tokens before, and so is whether the draft agrees with it: independent of
everything, at the probability that the script states. It knows no logits, noise or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from paceline.engine.base import (
    EngineInfo,
    EngineStats,
    OutOfBlocks,
    StepItem,
    StepResult,
)
from paceline.engine.scripted_prefixes import Prefixes
from paceline.engine.scripted_text import GOLDEN, MASK, advance, head_guesses, mix
from paceline.engine.step_rows import deciding_row
from paceline.engine.token_tree import accepted_rows, sample_offsets, tree_problem
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams

# Longest table of acceptances over output positions, in tokens.
MAX_PERIOD = 1 << 16


@dataclass(frozen=True, slots=True)
class Phase:
    """For `num_tokens` output positions the draft agrees with probability `acceptance`."""

    num_tokens: int
    acceptance: float


@dataclass(frozen=True, slots=True)
class Script:
    """How a draft fares. A sequence belongs to class `first prompt token % len(classes)`; its
    output goes through the phases of that class again and again.

    Where the draft is wrong, the target's token is its first runner-up with probability
    `corrections[0]`, one of its first two with probability `corrections[1]`, and so on.
    """

    classes: tuple[tuple[Phase, ...], ...]
    corrections: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        phases = list(chain(*self.classes))
        if not self.classes or not all(self.classes):
            raise ValueError("a script needs a class, and each class a phase")
        if any(not 0.0 <= phase.acceptance <= 1.0 or phase.num_tokens < 1 for phase in phases):
            raise ValueError(f"each phase needs a token and an acceptance in [0, 1], got {phases}")
        if max(sum(phase.num_tokens for phase in each) for each in self.classes) > MAX_PERIOD:
            raise ValueError(f"the phases of a class must be at most {MAX_PERIOD} tokens")
        steps = (0.0, *self.corrections, 1.0)
        if any(left > right for left, right in pairwise(steps)):
            raise ValueError(f"corrections must rise from 0 to 1, got {self.corrections}")

    @staticmethod
    def steady(acceptance: float, corrections: tuple[float, ...] = ()) -> Script:
        """One class, the same everywhere."""
        return Script(((Phase(1, acceptance),),), corrections)


@dataclass(slots=True)
class _Text:
    """What the cache holds of a sequence; `states[n]` is the hash of its first n tokens. `bounds`
    is the table of its class: the draft agrees at output position i if a uniform u64 is below
    the i-th of them."""

    states: list[int]
    token_ids: list[int] = field(default_factory=list)
    bounds: tuple[int, ...] = ()
    num_blocks: int = 0


@dataclass(slots=True)
class _Counts:
    num_passes: int = 0
    num_rows: int = 0
    num_prefix_tokens: int = 0
    num_prefix_queries: int = 0


class ScriptedEngine:
    """`Engine` by a script; see `engine/base.py` for the contract. Greedy and nothing else.

    Without a `script` it is the target: every engine of the same `seed` and vocabulary writes the
    same text. With one it is a draft for that target. Blocks are counted as if no two sequences
    shared any; what the prefix cache remembers takes none. Its Medusa heads (`info.num_heads`) are
    wrong as often as `head_error_rate` says (`toy_heads`).
    """

    def __init__(
        self,
        info: EngineInfo,
        script: Script | None = None,
        *,
        seed: int = 0,
        draft_seed: int = 1,
        head_error_rate: float = 0.2,
        enable_prefix_caching: bool = True,
    ) -> None:
        if info.vocab_size < 16:
            raise ValueError(f"a scripted text needs 16 ids, got {info.vocab_size}")
        self._info = info
        self._tables = () if script is None else tuple(map(_bounds, script.classes))
        corrections = () if script is None else script.corrections
        self._corrections = tuple(int(share * 2**32) for share in corrections)
        self._root = mix(seed & MASK)
        self._draft_key = mix((draft_seed & MASK) ^ GOLDEN)
        self._head_error_rate = head_error_rate
        self._texts: dict[int, _Text] = {}
        self._free_blocks = info.num_blocks
        self._prefixes = Prefixes(info.num_blocks if enable_prefix_caching else 0)
        self._counts = _Counts()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def add(self, sequence_id: int) -> None:
        if sequence_id in self._texts:
            raise LocalProtocolError(f"sequence {sequence_id} exists")
        self._texts[sequence_id] = _Text([self._root])

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        self._check(items)
        found = [self._find(item) for item in items]
        ends = [_end(item, len(states)) for item, states in zip(items, found, strict=True)]
        self._take_blocks(items, ends)
        self._counts.num_passes += 1
        self._fork(items)
        return [
            self._compute(item, states, end)
            for item, states, end in zip(items, found, ends, strict=True)
        ]

    def cached_len(self, sequence_id: int) -> int:
        return len(self._text(sequence_id).states) - 1

    def can_fit(self, items: Sequence[tuple[int, int]]) -> bool:
        needed = 0
        for sequence_id, length in items:
            needed += max(0, self._blocks(length) - self._text(sequence_id).num_blocks)
        return needed <= self._free_blocks

    def free(self, sequence_id: int) -> None:
        text = self._texts.pop(sequence_id, None)
        if text is not None:
            self._free_blocks += text.num_blocks

    def stats(self) -> EngineStats:
        counts = self._counts
        return EngineStats(
            num_free_blocks=self._free_blocks,
            num_sequences=len(self._texts),
            num_passes=counts.num_passes,
            num_rows=counts.num_rows,
            num_prefix_tokens=counts.num_prefix_tokens,
            num_prefix_queries=counts.num_prefix_queries,
        )

    def check_integrity(self) -> None:
        taken = sum(text.num_blocks for text in self._texts.values())
        assert taken + self._free_blocks == self._info.num_blocks, "blocks lost"
        for sequence_id, text in self._texts.items():
            held = self._blocks(len(text.states) - 1)
            assert text.num_blocks == held, f"sequence {sequence_id} counts its blocks wrongly"

    # -- a pass -----------------------------------------------------------------------------

    def _check(self, items: Sequence[StepItem]) -> None:
        seen = set()
        for item in items:
            text = self._text(item.sequence_id)
            start = text if item.fork_of is None else self._text(item.fork_of)
            problem = self._problem(item, len(start.states) - 1)
            if item.fork_of is not None and len(text.states) > 1:
                problem = "a fork of what is not empty"
            if item.sequence_id in seen:
                problem = "twice in one pass"
            if problem:
                raise LocalProtocolError(f"sequence {item.sequence_id}: {problem}")
            seen.add(item.sequence_id)

    def _problem(self, item: StepItem, cached_len: int) -> str:
        """What is wrong with an item; empty: nothing."""
        token_ids, info = item.token_ids, self._info
        if not token_ids or not 0 <= item.num_samples <= len(token_ids):
            return f"{item.num_samples} samples of {len(token_ids)} rows"
        if not 0 <= item.start <= cached_len:
            return f"start {item.start}, but {cached_len} are cached"
        if item.start + len(token_ids) > info.max_model_len:
            return f"longer than max_model_len {info.max_model_len}"
        if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
            return f"token id outside [0, {info.vocab_size})"
        if item.max_rows is not None and item.max_rows < 1:
            return f"at most {item.max_rows} rows"
        if item.rule is not None or _is_adjusted(item.sampling):
            return "a scripted engine only decodes greedily, without processors"
        if item.num_logprobs is not None or item.num_prompt_logprobs is not None:
            return "a scripted engine has no log-probabilities"
        if item.num_head_candidates and not info.num_heads:
            return "candidates of heads, but there are no heads"
        if item.cache_salt:
            return "a scripted engine knows no cache salts"
        return tree_problem(item)

    def _find(self, item: StepItem) -> list[int]:
        """Hashes of the item's first rows, where the prefix cache holds them."""
        size = self._info.block_size
        if item.max_rows is None or not self._prefixes.limit or item.start % size:
            return []
        if item.fork_of is not None:
            return []
        state = self._texts[item.sequence_id].states[item.start]
        return self._prefixes.find(state, item.token_ids, size)

    def _take_blocks(self, items: Sequence[StepItem], ends: Sequence[int]) -> None:
        """All or nothing."""
        wanted = [self._blocks(end) for end in ends]
        texts = [self._texts[item.sequence_id] for item in items]
        held = sum(text.num_blocks for text in texts)
        if sum(wanted) - held > self._free_blocks:
            raise OutOfBlocks(f"{sum(wanted)} blocks, of which {self._free_blocks + held} are free")
        self._free_blocks -= sum(wanted) - held
        for text, num_blocks in zip(texts, wanted, strict=True):
            text.num_blocks = num_blocks

    def _fork(self, items: Sequence[StepItem]) -> None:
        """Before any row is computed: a fork begins with what was there before the pass."""
        for item in items:
            if item.fork_of is not None:
                text, parent = self._texts[item.sequence_id], self._texts[item.fork_of]
                text.states = parent.states[: item.start + 1]
                text.token_ids = parent.token_ids[: item.start]
                text.bounds = parent.bounds

    def _compute(self, item: StepItem, found: list[int], end: int) -> StepResult:
        text, start = self._texts[item.sequence_id], item.start
        states, num_found = text.states, len(found)
        del states[start + 1 :]
        del text.token_ids[start:]
        states += found
        num_committed = end - start - len(item.tree_parents)
        text.token_ids += item.token_ids[:num_committed]
        if start == 0 and self._tables:
            text.bounds = self._tables[item.token_ids[0] % len(self._tables)]
        _extend(states, item.token_ids[num_found:num_committed])
        counts = self._counts
        counts.num_rows += end - start - num_found
        counts.num_prefix_tokens += num_found
        counts.num_prefix_queries += len(item.token_ids) if item.max_rows is not None else 0
        result = StepResult(item.sequence_id, (), end, num_prefix_tokens=num_found)
        if item.tree_parents:
            self._take_path(item, text, result)
        elif end == start + len(item.token_ids):
            sampled = states[len(states) - item.num_samples :]
            result.token_ids, result.runner_ups = self._decide(item, text.bounds, sampled)
            result.head_token_ids = self._guess(item, result.token_ids, None, sampled)
        if self._prefixes.limit:
            self._remember(text, start + num_found, len(states) - 1)
        return result

    def _take_path(self, item: StepItem, text: _Text, result: StepResult) -> None:
        """The nodes of a tree, of which the accepted ones become part of the text."""
        branches, nodes = [text.states[-1:]], item.token_ids[-len(item.tree_parents) :]
        for parent, token_id in zip(item.tree_parents, nodes, strict=True):
            branches.append(branches[parent + 1][-1:])
            _extend(branches[-1], (token_id,))
        sampled = [branch[-1] for branch in branches]
        token_ids, _ = self._decide(item, text.bounds, sampled)
        path = accepted_rows(item, token_ids)
        text.states += [sampled[row] for row in path[1:]]
        text.token_ids += [nodes[row - 1] for row in path[1:]]
        result.token_ids = tuple(token_ids[row] for row in path)
        result.num_accepted = len(path) - 1
        result.cached_len = len(text.states) - 1
        result.head_token_ids = self._guess(item, result.token_ids, result.num_accepted, sampled)
        held, text.num_blocks = text.num_blocks, self._blocks(result.cached_len)
        self._free_blocks += held - text.num_blocks

    def _guess(
        self,
        item: StepItem,
        token_ids: Sequence[int],
        num_accepted: int | None,
        states: Sequence[int],
    ) -> tuple[tuple[int, ...], ...]:
        """Of a tree, `states` has all its rows and `token_ids` its path."""
        if not states or not item.num_head_candidates:
            return ()
        row, info = deciding_row(item, token_ids, num_accepted), self._info
        last = row if num_accepted is None else num_accepted
        state, count = advance(states[row], token_ids[last]), item.num_head_candidates
        return head_guesses(state, info.num_heads, info.vocab_size, count, self._head_error_rate)

    def _remember(self, text: _Text, start: int, end: int) -> None:
        """The blocks that have become full between two lengths."""
        size = self._info.block_size
        for last in range((start // size + 1) * size, end + 1, size):
            first = last - size
            block = tuple(text.token_ids[first:last])
            self._prefixes.add(text.states[first], block, tuple(text.states[first + 1 : last + 1]))

    def _decide(
        self, item: StepItem, bounds: Sequence[int], states: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Tokens and, if asked for, runner-ups of the sampled rows."""
        size, count = self._info.vocab_size, item.num_runner_ups
        truths = [mix(state) % size for state in states]
        draws = [0] * len(states)
        token_ids = truths
        if self._tables:
            period, key = len(bounds), self._draft_key
            draws = [mix(state ^ key) for state in states]
            token_ids = [
                truth
                if draw < bounds[(item.output_index + offset) % period]
                else (truth + 1 + draw % (size - 1)) % size
                for offset, truth, draw in zip(sample_offsets(item), truths, draws, strict=True)
            ]
        if not count:
            return tuple(token_ids), ()
        rows = zip(token_ids, truths, draws, strict=True)
        return tuple(token_ids), tuple(self._runner_ups(count, *row) for row in rows)

    def _runner_ups(self, count: int, token_id: int, truth: int, draw: int) -> tuple[int, ...]:
        size = self._info.vocab_size
        others = (token_id + offset for offset in range(1, min(count + 1, size - 1) + 1))
        ids = [other % size for other in others if other % size != truth]
        if token_id != truth:
            chance = mix(draw) >> 32
            for rank, bound in enumerate(self._corrections):
                if chance < bound:
                    ids.insert(rank, truth)
                    break
        return tuple(ids[:count])

    # -- bookkeeping ------------------------------------------------------------------------

    def _text(self, sequence_id: int) -> _Text:
        text = self._texts.get(sequence_id)
        if text is None:
            raise LocalProtocolError(f"sequence {sequence_id} is unknown")
        return text

    def _blocks(self, length: int) -> int:
        return -(-length // self._info.block_size)


def _end(item: StepItem, num_found: int) -> int:
    """Length of the cache after the pass."""
    num_rows = len(item.token_ids)
    if item.max_rows is not None:
        num_rows = min(num_rows, num_found + item.max_rows)
    return item.start + num_rows


def _is_adjusted(sampling: SamplingParams) -> bool:
    """Whether the token asked for is not simply the most likely one."""
    return bool(
        sampling.temperature
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
        or sampling.min_tokens
        or sampling.grammar
    )


def _bounds(phases: tuple[Phase, ...]) -> tuple[int, ...]:
    tables = ((int(phase.acceptance * 2**64),) * phase.num_tokens for phase in phases)
    return tuple(chain(*tables))


def _extend(states: list[int], token_ids: Sequence[int]) -> None:
    """Append the hashes after each of the tokens that follow."""
    state = states[-1]
    for token_id in token_ids:
        state = ((state ^ (token_id + 1)) * GOLDEN) & MASK
        state ^= state >> 29
        states.append(state)
