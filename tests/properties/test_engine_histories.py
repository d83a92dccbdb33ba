"""Penalties through `TorchEngine`, whatever its caches went through: the reference's bits.

The model is random logits, so that only the bookkeeping of texts decides. The driver knows each
sequence's text; the engine's counts come from rewinds, blocks, failed passes and preemptions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.blocks import BlockPool
from paceline.engine.logit_adjustments import adjust_rows
from paceline.engine.pass_plan import SequenceRows
from paceline.engine.pass_results import pass_parts
from paceline.engine.step_rows import wanted_rows
from paceline.engine.torch_engine import TorchEngine
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import adjust_logits

torch.set_num_threads(1)

VOCAB_SIZE = 14
INFO = EngineInfo("noise", VOCAB_SIZE, max_model_len=400, block_size=4, num_blocks=600)


class NoiseRunner:
    """Logits of no model; `is_short` gives too few of them, which the sampler cannot take."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.logits = torch.empty(0)
        self.is_short = False

    def forward(self, rows: Sequence[SequenceRows]) -> torch.Tensor:
        shape = (sum(row.num_samples for row in rows), VOCAB_SIZE)
        self.logits = torch.randn(shape, generator=self.rng).round(decimals=1)
        return self.logits[: shape[0] // 2] if self.is_short else self.logits

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        pass

    def head_logits(self, rows: Sequence[int]) -> torch.Tensor:
        raise AssertionError("it has no heads")

    def close(self) -> None:
        pass


@dataclass
class Text:
    """One request: what is settled of its text, and how many of it the engine has."""

    sampling: SamplingParams
    prompt_len: int
    tokens: list[int]
    num_cached: int = 0
    drafts: tuple[int, ...] = field(default=())

    def item(self, sequence_id: int, rng: random.Random) -> StepItem:
        """The next block, or a part of the prefill; some rewind further than they need to."""
        num_settled = len(self.tokens)
        start = max(0, min(self.num_cached, num_settled - 1) - rng.choice((0, 0, 0, 1, 3)))
        self.drafts = ()
        if num_settled - start > 9 and rng.random() < 0.7:
            rows = self.tokens[start : start + rng.randint(1, 8)]
            return StepItem(sequence_id, start, tuple(rows), 0, self.sampling)
        self.drafts = tuple(rng.choices(range(VOCAB_SIZE), k=rng.choice((0, 0, 1, 3, 7))))
        return StepItem(
            sequence_id,
            start,
            (*self.tokens[start:], *self.drafts),
            len(self.drafts) + 1,
            self.sampling,
            num_settled - self.prompt_len,
        )

    def rows(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(prompt, output) of each sampled row of the last item."""
        texts = [(*self.tokens, *self.drafts[:i]) for i in range(len(self.drafts) + 1)]
        return [(text[: self.prompt_len], text[self.prompt_len :]) for text in texts]

    def settle(self, item: StepItem, token_ids: Sequence[int], rng: random.Random) -> None:
        self.num_cached = item.start + len(item.token_ids)
        if item.num_samples:
            # any prefix of the block may be what is accepted; the rest is rewound
            num_kept = rng.randint(0, len(self.drafts))
            self.tokens += [*self.drafts[:num_kept], token_ids[num_kept]]


def new_text(rng: random.Random) -> Text:
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.7)),
        seed=rng.randrange(100),
        presence_penalty=rng.choice((0.0, 0.6, -0.3)),
        frequency_penalty=rng.choice((0.0, 0.2, -0.1)),
        repetition_penalty=rng.choice((1.0, 1.3, 0.8)),
        min_tokens=rng.choice((0, 12)),
        stop_token_ids=(1, 2),
    )
    prompt_len = rng.randint(1, 25)
    # few ids, so that some are in the prompt alone and prefixes are found in the cache
    return Text(sampling, prompt_len, rng.choices(range(3), k=prompt_len))


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_every_token_is_the_references_for_the_text_so_far(seed: int) -> None:
    rng = random.Random(seed)
    runner = NoiseRunner(seed)
    engine = TorchEngine(runner, INFO, enable_prefix_caching=rng.random() < 0.5)
    texts = {sequence_id: new_text(rng) for sequence_id in range(3)}
    for sequence_id in texts:
        engine.add(sequence_id)
    for _ in range(40):
        chosen = rng.sample(sorted(texts), rng.randint(1, 3))
        for sequence_id in chosen:
            upset(engine, texts, sequence_id, rng)
        items = [texts[sequence_id].item(sequence_id, rng) for sequence_id in chosen]
        runner.is_short = rng.random() < 0.1 and any(item.num_samples for item in items)
        if runner.is_short:
            with pytest.raises((IndexError, ValueError)):
                engine.step(items)
            for item in items:
                texts[item.sequence_id].num_cached = item.start
            continue
        results = engine.step(items)
        logits = iter(runner.logits.tolist())
        for item, result in zip(items, results, strict=True):
            text = texts[item.sequence_id]
            if item.num_samples:
                expected = [
                    coupled_token(next(logits), item.sampling, item.output_index + i, *history)
                    for i, history in enumerate(text.rows())
                ]
                assert list(result.token_ids) == expected
            text.settle(item, result.token_ids, rng)
    engine.check_integrity()


def upset(
    engine: TorchEngine, texts: dict[int, Text], sequence_id: int, rng: random.Random
) -> None:
    """Now and then: a preemption, another request under the same id, a draft put right."""
    event = rng.random()
    if event < 0.1:
        engine.free(sequence_id)
        engine.add(sequence_id)
        texts[sequence_id].num_cached = 0
    if event < 0.04:
        texts[sequence_id] = new_text(rng)
    if event > 0.8:
        # what a draft has decided itself is replaced, by so much that chunks go first
        text = texts[sequence_id]
        num_kept = max(text.prompt_len, len(text.tokens) - rng.randint(1, 12))
        text.tokens[num_kept:] = rng.choices(range(VOCAB_SIZE), k=len(text.tokens) - num_kept + 2)
        text.num_cached = min(text.num_cached, num_kept)


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_adjusted_logits_of_a_block_have_the_references_bits(seed: int) -> None:
    rng = random.Random(seed)
    pool, text = BlockPool(INFO.num_blocks, INFO.block_size), new_text(rng)
    pool.add(1)
    # a target's ids may be more than the row has
    width = rng.choice((VOCAB_SIZE, VOCAB_SIZE - 5))
    for _ in range(15):
        item = text.item(1, rng)
        reservations = pool.reserve([wanted_rows(item)])
        [part] = pass_parts([item], reservations, [pool.table(1)])
        logits = [[rng.choice((0.0, -0.0, rng.gauss(0, 2))) for _ in range(width)]] * len(part.rows)
        adjusted = adjust_rows(torch.tensor(logits, dtype=torch.float64), part.rows).tolist()
        if item.num_samples:
            for got, values, history in zip(adjusted, logits, text.rows(), strict=True):
                want = adjust_logits(values, item.sampling, *history)
                assert [x.hex() for x in got] == [x.hex() for x in want]
        pool.commit(reservations[0])
        text.settle(item, rng.choices(range(VOCAB_SIZE), k=item.num_samples), rng)
