"""Chats that a model makes up by itself: training data for its draft, with no outside text.

    python -m paceline.engine.self_chats --target DIR --num 768 --out FILE

A user turn is sampled from the chat template's user prefix, then the model answers it. Writes
JSON lines `{ids, prompt_len}` of token ids, which `distill` and `draft_report` read.

Many chats run side by side, one token a pass; when one ends, the next begins in its place. What a
chat says depends on its number and on the seed alone, but for rounding, which may differ with the
batch. The model's last hidden states, which training wants, are kept as they come by.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from paceline.engine.distill import load_target
from paceline.engine.draft_report import Chat
from paceline.engine.slot_attention import SLOT_ATTENTION, SlotCache
from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

ANSWER_TEMPERATURES = (0.0, 0.5, 0.7, 0.7, 1.0, 1.0)  # chats take turns
_MARK = "\x00"  # stands for the user's text when the template is cut in two
_MAX_USER_TOKENS = 64
_BLOCK = 256  # ids whose chances are added up before one of them is looked for
_LOG_CHATS = 64


def template_parts(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids before and after the user's text, the latter up to where the answer starts."""
    message = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise ConfigError("the chat template drops the user's text")
    return tuple(tokenizer.encode(part, add_special_tokens=False) for part in (before, after))


@dataclass(slots=True)
class _Draft:
    """A chat on its way; `forced` are ids that the template, not the model, says next."""

    ids: list[int]
    chance: random.Random
    answer_temperature: float
    prompt_len: int = 0
    forced: list[int] = field(default_factory=list)

    @property
    def temperature(self) -> float:
        return self.answer_temperature if self.prompt_len else 1.0


def make_chats(
    target: Any, tokenizer: Any, num: int, batch: int, length: int, seed: int = 0
) -> Iterator[Chat]:
    """`num` chats of at most `length` tokens, in the order in which they end."""
    for chat, _ in make_examples(target, tokenizer, num, batch, length, seed):
        yield chat


@torch.inference_mode()
def make_examples(
    target: Any, tokenizer: Any, num: int, batch: int, length: int, seed: int = 0
) -> Iterator[tuple[Chat, torch.Tensor]]:
    """Chats with the last hidden states [tokens, hidden] of every token, in the model's dtype."""
    before, after = template_parts(tokenizer)
    if len(before) + len(after) + 2 > length:
        raise ConfigError(f"chats of {length} tokens have no room for the chat template")
    usual = target.config._attn_implementation
    target.set_attn_implementation(SLOT_ATTENTION)
    try:
        sampler = _Sampler(target, before, after, tokenizer.eos_token_id, length, seed)
        for made, example in enumerate(islice(sampler.run(min(batch, num)), num), 1):
            yield example
            if made % _LOG_CHATS == 0:
                logger.info("%d of %d chats", made, num)
    finally:
        target.set_attn_implementation(usual)


class _Sampler:
    """Runs a batch of drafts; the user's turn ends at `after[0]`, the answer at `end`."""

    def __init__(
        self, target: Any, before: list[int], after: list[int], end: int, length: int, seed: int
    ) -> None:
        self._target, self._before, self._after, self._end = target, before, after, end
        self._length, self._seed, self._begun = length, seed, 0

    def run(self, batch: int) -> Iterator[tuple[Chat, torch.Tensor]]:
        """Endless."""
        device = self._target.device
        cache = SlotCache(batch, self._length)
        prefix = self._pass(torch.tensor([self._before], device=device), cache)[0]
        hidden = prefix.new_zeros(batch, self._length, prefix.shape[-1])
        hidden[:, : len(prefix)] = prefix
        rows = torch.arange(batch, device=device)
        drafts = [self._begin() for _ in range(batch)]
        while True:
            # The prefix's last token is read again: its row decides the first one behind it.
            cache.at = torch.tensor([len(draft.ids) - 1 for draft in drafts], device=device)
            ids = torch.tensor([[draft.ids[-1]] for draft in drafts], device=device)
            states = self._pass(ids, cache)[:, 0]
            hidden[rows, cache.at] = states
            free = [row for row, draft in enumerate(drafts) if not draft.forced]
            picked = self._pick(states[free], [drafts[row] for row in free])
            for draft in drafts:
                if draft.forced:
                    draft.ids.append(draft.forced.pop(0))
            for row, token_id in zip(free, picked, strict=True):
                draft = drafts[row]
                if not self._goes_on(draft, token_id):
                    if len(draft.ids) > draft.prompt_len > 0:
                        chat = Chat(tuple(draft.ids), draft.prompt_len)
                        yield chat, hidden[row, : len(draft.ids)].clone()
                    drafts[row] = self._begin()

    def _begin(self) -> _Draft:
        number = self._begun
        self._begun += 1
        temperature = ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)]
        return _Draft(list(self._before), random.Random(f"{self._seed}:{number}"), temperature)

    def _goes_on(self, draft: _Draft, token_id: int) -> bool:
        """Takes the token in, if the chat is not over with it."""
        if draft.prompt_len:
            if token_id == self._end or len(draft.ids) == self._length:
                return False
            draft.ids.append(token_id)
            return True
        said = len(draft.ids) - len(self._before)
        most = min(_MAX_USER_TOKENS, self._length - len(self._before) - len(self._after) - 1)
        if token_id == self._after[0] and not said:
            return False
        if token_id == self._after[0] or said == most:
            draft.prompt_len = len(draft.ids) + len(self._after)
            token_id, draft.forced = self._after[0], self._after[1:]
        draft.ids.append(token_id)
        return True

    def _pass(self, ids: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        if cache.at is not None:
            positions = cache.at[:, None]
        states: torch.Tensor = self._target.model(
            input_ids=ids, position_ids=positions, use_cache=False, slots=cache
        ).last_hidden_state
        return states

    def _pick(self, states: torch.Tensor, drafts: Sequence[_Draft]) -> list[int]:
        if not drafts:
            return []
        logits = self._target.get_output_embeddings()(states).float()
        chances = torch.tensor([draft.chance.random() for draft in drafts], dtype=torch.float64)
        temperatures = torch.tensor([draft.temperature for draft in drafts])
        picked: list[int] = pick(logits, temperatures, chances).tolist()
        return picked


def pick(logits: torch.Tensor, temperatures: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """The token id of each row that its number in [0, 1) falls on; the best one at temperature 0.

    `logits` [rows, ids] are overwritten. Chances are added up by blocks of ids, and only the block
    that is hit is searched: much less work than noise for every id, and the same law.
    """
    best = logits.argmax(dim=-1) if bool((temperatures == 0.0).any()) else None
    temperatures, chances = temperatures.to(logits.device), chances.to(logits.device)
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= temperatures.clamp(min=1e-2)[:, None]
    mass = torch.nn.functional.pad(logits.exp_(), (0, -logits.shape[1] % _BLOCK))
    mass = mass.view(len(logits), -1, _BLOCK)
    up_to = mass.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = chances[:, None] * up_to[:, -1:]
    block = torch.searchsorted(up_to, goal, right=True).clamp(max=mass.shape[1] - 1)
    inside = mass[torch.arange(len(mass), device=mass.device), block[:, 0]].double().cumsum(dim=-1)
    before = up_to.gather(1, block) - inside[:, -1:]
    place = torch.searchsorted(inside, goal - before, right=True).clamp(max=_BLOCK - 1)
    picked = (block * _BLOCK + place)[:, 0].clamp(max=logits.shape[1] - 1)
    return picked if best is None else torch.where(temperatures == 0.0, best, picked)


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a model make up chats.")
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    parser.add_argument("--num", type=int, default=768)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=320, help="most tokens of a chat")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    target = load_target(options.target, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(options.target, local_files_only=True)
    chats = make_chats(target, tokenizer, options.num, options.batch, options.length, options.seed)
    with options.out.open("a", encoding="utf-8") as file:
        for chat in chats:
            row = {"ids": chat.ids, "prompt_len": chat.prompt_len}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
