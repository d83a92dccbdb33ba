"""What `Engine.step` decides, on both engines: rules, histories and refusals.

The engine's answers are compared with the references of `sampling/` on the logits of that text,
which come from elsewhere: transformers' own forward, or the toy's hash without a cache.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.engine import toy_rules
from paceline.engine.base import Propose, StepItem, Verify
from paceline.errors import LocalProtocolError
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams, VerificationMode
from tests.unit.engine.conftest import VOCAB_SIZE
from tests.unit.engine.subjects import (
    COUPLED,
    EVERYTHING,
    GREEDY,
    MODES,
    Subject,
    assert_close,
    filled,
    law_around,
    make_subject,
    tokens,
)

PROMPT_LEN = 14


@pytest.fixture(params=["toy", "torch"])
def subject(request: pytest.FixtureRequest, llama_folder: Path) -> Subject:
    return make_subject(request.param, llama_folder)


# -- histories ------------------------------------------------------------------------------


def test_each_row_of_a_block_counts_the_proposals_before_it(subject: Subject) -> None:
    text, drafts = tokens(1, PROMPT_LEN + 3), tokens(2, 5)
    filled(subject.engine, 1, text[:-1])
    item = StepItem(1, len(text) - 1, (text[-1], *drafts), 6, EVERYTHING, output_index=3)
    [result] = subject.engine.step([item])
    for offset in range(6):
        row = subject.row((*text, *drafts[:offset]), EVERYTHING, 3 + offset)
        assert result.token_ids[offset] == coupled_token(
            row.logits, EVERYTHING, 3 + offset, row.prompt_token_ids, row.output_token_ids
        )


def test_a_proposal_of_this_very_block_is_penalised(subject: Subject) -> None:
    """Row 2's own choice was proposed just before: with a penalty it must choose another."""
    text, penalty = tokens(1, PROMPT_LEN), SamplingParams(temperature=0.0, presence_penalty=2.0)
    filled(subject.engine, 1, text[:-1])
    rng = random.Random(6)
    for _ in range(5000):
        drafts = (rng.randrange(VOCAB_SIZE), rng.randrange(VOCAB_SIZE))
        row = subject.row((*text, *drafts), penalty, 2)
        expected = coupled_token(row.logits, penalty, 2, row.prompt_token_ids, drafts)
        plain = coupled_token(row.logits, GREEDY, 2)
        if plain in drafts and expected != plain:
            break
    else:
        pytest.fail("no block shows the penalty")
    rows = (text[-1], *drafts)
    for sampling, token_id in ((GREEDY, plain), (penalty, expected)):
        item = StepItem(1, PROMPT_LEN - 1, rows, 3, sampling, output_index=0)
        assert subject.engine.step([item])[0].token_ids[2] == token_id
    # as prompt, not output, the same tokens carry no presence penalty
    item = StepItem(1, PROMPT_LEN - 1, rows, 1, penalty, output_index=0)
    assert subject.engine.step([item])[0].token_ids == (plain,)


def test_a_history_is_the_same_after_a_rewind_a_hit_and_in_chunks(subject: Subject) -> None:
    text = tokens(3, PROMPT_LEN + 8)
    row = subject.row(text, EVERYTHING, 8)
    expected = coupled_token(row.logits, EVERYTHING, 8, row.prompt_token_ids, row.output_token_ids)
    filled(subject.engine, 1, (*text[:-3], *tokens(4, 5)))
    last = StepItem(1, len(text) - 3, text[-3:], 1, EVERYTHING, output_index=8)
    assert subject.engine.step([last])[0].token_ids == (expected,)
    subject.engine.add(2)
    [hit] = subject.engine.step([StepItem(2, 0, text, 1, EVERYTHING, output_index=8)])
    assert (hit.token_ids, hit.num_prefix_tokens) == ((expected,), 20)
    subject.engine.add(3)
    start = 0
    while start < len(text):
        item = StepItem(3, start, text[start:], 1, EVERYTHING, output_index=8, max_rows=1)
        [result] = subject.engine.step([item])
        start = result.cached_len or 0
    assert result.token_ids == (expected,)
    subject.engine.check_integrity()


def test_an_output_longer_than_its_text_is_refused(subject: Subject) -> None:
    subject.engine.add(1)
    item = StepItem(1, 0, (1, 2, 3), 1, EVERYTHING, output_index=4)
    with pytest.raises(LocalProtocolError, match="output index 4 in a text of 3 tokens"):
        subject.engine.step([item])
    assert subject.engine.cached_len(1) == 0


# -- rejection modes ------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, EVERYTHING], ids=["greedy", "t", "all"])
def test_proposals_come_with_the_law_they_were_drawn_from(
    subject: Subject, sampling: SamplingParams
) -> None:
    text = tokens(5, PROMPT_LEN)
    subject.engine.add(1)
    item = StepItem(1, 0, text, 2, sampling, output_index=4, rule=Propose(round=6))
    [result] = subject.engine.step([item])
    assert len(result.token_ids) == len(result.draft_probs) == 2
    for offset in range(2):
        row = subject.row(text[: PROMPT_LEN - 1 + offset], sampling, 4 + offset)
        token_id, law = toy_rules.propose(row, 6)
        stated = result.draft_probs[offset]
        assert result.token_ids[offset] == token_id
        assert set(stated.token_ids) == set(law.token_ids)
        # dense and paged logits differ in the last bits, so a weight may by a few of 65536
        assert all(abs(stated.weight(i) - law.weight(i)) <= 8 for i in law.token_ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, EVERYTHING], ids=["greedy", "t", "all"])
def test_blocks_are_verified_as_the_reference_does(
    subject: Subject, mode: VerificationMode, sampling: SamplingParams
) -> None:
    text = tokens(6, PROMPT_LEN + 2)
    filled(subject.engine, 1, text[:-1])
    accepted = []
    for round in range(12):
        drafts: tuple[int, ...] = ()
        for offset in range(4):  # what the target itself likes, so that something is accepted
            row = subject.row((*text, *drafts), sampling, 2 + offset)
            drafts += (toy_rules.propose(row, 100 + round)[0],)
        rule = Verify(mode, tuple(law_around(i, 9 * round) for i in drafts), round)
        item = StepItem(1, len(text) - 1, (text[-1], *drafts), 5, sampling, 2, rule)
        [result] = subject.engine.step([item])
        rows = [subject.row((*text, *drafts[:i]), sampling, 2 + i) for i in range(5)]
        expected = toy_rules.verify(rows, drafts, rule)
        assert result.num_accepted == expected.num_accepted_tokens
        kept = drafts[: expected.num_accepted_tokens]
        assert result.token_ids == (*kept, expected.next_token_id)
        accepted.append(result.num_accepted)
    if sampling is GREEDY:
        assert set(accepted) == {4}
    else:
        assert len(set(accepted)) > 1
    subject.engine.check_integrity()


def test_rules_and_chunks_of_one_pass_do_not_disturb_each_other(subject: Subject) -> None:
    texts = {i: tokens(30 + i, PROMPT_LEN + i) for i in range(1, 7)}
    drafts = tokens(40, 2)
    laws = tuple(law_around(token_id, 3) for token_id in drafts)
    start = {i: len(text) - 1 for i, text in texts.items()}

    def block(i: int, mode: VerificationMode) -> StepItem:
        rows = (texts[i][-1], *drafts)
        return StepItem(i, start[i], rows, 3, EVERYTHING, 2, Verify(mode, laws, 5), num_logprobs=2)

    items = [
        block(1, VerificationMode.BLOCK),
        StepItem(2, start[2], (texts[2][-1], *drafts), 3, COUPLED, 1, num_logprobs=1),
        StepItem(3, start[3], texts[3][-1:], 1, EVERYTHING, 1, Propose(4)),
        StepItem(4, 0, texts[4], 1, COUPLED, max_rows=3),
        block(5, VerificationMode.REJECTION),
        StepItem(6, start[6], texts[6][-1:], 1, GREEDY, 3),
    ]
    for sequence_id in texts:
        if sequence_id == 4:
            subject.engine.add(4)
        else:
            filled(subject.engine, sequence_id, texts[sequence_id][:-1])
    together = subject.engine.step(items)
    assert [len(result.logprobs) for result in together] == [
        len(together[0].token_ids), 3, 0, 0, len(together[4].token_ids), 0,
    ]  # fmt: skip
    assert (together[3].token_ids, together[3].cached_len) == ((), 3)
    for item, result in zip(items, together, strict=True):
        [alone] = subject.engine.step([item])
        assert (alone.token_ids, alone.num_accepted) == (result.token_ids, result.num_accepted)
        assert [law.token_ids for law in alone.draft_probs] == [
            law.token_ids for law in result.draft_probs
        ]
        for one, other in zip(alone.logprobs, result.logprobs, strict=True):
            assert_close(one, other)
    subject.engine.check_integrity()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_samples": 2}, "2 proposals need 3 samples, not 2"),
        ({"token_ids": (5, 6, 9)}, "no mass in its own law"),
        ({"rule": Verify(VerificationMode.COUPLED, (), 0), "num_samples": 1}, "needs no laws"),
        ({"max_rows": 0}, "at most 0 rows"),
        ({"num_logprobs": -1}, "-1 logprobs"),
        ({"num_prompt_logprobs": -1}, "-1 prompt logprobs"),
        ({"scored_token_ids": (1,)}, "no prompt logprobs are asked for"),
        ({"num_prompt_logprobs": 0, "scored_token_ids": (1,) * 4}, "4 scores of 3 rows"),
        ({"num_prompt_logprobs": 0, "scored_token_ids": (101,)}, "scored token id outside"),
    ],
)
def test_slips_of_the_caller_are_refused_and_change_nothing(
    subject: Subject, changes: dict[str, object], problem: str
) -> None:
    filled(subject.engine, 1, (1, 2, 3))
    laws = (law_around(6, 1), law_around(7, 2))
    good = StepItem(1, 3, (5, 6, 7), 3, COUPLED, 0, Verify(VerificationMode.BLOCK, laws, 0))
    with pytest.raises(LocalProtocolError, match=problem):
        subject.engine.step([replace(good, **changes)])  # type: ignore[arg-type]
    assert subject.engine.cached_len(1) == 3
    assert len(subject.engine.step([good])[0].token_ids) >= 1
    subject.engine.check_integrity()
