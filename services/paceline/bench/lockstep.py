"""The baselines with a draft: draft K tokens for all, verify them in one pass, and again.

A lean loop without requests, streams or threads, as fair as one device allows: drafting pays what
our drafts pay, the wire is a sleep, and there is no other cost. It shares engines with our own
scheme and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.bench.schemes import (
    PROMPT_LEN,
    Measurement,
    Setting,
    draft_engine,
    prompt,
    target_engine,
)
from paceline.engine.base import StepItem
from paceline.engine.timed import sleep_exactly
from paceline.sampling.acceptance import accept_matching
from paceline.sampling.params import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_MAX_LEN = 1 << 20


@dataclass(slots=True)
class _Text:
    sequence_id: int
    token_ids: list[int]
    num_drafted: int = 0  # tokens in the draft's cache that are the text's


class LockStep:
    """All sequences of a setting, `k` proposals a round, `rtt_ms` of waiting a round."""

    def __init__(self, setting: Setting, k: int, rtt_ms: float, run: int = 0) -> None:
        self._k = k
        self._rtt_s = rtt_ms / 1e3
        self.target = target_engine(setting.costs, _MAX_LEN, setting.batch)
        self.draft = draft_engine(setting.costs, setting.script, _MAX_LEN, setting.batch)
        places = range(setting.batch)
        self.texts = [_Text(place, list(prompt(place, place, run))) for place in places]
        for text in self.texts:
            self.target.add(text.sequence_id)
            self.draft.add(text.sequence_id)
        self.target.step(
            [
                StepItem(text.sequence_id, 0, tuple(text.token_ids[:-1]), 0, _GREEDY)
                for text in self.texts
            ]
        )

    def run_round(self) -> int:
        """One round of all; returns how many tokens it committed."""
        drafts = self._draft()
        if self._rtt_s:
            sleep_exactly(self._rtt_s)
        return self._verify(drafts)

    def _draft(self) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in self.texts]
        for step in range(self._k):
            items = []
            for text, draft in zip(self.texts, drafts, strict=True):
                start = len(text.token_ids) + step - 1 if step else text.num_drafted
                rows = (draft[-1],) if step else tuple(text.token_ids[start:])
                index = len(text.token_ids) + step - PROMPT_LEN
                items.append(StepItem(text.sequence_id, start, rows, 1, _GREEDY, index))
            for draft, result in zip(drafts, self.draft.step(items), strict=True):
                draft.append(result.token_ids[0])
        return drafts

    def _verify(self, drafts: list[list[int]]) -> int:
        items = []
        for text, draft in zip(self.texts, drafts, strict=True):
            start = len(text.token_ids) - 1
            rows = (text.token_ids[-1], *draft)
            index = len(text.token_ids) - PROMPT_LEN
            items.append(StepItem(text.sequence_id, start, rows, len(rows), _GREEDY, index))
        num_committed = 0
        for text, draft, result in zip(self.texts, drafts, self.target.step(items), strict=True):
            acceptance = accept_matching(tuple(draft), result.token_ids)
            accepted = acceptance.num_accepted_tokens
            text.num_drafted = len(text.token_ids) + min(accepted, self._k - 1)
            text.token_ids += (*draft[:accepted], acceptance.next_token_id)
            num_committed += accepted + 1
        return num_committed

    def measure(self, warmup_s: float, seconds: float) -> Measurement:
        """Whole rounds for so long; blocks."""
        clock = time.perf_counter
        end = clock() + warmup_s
        while clock() < end:
            self.run_round()
        before, busy_before, began = self.target.stats(), self.target.busy_s, clock()
        late_before, draft_busy_before = self.target.num_late, self.draft.busy_s
        num_tokens = 0
        while clock() < began + seconds:
            num_tokens += self.run_round()
        wall_s, after = clock() - began, self.target.stats()
        num_passes = after.num_passes - before.num_passes
        busy_s = self.target.busy_s - busy_before
        return Measurement(
            tokens_per_s=num_tokens / wall_s,
            target_busy=busy_s / wall_s,
            tokens_per_pass=num_tokens / num_passes,
            rows_per_pass=(after.num_rows - before.num_rows) / num_passes,
            pass_ms=1e3 * busy_s / num_passes,
            gap_ms=1e3 * (wall_s - busy_s) / num_passes,
            k=self._k,
            draft_busy=(self.draft.busy_s - draft_busy_before) / wall_s,
            num_late=self.target.num_late - late_before,
        )
