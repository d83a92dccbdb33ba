"""Two tiny models with tokenizers of their own: byte-level BPE, trained on different texts.

Some tokens are common, some not; of their control tokens one. For tests only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.engine.translation import Translation
from paceline.engine.vocabulary import Vocabulary
from tests.unit.engine.conftest import SHAPE

TARGET_TEXT = [
    "the river runs down to the sea and the wind is in the trees of the valley",
    "def add(one, other):\n    return one + other\n\nprint(add(3, 4))",
    "Every morning the children walk along the shore; nobody knows why they are singing.",
    "Grüße aus Köln: schöne Straße, 24 Häuser, viele Bäume. 你好世界 你好 世界",
] * 3
DRAFT_TEXT = [
    "a reader of the paper walks to the station and reads the morning news in the train",
    "for number in range(10):\n    print(number)\n    number += 1",
    "Nobody sings along the valley, but the children know every river that runs to the sea.",
    "Der Zug nach München fährt früh; schöne Bäume stehen an der Straße.",
] * 3
TARGET_SPECIALS = ["<|end|>", "<|user|>", "<|pad|>"]
DRAFT_SPECIALS = ["<|start|>", "<|end|>"]
SIZES = {"target": 460, "draft": 420}


def train(texts: list[str], size: int, specials: list[str], *, dropped: str = "") -> Tokenizer:
    """`dropped`: characters of the byte alphabet that the vocabulary shall lack."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in dropped]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizers(folder: Path, *, dropped: str = "") -> dict[str, Path]:
    """`folder`/target and `folder`/draft with a tokenizer.json each, and no weights."""
    given = {
        "target": (TARGET_TEXT, TARGET_SPECIALS, ""),
        "draft": (DRAFT_TEXT, DRAFT_SPECIALS, dropped),
    }
    folders = {}
    for name, (texts, specials, missing) in given.items():
        folders[name] = folder / name
        folders[name].mkdir(parents=True)
        tokenizer = train(texts, SIZES[name], specials, dropped=missing)
        tokenizer.save(str(folders[name] / "tokenizer.json"))
    return folders


def save_pair(folder: Path, **overrides: Any) -> dict[str, Path]:
    """The same with random Llama weights; EOS is `<|end|>` in both."""
    folders = save_tokenizers(folder)
    for seed, path in enumerate(folders.values(), 5):
        size = max(read_ids(path).values()) + 1
        own = {"vocab_size": size, "eos_token_id": read_ids(path)["<|end|>"], **overrides}
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**{**SHAPE, **own})).save_pretrained(path)
    return folders


def save_related_pair(folder: Path) -> dict[str, Path]:
    """A pair that often agrees: the draft is the target with its own tokenizer's rows. Where a
    token is common it has the target's row; of what the target writes, most tokens are. Both look
    at the last token most: the same text is at other positions in the other's tokens."""
    folders = save_pair(folder, tie_word_embeddings=False)
    vocabularies = {name: Vocabulary(path) for name, path in folders.items()}
    found = Translation(vocabularies["draft"], vocabularies["target"])
    target, draft = (
        LlamaForCausalLM.from_pretrained(folders[name]) for name in ("target", "draft")
    )
    common, theirs = torch.tensor(found.draft_ids), torch.tensor(found.target_ids)
    with torch.no_grad():
        is_rare = torch.ones(target.lm_head.weight.shape[0], dtype=torch.bool)
        is_rare[theirs] = False
        target.lm_head.weight[is_rare] *= 0.1
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.01
        weights = {k: v for k, v in target.state_dict().items() if v.shape[0] != len(is_rare)}
        draft.load_state_dict(weights, strict=False)
        for mine, other in (
            (draft.lm_head, target.lm_head),
            (draft.model.embed_tokens, target.model.embed_tokens),
        ):
            mine.weight[common] = other.weight[theirs]
    for model, name in ((target, "target"), (draft, "draft")):
        model.save_pretrained(folders[name])
    return folders


def read_ids(folder: Path) -> dict[str, int]:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = dict(data["model"]["vocab"])
    return ids | {token["content"]: token["id"] for token in data["added_tokens"]}
