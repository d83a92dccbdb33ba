"""Tiny random models that can chat: a tokenizer of words t0, t1, ... with a chat template."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from paceline.engine.chat_files import Chat, write_chats
from tests.unit.engine.conftest import VOCAB_SIZE
from tests.unit.engine.families import save_family

TEMPLATE = "t3 {% for m in messages %}t6 {{ m['content'] }} t4 {% endfor %}t5 t7"
PREFIX, SUFFIX = (3, 6), (4, 5, 7)


def save_chat_model(
    family: str, folder: Path, *, template: str | None = TEMPLATE, **overrides: Any
) -> Path:
    """A random model of a family (`families.FAMILIES`); None: a base model without a template."""
    save_family(family, folder, **overrides)
    words = {f"t{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def random_chats(num: int, seed: int = 5, longest: int = 20) -> list[Chat]:
    rng = random.Random(seed)
    return [
        Chat((*PREFIX, *rng.choices(range(8, VOCAB_SIZE), k=rng.randint(8, longest))), 4)
        for _ in range(num)
    ]


def chats_file(path: Path, num: int = 40, seed: int = 5) -> Path:
    write_chats(random_chats(num, seed), path)
    return path
