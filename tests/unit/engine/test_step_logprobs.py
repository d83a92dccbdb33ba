"""Log-probabilities of `Engine.step` on both engines; output layers wider than the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.engine import toy_rules
from paceline.engine.base import Propose, StepItem, Verify
from paceline.errors import LocalProtocolError
from paceline.generation import TokenLogprobs
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams, VerificationMode
from tests.unit.engine.conftest import save_tiny, write_tokenizer
from tests.unit.engine.subjects import (
    COUPLED,
    EVERYTHING,
    MODES,
    Subject,
    assert_close,
    dense,
    filled,
    law_around,
    load,
    make_subject,
    tokens,
)

PROMPT_LEN = 14


@pytest.fixture(params=["toy", "torch"])
def subject(request: pytest.FixtureRequest, llama_folder: Path) -> Subject:
    return make_subject(request.param, llama_folder)


def check_scores(
    subject: Subject,
    entries: Sequence[TokenLogprobs],
    text: Sequence[int],
    token_ids: Sequence[int],
    num_top: int,
) -> None:
    """Entry j is the law after text + token_ids[:j], for token_ids[j]."""
    assert len(entries) == len(token_ids)
    rows = subject.logits([*text, *token_ids])[len(text) - 1 :]
    for entry, row, token_id in zip(entries, rows, token_ids, strict=False):
        assert_close(entry, toy_rules.logprobs(row, token_id, num_top))
        assert len(entry.top) == num_top


@pytest.mark.parametrize("mode", [None, *MODES])
def test_logprobs_of_a_block_are_the_raw_laws_of_what_is_committed(
    subject: Subject, mode: VerificationMode | None
) -> None:
    text = tokens(7, PROMPT_LEN)
    filled(subject.engine, 1, text[:-1])
    row = subject.row(text, EVERYTHING, 1)
    drafts = (toy_rules.propose(row, 50)[0], *tokens(8, 2))
    rule = None if mode is None else Verify(mode, tuple(law_around(i, 3) for i in drafts), 4)
    item = StepItem(1, len(text) - 1, (text[-1], *drafts), 4, EVERYTHING, 1, rule, num_logprobs=3)
    [result] = subject.engine.step([item])
    committed = result.token_ids
    if mode is None:  # every row's own token: row j follows the first j proposals
        assert len(result.logprobs) == 4
        for j, entry in enumerate(result.logprobs):
            check_scores(subject, [entry], (*text, *drafts[:j]), committed[j : j + 1], 3)
    else:
        check_scores(subject, result.logprobs, text, committed, 3)


def test_logprobs_without_a_top_list(subject: Subject) -> None:
    text = tokens(9, 5)
    subject.engine.add(1)
    [result] = subject.engine.step([StepItem(1, 0, text, 1, COUPLED, num_logprobs=0)])
    check_scores(subject, result.logprobs, text, result.token_ids, 0)


@pytest.mark.parametrize("max_rows", [None, 1, 5])
def test_prompt_logprobs_score_every_token_but_the_first(
    subject: Subject, max_rows: int | None
) -> None:
    text = tokens(10, 19)
    filled(subject.engine, 1, text)  # cached, and all the same every row is computed
    subject.engine.add(2)
    entries: list[TokenLogprobs] = []
    start = 0
    while start < len(text):
        item = StepItem(
            2,
            start,
            text[start:],
            1,
            COUPLED,
            max_rows=max_rows,
            num_logprobs=3,
            num_prompt_logprobs=2,
            scored_token_ids=text[start + 1 :],
        )
        [result] = subject.engine.step([item])
        assert result.num_prefix_tokens == 0
        entries += result.prompt_logprobs
        start = result.cached_len or 0
    check_scores(subject, entries, text[:1], text[1:], 2)
    row = subject.row(text, COUPLED, 0)
    assert result.token_ids == (coupled_token(row.logits, COUPLED, 0),)
    check_scores(subject, result.logprobs, text, result.token_ids, 3)


def test_scores_and_samples_of_one_pass_keep_their_rows(subject: Subject) -> None:
    first, second = tokens(11, 9), tokens(12, 6)
    subject.engine.add(1)
    subject.engine.add(2)
    scored, sampled = subject.engine.step(
        [
            StepItem(1, 0, first, 0, COUPLED, num_prompt_logprobs=1, scored_token_ids=first[1:]),
            StepItem(2, 0, second, 2, COUPLED, output_index=1, num_logprobs=1),
        ]
    )
    assert (scored.token_ids, scored.logprobs) == ((), ())
    check_scores(subject, scored.prompt_logprobs, first[:1], first[1:], 1)
    for offset in range(2):
        text = second[: 5 + offset]
        row = subject.row(text, COUPLED, 1 + offset)
        assert sampled.token_ids[offset] == coupled_token(row.logits, COUPLED, 1 + offset)
        entry = sampled.logprobs[offset : offset + 1]
        check_scores(subject, entry, text, sampled.token_ids[offset : offset + 1], 1)


def test_padded_ids_never_come_out(tmp_path: Path) -> None:
    """The output layer has 101 ids, the tokenizer 40: the law is that of the 40."""
    folder = save_tiny("llama", tmp_path, tie_word_embeddings=False)
    write_tokenizer(folder, 40)
    engine, width = load(folder), 40
    assert engine.info.vocab_size == width
    subject = Subject(engine, dense(folder, width))
    hot = SamplingParams(temperature=50.0, seed=3)  # nearly uniform over what there is
    text, start = [5, 6, 7], 0
    engine.add(1)
    for index in range(40):
        item = StepItem(1, start, tuple(text[start:]), 1, hot, index, num_logprobs=width)
        [result] = engine.step([item])
        row = subject.row(text, hot, index)
        assert result.token_ids == (coupled_token(row.logits, hot, index),)
        check_scores(subject, result.logprobs, text, result.token_ids, width)
        start = len(text)
        text += result.token_ids
    assert max(text) < width
    proposal = StepItem(1, start, tuple(text[start:]), 1, hot, 40, Propose(0))
    assert max(engine.step([proposal])[0].draft_probs[0].token_ids) < width
    with pytest.raises(LocalProtocolError, match=r"outside \[0, 40\)"):
        engine.step([StepItem(1, 0, (40,), 1, hot)])
