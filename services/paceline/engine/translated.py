"""An engine whose model reads other tokens than its caller's: a draft for a target with another
tokenizer.

To its caller it has the target's vocabulary. Rows go in translated, and of the model's logits only
those of common tokens come out, each at the target's id: all others are -inf. From there on nothing
is special: processors, noise and stated laws are over the target's ids, and a stated law is the one
that is drawn from. The caches count in the draft's tokens, so for every sequence it knows where
both texts may be cut. It knows no text, no draft and no target.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch

from paceline.engine.base import EngineInfo, EngineStats, StepItem, StepResult
from paceline.engine.block_table import BlockTable, Reservation
from paceline.engine.checks import check_items
from paceline.engine.grammar_masks import GrammarMasks
from paceline.engine.logits_clock import LogitsClock
from paceline.engine.pass_results import pass_parts, pass_results
from paceline.engine.prefix_cache import adapter_salt
from paceline.engine.sampler import BatchedSampler
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.translation import EXPANSION, Overlap, Translation
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams

_PLAIN = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class _Text:
    """What the caller's tokens of a sequence (`table`) are in the draft's.

    The engine's cache holds a beginning of `draft_ids`. The first `marks[i]` tokens are the first
    `places[i]` of those. Invariant: both ascend from 0; every mark and place that is used lies in
    `table` and in what the cache holds, whatever else there is.
    """

    table: BlockTable = field(default_factory=BlockTable)
    draft_ids: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=lambda: [0])
    places: list[int] = field(default_factory=lambda: [0])


@dataclass(slots=True)
class _Part:
    """An item and what the engine is asked for it; `inner` None: its text has outgrown the draft.

    `text` is the sequence as it is afterwards, if all rows are computed. `picked`: of the logit
    rows that the engine gives, those of the item's own sampled rows.
    """

    item: StepItem
    text: _Text
    inner: StepItem | None = None
    picked: tuple[int, ...] = ()


class _Tables:
    """The texts as `checks` and `pass_parts` look at them: tokens, and no blocks."""

    def __init__(self) -> None:
        self.texts: dict[int, _Text] = {}

    def text(self, sequence_id: int) -> _Text:
        text = self.texts.get(sequence_id)
        if text is None:
            raise LocalProtocolError(f"unknown sequence {sequence_id}")
        return text

    def table(self, sequence_id: int) -> BlockTable:
        return self.text(sequence_id).table


class TranslatedEngine:
    """`Engine` over the target's vocabulary; see `engine/base.py` for the contract, and `info`.

    Where a translation has no room in the draft's own context, nothing is computed and nothing
    sampled: such an item's result has no token although all of its rows count as cached.
    Prompts are not scored. `num_prefix_tokens` of a result is always 0.
    """

    def __init__(
        self,
        engine: TorchEngine,
        translation: Translation,
        info: EngineInfo,
        *,
        draft_top_n: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._info = replace(
            info,
            num_blocks=max(1, int(engine.info.num_blocks / EXPANSION)),
            max_model_len=max(1, int(engine.info.max_model_len / EXPANSION)),
        )
        self._engine = engine
        self._translation = translation
        self._tables = _Tables()
        self._sampler = BatchedSampler(draft_top_n=draft_top_n)
        self._masks = GrammarMasks(info.grammars)
        self._clock = clock
        self._forward_s = 0.0
        self._sample_s = 0.0
        self._logits_clock = LogitsClock()
        # Made where the logits are, with the first of them.
        self._columns: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def overlap(self) -> Overlap:
        return self._translation.overlap

    def add(self, sequence_id: int) -> None:
        self._engine.add(sequence_id)
        self._tables.texts[sequence_id] = _Text()

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if not items:
            return []
        check_items(items, self._info, self._tables)
        if any(item.num_prompt_logprobs is not None for item in items):
            raise LocalProtocolError("a translated engine scores no prompts")
        parts = [self._plan(item) for item in items]
        began = self._clock()
        logits = self._logits([part.inner for part in parts if part.inner is not None])
        self._logits_clock.mark(logits)
        self._forward_s += self._clock() - began
        reservations = [self._settle(part) for part in parts]
        try:
            results = self._sample(parts, reservations, logits)
        except BaseException:
            self._forget_forks(items)
            raise
        for part, reservation in zip(parts, reservations, strict=True):
            part.text.table.token_ids.extend(reservation.token_ids)
        return results

    def cached_len(self, sequence_id: int) -> int:
        return self._tables.table(sequence_id).length

    def can_fit(self, items: Sequence[tuple[int, int]]) -> bool:
        """Of what is not there yet, as if translations were longer by `EXPANSION`."""
        return self._engine.can_fit([(i, self._expected_len(i, length)) for i, length in items])

    def _expected_len(self, sequence_id: int, length: int) -> int:
        text = self._tables.texts.get(sequence_id, _Text())
        index = bisect_right(text.marks, length) - 1
        rest = int(EXPANSION * (length - text.marks[index]))
        return min(text.places[index] + rest, self._engine.info.max_model_len)

    def free(self, sequence_id: int) -> None:
        self._engine.free(sequence_id)
        self._masks.free(sequence_id)
        self._tables.texts.pop(sequence_id, None)

    def stats(self) -> EngineStats:
        """Rows and prefix tokens are the draft's; blocks are those that are announced."""
        stats, info = self._engine.stats(), self._engine.info
        return replace(
            stats,
            num_free_blocks=stats.num_free_blocks * self._info.num_blocks // info.num_blocks,
            extra={
                "forward_s": self._forward_s,
                "sample_s": self._sample_s,
                "num_bad_rows": float(self._sampler.num_bad_rows),
            },
            logits_us=self._logits_clock.logits_us,
        )

    def check_integrity(self) -> None:
        self._engine.check_integrity()
        for sequence_id, text in self._tables.texts.items():
            held = self._engine.cached_len(sequence_id)
            assert held <= len(text.draft_ids), f"sequence {sequence_id} holds what nobody knows"
            assert len(text.marks) == len(text.places), f"sequence {sequence_id}: cuts differ"

    # -- a pass -----------------------------------------------------------------------------

    def _plan(self, item: StepItem) -> _Part:
        """What the model has to read for an item: from the last cut on that both texts have before
        its start, but for what the cache holds already. Changes nothing."""
        source = item.sequence_id if item.fork_of is None else item.fork_of
        text, held = self._tables.text(source), self._engine.cached_len(source)
        index = min(bisect_right(text.marks, item.start), bisect_right(text.places, held)) - 1
        mark, place = text.marks[index], text.places[index]
        read = [*text.table.token_ids[mark : item.start], *item.token_ids]
        made = self._translation.translate(
            read, num_apart=max(0, item.num_samples - 1), is_start=mark == 0
        )
        planned = _Text(
            table=text.table if item.fork_of is None else _forked(text.table, item.start),
            draft_ids=text.draft_ids[:place] + made.token_ids,
            marks=text.marks[: index + 1] + [mark + offset for offset in made.marks],
            places=text.places[: index + 1] + [place + offset for offset in made.places],
        )
        end = len(planned.draft_ids)
        if end > self._engine.info.max_model_len:
            # Nothing of it is read, so nothing of it may be used as cached.
            planned = _Text(planned.table, text.draft_ids, text.marks, text.places)
            if item.fork_of is not None:
                planned = _Text(planned.table)
            return _Part(item, planned)
        # The places of the sampled rows: behind each of the last tokens.
        sampled = planned.places[len(planned.places) - item.num_samples :]
        first = sampled[0] if sampled else end
        same = takewhile(
            lambda pair: pair[0] == pair[1],
            zip(made.token_ids, text.draft_ids[place:held], strict=False),
        )
        start = min(place + sum(1 for _ in same), first - 1)
        inner = StepItem(
            item.sequence_id,
            start,
            tuple(planned.draft_ids[start:]),
            end - first + 1 if sampled else 0,
            _PLAIN,
            max_rows=item.max_rows,
            cache_salt=item.cache_salt,
            fork_of=item.fork_of,
        )
        return _Part(item, planned, inner, tuple(row - first for row in sampled))

    def _logits(self, items: Sequence[StepItem]) -> torch.Tensor:
        """Logits [needed rows, vocab_size] of the target; all but the common tokens' are -inf."""
        if not items:
            return torch.empty(0, self._info.vocab_size)
        narrow = self._engine.logits(items)
        if self._columns is None or self._columns[0].device != narrow.device:
            ids = (self._translation.draft_ids, self._translation.target_ids)
            draft_ids, target_ids = (torch.tensor(each, device=narrow.device) for each in ids)
            self._columns = draft_ids, target_ids
        draft_ids, target_ids = self._columns
        wide = narrow.new_full((narrow.shape[0], self._info.vocab_size), float("-inf"))
        wide[:, target_ids] = narrow[:, draft_ids]
        return wide

    def _settle(self, part: _Part) -> Reservation:
        """The engine has done its part: its sequence is what the plan says, as far as it came.
        Returns the rows in the caller's tokens; the table is cut to their start."""
        item, text = part.item, part.text
        self._tables.texts[item.sequence_id] = text
        if item.start == 0:
            text.table.cache_salt = adapter_salt(item.cache_salt, item.adapter)
        text.table.cut(item.start)
        end = item.start + len(item.token_ids)
        if part.inner is not None:
            held = self._engine.cached_len(item.sequence_id)
            if held < len(text.draft_ids):
                index = bisect_right(text.places, held) - 1
                end = max(item.start, text.marks[index])
        token_ids = item.token_ids[: end - item.start]
        return Reservation(item.sequence_id, item.start, item.start, end, token_ids, (), ())

    def _forget_forks(self, items: Sequence[StepItem]) -> None:
        """The model's cache has their rows, but nothing came of them: they begin anew."""
        for item in items:
            if item.fork_of is not None:
                self.free(item.sequence_id)
                self.add(item.sequence_id)

    def _sample(
        self, parts: Sequence[_Part], reservations: Sequence[Reservation], logits: torch.Tensor
    ) -> list[StepResult]:
        began = self._clock()
        results = [
            StepResult(part.item.sequence_id, (), cached_len=reservation.end)
            for part, reservation in zip(parts, reservations, strict=True)
        ]
        # Where the rows did not reach the end of an item, there are no logits of it.
        read = [
            index
            for index, part in enumerate(parts)
            if part.inner is not None and reservations[index].end == _end(part.item)
        ]
        rows, first = [], 0
        for index in read:
            inner = parts[index].inner
            assert inner is not None
            rows += [first + row for row in parts[index].picked]
            first += inner.num_samples
        if len(rows) < first:  # of tokens with several ids in the draft, the last row alone counts
            logits = logits[torch.tensor(rows, device=logits.device)]
        sampled = pass_parts(
            [parts[index].item for index in read],
            [reservations[index] for index in read],
            (parts[index].text.table for index in read),
            self._masks,
        )
        for index, result in zip(read, pass_results(sampled, logits, self._sampler), strict=True):
            results[index] = result
        self._logits_clock.end(logits)
        self._sample_s += self._clock() - began
        return results


def _end(item: StepItem) -> int:
    return item.start + len(item.token_ids)


def _forked(table: BlockTable, length: int) -> BlockTable:
    return BlockTable(token_ids=table.token_ids[:length], cache_salt=table.cache_salt)
