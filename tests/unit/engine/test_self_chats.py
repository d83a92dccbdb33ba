from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.engine.distill_data import load_target
from paceline.engine.self_chats import make_chats, template_parts
from paceline.errors import ConfigError


class CharTokenizer:
    """One id per character; the template is `A` user `BC`, or the one given."""

    eos_token_id = 2

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
    chats = list(make_chats(target, CharTokenizer(), num=5, batch=2, length=90, seed=1))
    assert len(chats) == 5
    for chat in chats:
        prompt, answer = chat.ids[: chat.prompt_len], chat.ids[chat.prompt_len :]
        assert (prompt[0], prompt[-2:]) == (65, (66, 67))
        assert 66 not in prompt[1:-2]
        assert answer
        assert 2 not in answer
        assert len(chat.ids) <= 90
    assert chats == list(make_chats(target, CharTokenizer(), num=5, batch=2, length=90, seed=1))
