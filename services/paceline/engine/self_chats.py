"""Chats that a model makes up by itself: training data for its draft, with no outside text.

A user turn is sampled from the chat template's user prefix, then the model answers it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from paceline.engine.chat_files import Chat
from paceline.engine.plain_texts import continue_prompts
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
def make_chats(
    target: Any, tokenizer: Any, num: int, batch: int, length: int, seed: int = 0
) -> Iterator[Chat]:
    """Endless sampling is cut at `num` chats of at most `length` tokens."""
    torch.manual_seed(seed)
    before, after = template_parts(tokenizer)
    made = 0
    for number in range(num):
        users = continue_prompts(target, [before] * batch, 1.0, _MAX_USER_TOKENS, after[0])
        prompts = [before + user + after for user in users if user]
        if not prompts:
            continue
        temperature = ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)]
        room = max(1, length - max(len(prompt) for prompt in prompts))
        answers = continue_prompts(target, prompts, temperature, room, tokenizer.eos_token_id)
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer and made < num:
                made += 1
                yield Chat((*prompt, *answer), len(prompt))
        if made >= num:
            return
        logger.info("%d of %d chats", made, num)
