"""Plain texts and greedy answers of a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.engine.distill_data import load_target
from paceline.engine.plain_texts import greedy_answers, make_texts
from paceline.errors import ConfigError


class Tokenizer:
    """All that is asked of one."""

    eos_token_id: int | None = 2
    bos_token_id: int | None = None


def test_a_base_model_writes_plain_texts(llama_folder: Path) -> None:
    target = load_target(llama_folder, torch.float32)
    tokenizer = Tokenizer()
    tokenizer.bos_token_id = 1
    texts = list(make_texts(target, tokenizer, num=5, batch=2, length=40, seed=1))
    assert texts == list(make_texts(target, tokenizer, num=5, batch=2, length=40, seed=1))
    assert len(texts) == 5
    for text in texts:
        assert (text.ids[0], text.prompt_len) == (1, 1)
        assert 2 <= len(text.ids) <= 40
        assert 2 not in text.ids
    tokenizer.bos_token_id = None  # GPT-2 begins with what ends a text
    assert next(make_texts(target, tokenizer, num=1, batch=2, length=40)).ids[0] == 2
    tokenizer.eos_token_id = None
    with pytest.raises(ConfigError, match="neither a chat template nor a BOS token"):
        next(make_texts(target, tokenizer, num=1, batch=2, length=40))


def test_greedy_answers_are_the_targets_first_choices(llama_folder: Path) -> None:
    target = load_target(llama_folder, torch.float32)
    prompts = [[5, 9], [7], [3, 4, 5]]
    answers = greedy_answers(target, Tokenizer(), prompts, batch=2, limit=4)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        for token_id in answer:
            with torch.inference_mode():
                logits = target(torch.tensor([ids])).logits[0, -1]
            assert int(logits.argmax()) == token_id
            ids.append(token_id)
