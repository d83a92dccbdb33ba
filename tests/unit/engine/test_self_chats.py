from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.engine.distill_data import load_target
from paceline.engine.self_chats import greedy_answers, make_chats, make_texts, template_parts
from paceline.errors import ConfigError


class CharTokenizer:
    """One id per character; the template is `A` user `BC`, or the one given."""

    eos_token_id: int | None = 2
    bos_token_id: int | None = None

    def __init__(self, template: str = "A{}BC") -> None:
        self._template = template

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return self._template.format(messages[0]["content"])

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


def test_the_template_is_cut_around_the_users_text() -> None:
    assert template_parts(CharTokenizer()) == ([65], [66, 67])
    with pytest.raises(ConfigError, match="drops the user's text"):
        template_parts(CharTokenizer("AB"))
    with pytest.raises(ConfigError, match="nothing behind the user's text"):
        template_parts(CharTokenizer("A{}"))


def test_chats_follow_the_template_and_the_seed(llama_folder: Path) -> None:
    target = load_target(llama_folder, torch.float32)
    torch.manual_seed(1)
    chats = list(make_chats(target, CharTokenizer(), num=5, batch=2, length=90))
    assert len(chats) == 5
    for chat in chats:
        prompt, answer = chat.ids[: chat.prompt_len], chat.ids[chat.prompt_len :]
        assert (prompt[0], prompt[-2:]) == (65, (66, 67))
        assert 66 not in prompt[1:-2]
        assert answer
        assert 2 not in answer
        assert len(chat.ids) <= 90
    torch.manual_seed(1)
    assert chats == list(make_chats(target, CharTokenizer(), num=5, batch=2, length=90))


def test_a_base_model_writes_plain_texts(llama_folder: Path) -> None:
    target = load_target(llama_folder, torch.float32)
    tokenizer = CharTokenizer()
    tokenizer.bos_token_id = 1
    torch.manual_seed(1)
    texts = list(make_texts(target, tokenizer, num=5, batch=2, length=40))
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
    answers = greedy_answers(target, CharTokenizer(), prompts, batch=2, limit=4)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        for token_id in answer:
            with torch.inference_mode():
                logits = target(torch.tensor([ids])).logits[0, -1]
            assert int(logits.argmax()) == token_id
            ids.append(token_id)
