"""Chats that a model makes up by itself: training data for its draft, with no outside text.

A user turn is sampled from the chat template's user prefix, then the model answers it. All
randomness is torch's global generator, which the caller seeds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.engine.chat_files import Chat
from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

ANSWER_TEMPERATURES = (0.0, 0.7, 1.0, 1.0)  # batches take turns
_MARK = "\x00"  # stands for the user's text when the template is cut in two
_MAX_USER_TOKENS = 64


def template_parts(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids before and after the user's text, the latter up to where the answer starts."""
    message = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise ConfigError("the chat template drops the user's text")
    if not after:
        raise ConfigError("the chat template has nothing behind the user's text to end it")
    return tuple(tokenizer.encode(part, add_special_tokens=False) for part in (before, after))


@torch.inference_mode()
def make_chats(target: Any, tokenizer: Any, num: int, batch: int, length: int) -> Iterator[Chat]:
    """Endless sampling is cut at `num` chats of at most `length` tokens."""
    before, after = template_parts(tokenizer)
    made = 0
    for number in range(num):
        users = _generate(target, [before] * batch, 1.0, _MAX_USER_TOKENS, after[0])
        prompts = [before + user + after for user in users if user]
        if not prompts:
            continue
        temperature = ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)]
        room = max(1, length - max(len(prompt) for prompt in prompts))
        answers = _generate(target, prompts, temperature, room, tokenizer.eos_token_id)
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer and made < num:
                made += 1
                yield Chat((*prompt, *answer), len(prompt))
        if made >= num:
            return
        logger.info("%d of %d chats", made, num)


@torch.inference_mode()
def make_texts(target: Any, tokenizer: Any, num: int, batch: int, length: int) -> Iterator[Chat]:
    """For a model without a chat template: plain texts from the token that begins one."""
    begin = tokenizer.bos_token_id
    begin = tokenizer.eos_token_id if begin is None else begin  # GPT-2's way to begin a text
    if begin is None:
        raise ConfigError("the tokenizer has neither a chat template nor a BOS token to begin with")
    end = begin if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    made = 0
    for _ in range(num):
        for text in _generate(target, [[begin]] * batch, 1.0, length - 1, end):
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
        answers += _generate(target, prompts[start : start + batch], 0.0, limit, end)
    return answers


def _generate(
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
