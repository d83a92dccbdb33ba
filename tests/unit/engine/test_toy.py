from __future__ import annotations

import pytest

from paceline.engine.base import EngineInfo, OutOfBlocks, StepItem
from paceline.engine.toy import ToyEngine
from paceline.errors import LocalProtocolError
from paceline.sampling.acceptance import coupled_token, greedy_token
from paceline.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
INFO = EngineInfo("toy", vocab_size=64, max_model_len=64, block_size=4, num_blocks=32)


def test_a_step_samples_the_last_rows_with_their_own_output_indices() -> None:
    engine, sampling = ToyEngine(INFO), SamplingParams(temperature=0.7, seed=5)
    engine.add(1)
    [result] = engine.step([StepItem(1, 0, (3, 9, 4, 8), 2, sampling, output_index=10)])
    assert result.token_ids == (
        coupled_token(engine.logits([3, 9, 4]), sampling, 10),
        coupled_token(engine.logits([3, 9, 4, 8]), sampling, 11),
    )


def test_rewind_then_other_tokens_equals_a_fresh_sequence() -> None:
    engine = ToyEngine(INFO)
    engine.add(1)
    engine.step([StepItem(1, 0, (1, 2, 3, 4, 5, 6), 0, GREEDY)])
    [result] = engine.step([StepItem(1, 2, (9, 9), 1, GREEDY)])
    assert result.token_ids == (greedy_token(engine.logits([1, 2, 9, 9])),)
    assert engine.cached_len(1) == 4
    engine.check_integrity()


def test_any_change_of_the_prefix_is_felt_for_ever() -> None:
    engine = ToyEngine(INFO)
    tail = list(range(40))
    assert engine.logits([1, *tail]) != engine.logits([2, *tail])
    assert engine.logits([0, 0, *tail]) != engine.logits([0, *tail])


@pytest.mark.parametrize("error_rate", [0.0, 0.25, 0.5, 1.0])
def test_agreement_is_about_one_minus_the_error_rate(error_rate: float) -> None:
    target, draft = ToyEngine(INFO), ToyEngine(INFO, error_rate=error_rate)
    contexts = [[i % 64, i // 64] for i in range(2000)]
    num_equal = sum(target.logits(context) == draft.logits(context) for context in contexts)
    assert abs(num_equal / 2000 - (1 - error_rate)) < 0.04


def test_another_seed_is_another_model() -> None:
    assert ToyEngine(INFO, seed=1).logits([1, 2]) != ToyEngine(INFO, seed=2).logits([1, 2])


def test_eight_ids_at_most_can_be_chosen() -> None:
    finite = [logit for logit in ToyEngine(INFO).logits([5]) if logit > float("-inf")]
    assert 1 <= len(finite) <= 8
    assert all(0.0 <= logit < 4.0 for logit in finite)


def test_out_of_blocks_changes_nothing() -> None:
    engine = ToyEngine(EngineInfo("toy", 64, max_model_len=99, block_size=4, num_blocks=2))
    engine.add(1)
    engine.add(2)
    engine.step([StepItem(1, 0, (1, 2, 3), 0, GREEDY)])
    with pytest.raises(OutOfBlocks):
        engine.step([StepItem(1, 1, (7,), 1, GREEDY), StepItem(2, 0, (1,) * 8, 1, GREEDY)])
    assert (engine.cached_len(1), engine.cached_len(2)) == (3, 0)
    [result] = engine.step([StepItem(1, 3, (4,), 1, GREEDY)])
    assert result.token_ids == (greedy_token(engine.logits([1, 2, 3, 4])),)
    engine.check_integrity()


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (StepItem(9, 0, (1,), 1, GREEDY), "unknown sequence 9"),
        (StepItem(1, 0, (), 0, GREEDY), "no rows"),
        (StepItem(1, 4, (1,), 1, GREEDY), "start 4, but 3 are cached"),
        (StepItem(1, -1, (1,), 1, GREEDY), "start -1"),
        (StepItem(1, 3, (1,), 2, GREEDY), "2 samples of 1 rows"),
        (StepItem(1, 3, (1,), -1, GREEDY), "-1 samples"),
        (StepItem(1, 3, (1, 64), 1, GREEDY), r"outside \[0, 64\)"),
        (StepItem(1, 3, (-1,), 1, GREEDY), r"outside \[0, 64\)"),
        (StepItem(1, 3, (1,) * 62, 1, GREEDY), "exceed max_model_len 64"),
        (StepItem(1, 3, (1,), 1, GREEDY, output_index=-1), "output index -1"),
    ],
)
def test_slips_of_the_caller_are_refused_and_change_nothing(item: StepItem, problem: str) -> None:
    engine = ToyEngine(INFO)
    engine.add(1)
    engine.step([StepItem(1, 0, (1, 2, 3), 0, GREEDY)])
    with pytest.raises(LocalProtocolError, match=problem):
        engine.step([item])
    assert engine.cached_len(1) == 3
    engine.check_integrity()


def test_a_sequence_twice_in_one_pass_is_refused() -> None:
    engine = ToyEngine(INFO)
    engine.add(1)
    with pytest.raises(LocalProtocolError, match="twice"):
        engine.step([StepItem(1, 0, (1,), 1, GREEDY), StepItem(1, 0, (1,), 1, GREEDY)])


def test_stats_count_passes_rows_and_what_is_held() -> None:
    engine = ToyEngine(INFO)
    engine.add(1)
    engine.add(2)
    engine.step([StepItem(1, 0, (1,) * 5, 0, GREEDY), StepItem(2, 0, (1,), 1, GREEDY)])
    stats = engine.stats()
    assert (stats.num_passes, stats.num_rows) == (1, 6)
    assert (stats.num_sequences, stats.num_free_blocks) == (2, 29)
    engine.free(1)
    engine.free(2)
    engine.free(3)
    assert (engine.stats().num_sequences, engine.stats().num_free_blocks) == (0, 32)


def test_a_prompt_that_was_seen_is_found_and_gives_the_same_token() -> None:
    engine, prompt = ToyEngine(INFO), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    for sequence_id in (1, 2):
        engine.add(sequence_id)
    [miss] = engine.step([StepItem(1, 0, prompt, 1, GREEDY)])
    [hit] = engine.step([StepItem(2, 0, prompt, 1, GREEDY)])
    assert (miss.num_prefix_tokens, hit.num_prefix_tokens) == (0, 8)
    assert hit.token_ids == miss.token_ids == (greedy_token(engine.logits(prompt)),)
    stats = engine.stats()
    assert (stats.num_rows, stats.num_prefix_tokens, stats.num_prefix_queries) == (12, 8, 20)
    assert stats.num_free_blocks == 32 - 4
    engine.check_integrity()


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = ToyEngine(INFO, enable_prefix_caching=False)
    for sequence_id in (1, 2):
        engine.add(sequence_id)
        [result] = engine.step([StepItem(sequence_id, 0, tuple(range(10)), 1, GREEDY)])
        assert result.num_prefix_tokens == 0
    assert engine.stats().num_rows == 20


def test_a_block_in_the_wrong_hands_is_felt_and_seen() -> None:
    """The toy reads its slots as a model reads KV: what a wrong block holds decides the token."""
    engine = ToyEngine(INFO)
    for sequence_id, prompt in ((1, (1, 2, 3, 4, 5)), (2, (6, 7, 8, 9, 10))):
        engine.add(sequence_id)
        engine.step([StepItem(sequence_id, 0, prompt, 1, GREEDY)])
    right = engine.step([StepItem(2, 4, (10,), 1, GREEDY)])[0].token_ids
    own = engine._pool.table(2).blocks[0]
    engine._kv[own] = engine._kv[engine._pool.table(1).blocks[0]]
    with pytest.raises(AssertionError, match="sequence 2: position 0 holds another text's state"):
        engine.check_integrity()
    assert engine.step([StepItem(2, 4, (10,), 1, GREEDY)])[0].token_ids != right


def test_rows_of_a_pass_are_limited_and_nothing_is_sampled_before_the_end() -> None:
    engine, prompt = ToyEngine(INFO), tuple(range(10))
    engine.add(1)
    cached = []
    for start in (0, 4, 8):
        item = StepItem(1, start, prompt[start:], 1, GREEDY, max_rows=4)
        [result] = engine.step([item])
        cached.append((result.cached_len, result.token_ids))
    token_id = greedy_token(engine.logits(prompt))
    assert cached == [(4, ()), (8, ()), (10, (token_id,))]
