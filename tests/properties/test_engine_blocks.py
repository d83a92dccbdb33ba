"""Block bookkeeping against a naive model, under any order of add, step, rewind and free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.base import EngineInfo, OutOfBlocks, StepItem
from paceline.engine.toy import ToyEngine
from paceline.sampling.acceptance import greedy_token
from paceline.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NUM_BLOCKS = 12
BLOCK_SIZE = 3
INFO = EngineInfo("toy", 16, max_model_len=60, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)

# (sequence, how far to rewind before the rows, rows): a pass is a few of those
ROWS = st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(1, 9))
PASS = st.lists(ROWS, min_size=1, max_size=4, unique_by=lambda rows: rows[0])
ACTION = st.one_of(PASS, st.integers(0, 5))  # a pass, or free that sequence


def blocks_for(length: int) -> int:
    return -(-length // BLOCK_SIZE)


def apply(engine: ToyEngine, texts: dict[int, list[int]], rows: list[tuple[int, int, int]]) -> None:
    items, after = [], {}
    for sequence_id, back, num_rows in rows:
        if sequence_id not in texts:
            engine.add(sequence_id)
            texts[sequence_id] = []
        kept = texts[sequence_id][: max(0, len(texts[sequence_id]) - back)]
        new = [(7 * sequence_id + 3 * len(kept) + i) % 16 for i in range(num_rows)]
        new = new[: INFO.max_model_len - len(kept)]
        if not new:
            continue
        items.append(StepItem(sequence_id, len(kept), tuple(new), 1, GREEDY))
        after[sequence_id] = kept + new
    num_blocks = sum(blocks_for(len(text)) for text in {**texts, **after}.values())
    fits = num_blocks <= NUM_BLOCKS
    assert engine.can_fit([(i, len(text)) for i, text in after.items()]) == fits
    try:
        results = engine.step(items)
    except OutOfBlocks:
        assert not fits
        return
    assert fits
    texts.update(after)
    for result in results:
        expected = greedy_token(engine.logits(texts[result.sequence_id]))
        assert result.token_ids == (expected,)


@given(st.lists(ACTION, max_size=40))
def test_engine_equals_a_naive_model_of_itself(
    actions: list[list[tuple[int, int, int]] | int],
) -> None:
    engine, texts = ToyEngine(INFO), dict[int, list[int]]()
    for action in actions:
        if isinstance(action, int):
            engine.free(action)
            texts.pop(action, None)
        else:
            apply(engine, texts, action)
        engine.check_integrity()
        stats = engine.stats()
        assert stats.num_sequences == len(texts)
        assert stats.num_free_blocks == NUM_BLOCKS - sum(map(blocks_for, map(len, texts.values())))
        assert all(engine.cached_len(i) == len(text) for i, text in texts.items())
    for sequence_id in list(texts):
        engine.free(sequence_id)
    engine.check_integrity()
    assert engine.stats().num_free_blocks == NUM_BLOCKS
