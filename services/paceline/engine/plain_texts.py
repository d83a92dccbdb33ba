"""What a model writes by itself behind some tokens, by the library's own generation.

For models without a chat template, and for greedy answers to prompts. Chats are `self_chats`'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.engine.chat_files import Chat
from paceline.errors import ConfigError


@torch.inference_mode()
def make_texts(
    target: Any, tokenizer: Any, num: int, batch: int, length: int, seed: int = 0
) -> Iterator[Chat]:
    """`num` texts at T = 1 of at most `length` tokens, from the token that begins a text."""
    torch.manual_seed(seed)
    begin = tokenizer.bos_token_id
    begin = tokenizer.eos_token_id if begin is None else begin  # GPT-2's way to begin a text
    if begin is None:
        raise ConfigError("the tokenizer has neither a chat template nor a BOS token to begin with")
    end = begin if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    made = 0
    for _ in range(num):
        for text in continue_prompts(target, [[begin]] * batch, 1.0, length - 1, end):
            if text and made < num:
                made += 1
                yield Chat((begin, *text), 1)
        if made >= num:
            return


@torch.inference_mode()
def greedy_answers(
    target: Any, tokenizer: Any, prompts: Sequence[list[int]], batch: int, limit: int
) -> list[list[int]]:
    """What the target says at T = 0, at most `limit` tokens, without the one that ends it."""
    end = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        answers += continue_prompts(target, prompts[start : start + batch], 0.0, limit, end)
    return answers


def continue_prompts(
    target: Any, prompts: Sequence[list[int]], temperature: float, limit: int, end: int
) -> list[list[int]]:
    """What follows each prompt, up to the id `end`, which is left out."""
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[end] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    ids = ids.to(target.device)
    mask = torch.arange(width)[None] >= torch.tensor(padding)[:, None]
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0.0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    made = target.generate(
        input_ids=ids,
        attention_mask=mask.long().to(target.device),
        max_new_tokens=limit,
        eos_token_id=end,
        pad_token_id=end,
        **how,
    )
    rows = [row[width:] for row in made.tolist()]
    return [row[: row.index(end)] if end in row else row for row in rows]
