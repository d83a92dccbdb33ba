from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.engine import self_chats
from paceline.engine.chat_files import Chat
from paceline.engine.distill_data import load_target, load_tokenizer
from paceline.engine.self_chats import (
    ANSWER_TEMPERATURES,
    make_chats,
    make_examples,
    pick,
    template_parts,
)
from paceline.errors import ConfigError
from tests.unit.engine.tiny_chat import save_chat_model


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


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no users here') }}", "cannot be used: no users here"),
        ("{% if %}", "cannot be used: Expected an expression"),
        ("t3 {{ messages[1]['content'] }} t4", "cannot be used: "),
        ("t3 {{ messages[0]['content'] / 0 }} t4", "cannot be used: unsupported operand"),
        ("t3 {{ 1 // 0 }} t4", "cannot be used: integer division"),
        ("t3 {{ messages[0]['content'] }}", "has nothing after the user's text"),
        ("{{ messages[0]['content'] }} t4", "has nothing before the user's text"),
    ],
)
def test_a_template_that_cannot_be_used_is_a_sentence(
    template: str, said: str, tmp_path: Path
) -> None:
    folder = save_chat_model("llama", tmp_path, template=template)
    with pytest.raises(ConfigError) as caught:
        template_parts(load_tokenizer(folder))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ended_by", [66, 2])
def test_a_target_that_ends_every_turn_at_once_does_not_run_forever(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, ended_by: int
) -> None:
    """By the token behind the user's text, or by EOS in the answer behind the longest question."""
    monkeypatch.setattr(self_chats, "MAX_ENDED_AT_ONCE", 7)
    target = load_target(llama_folder, torch.float32)
    output = torch.nn.Linear(32, 101)
    output.bias.data[ended_by] = 1e4
    target.set_output_embeddings(output)
    chats = make_chats(target, CharTokenizer(), num=1, batch=2, length=12)
    with pytest.raises(ConfigError, match=r"ended [78] chats in a row without an answer"):
        next(chats)


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
    again = list(make_chats(target, CharTokenizer(), num=5, batch=2, length=90, seed=1))
    assert chats == again
    other = list(make_chats(target, CharTokenizer(), num=5, batch=2, length=90, seed=2))
    assert not set(chats) & set(other)


def test_a_chat_says_the_same_in_any_batch(llama_folder: Path) -> None:
    """A slot that was used before is no different from a fresh one."""
    target = load_target(llama_folder, torch.float32)

    def first(batch: int) -> set[Chat]:
        return set(make_chats(target, CharTokenizer(), num=30, batch=batch, length=60))

    one_by_one = first(1)
    assert len(one_by_one & first(3)) >= 27  # the last ones differ: the order is that of ends


def test_hidden_states_are_those_of_one_pass_over_the_chat(llama_folder: Path) -> None:
    target = load_target(llama_folder, torch.float32)
    usual = target.config._attn_implementation
    for chat, hidden in make_examples(target, CharTokenizer(), num=6, batch=2, length=50):
        assert target.config._attn_implementation != usual
        with torch.inference_mode():
            kept = target.config._attn_implementation
            target.set_attn_implementation(usual)
            states = target.model(input_ids=torch.tensor([chat.ids])).last_hidden_state[0]
            target.set_attn_implementation(kept)
        torch.testing.assert_close(hidden, states, rtol=1e-4, atol=1e-4)
    assert target.config._attn_implementation == usual


def test_some_answers_are_the_targets_greedy_ones(llama_folder: Path) -> None:
    target = load_target(llama_folder, torch.float32)
    num = 2 * len(ANSWER_TEMPERATURES)
    chats = list(make_chats(target, CharTokenizer(), num=num, batch=num, length=40))

    def is_greedy(chat: Chat) -> bool:
        with torch.inference_mode():
            logits = target(input_ids=torch.tensor([chat.ids])).logits[0]
        best = logits.argmax(dim=-1).tolist()
        return tuple(best[chat.prompt_len - 1 : -1]) == chat.ids[chat.prompt_len :]

    assert 1 <= sum(is_greedy(chat) for chat in chats) <= num // 2


def test_pick_follows_the_law_at_its_temperature() -> None:
    """Numbers at even distances hit every token as often as its share says."""
    logits = torch.randn(600, generator=torch.Generator().manual_seed(0))
    num = 20_000
    chances = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    for temperature in (0.5, 1.0):
        picked = pick(logits.repeat(num, 1), torch.full((num,), temperature), chances)
        shares = torch.bincount(picked, minlength=600) / num
        law = (logits / temperature).softmax(dim=-1)
        assert (shares - law).abs().max() < 2.0 / num
    best = pick(logits.repeat(3, 1), torch.zeros(3), chances[[0, 9_000, -1]])
    assert best.tolist() == [int(logits.argmax())] * 3


def test_a_length_without_room_for_the_template_is_refused(llama_folder: Path) -> None:
    target = load_target(llama_folder, torch.float32)
    with pytest.raises(ConfigError, match="no room for the chat template"):
        next(make_chats(target, CharTokenizer(), num=1, batch=1, length=4))
