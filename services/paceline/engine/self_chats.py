"""Chats that a model makes up by itself: training data for its draft, with no outside text.

    python -m paceline.engine.self_chats --target DIR --num 768 --out FILE

A user turn is sampled from the chat template's user prefix, then the model answers it. Writes
JSON lines `{ids, prompt_len}` of token ids, which `distill` and `draft_report` read.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from paceline.engine.distill import load_target
from paceline.engine.draft_report import Chat
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
    return tuple(tokenizer.encode(part, add_special_tokens=False) for part in (before, after))


@torch.inference_mode()
def make_chats(target: Any, tokenizer: Any, num: int, batch: int, length: int) -> Iterator[Chat]:
    """Endless sampling is cut at `num` chats of at most `length` tokens."""
    before, after = template_parts(tokenizer)
    made = 0
    for number in range(num):
        users = _generate(target, [before] * batch, 1.0, _MAX_USER_TOKENS, after[0])
        prompts = [before + user + after for user in users if user]
        temperature = ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)]
        room = length - max(len(prompt) for prompt in prompts)
        answers = _generate(target, prompts, temperature, room, tokenizer.eos_token_id)
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer and made < num:
                made += 1
                yield Chat((*prompt, *answer), len(prompt))
        if made >= num:
            return
        logger.info("%d of %d chats", made, num)


def _generate(
    target: Any, prompts: Sequence[list[int]], temperature: float, limit: int, end: int
) -> list[list[int]]:
    """What follows each prompt, up to the id `end`, which is left out."""
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[end] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.arange(width)[None] >= torch.tensor(padding)[:, None]
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0.0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    made = target.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        max_new_tokens=limit,
        eos_token_id=end,
        pad_token_id=end,
        **how,
    )
    rows = [row[width:] for row in made.tolist()]
    return [row[: row.index(end)] if end in row else row for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a model make up chats.")
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    parser.add_argument("--num", type=int, default=768)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=320, help="most tokens of a chat")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    target = load_target(options.target, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(options.target, local_files_only=True)
    with options.out.open("a", encoding="utf-8") as file:
        for chat in make_chats(target, tokenizer, options.num, options.batch, options.length):
            row = {"ids": chat.ids, "prompt_len": chat.prompt_len}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
