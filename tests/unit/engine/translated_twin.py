"""A translated engine over two tiny models, and its naive twin. For tests only.

The twin keeps no cache: it translates the text anew, asks transformers for the logits behind it,
and puts those of common tokens where the target has them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from paceline.config import ModelConfig
from paceline.engine.base import StepItem
from paceline.engine.loader import load_engine
from paceline.engine.translated import TranslatedEngine
from paceline.engine.translation import Translation
from paceline.engine.vocabulary import Vocabulary
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams
from tests.unit.engine.subjects import GREEDY, dense
from tests.unit.engine.two_tokenizers import TARGET_TEXT

BLOCK = 4
NUM_BLOCKS = 250


class Twin:
    def __init__(self, folders: dict[str, Path]) -> None:
        self.target = Vocabulary(folders["target"])
        self.draft = Vocabulary(folders["draft"])
        self.translation = Translation(self.draft, self.target)
        self._logits = dense(folders["draft"], self.draft.size)

    def text(self, num_tokens: int, seed: int = 0) -> tuple[int, ...]:
        text = random.Random(seed).choice(TARGET_TEXT) * 4
        return tuple(self.target.encode(text.encode())[:num_tokens])

    def row(self, draft_ids: Sequence[int]) -> list[float]:
        wide = [float("-inf")] * self.target.size
        last = self._logits(draft_ids)[-1]
        for mine, theirs in zip(
            self.translation.draft_ids, self.translation.target_ids, strict=True
        ):
            wide[theirs] = last[mine]
        return wide

    def naive(self, text: Sequence[int]) -> list[int]:
        return self.translation.translate(text, is_start=True).token_ids


def reference_token(
    row: list[float], sampling: SamplingParams, index: int, text: Sequence[int], prompt_len: int
) -> int:
    return coupled_token(row, sampling, index, text[:prompt_len], text[prompt_len:])


def load(folders: dict[str, Path], **fields: object) -> TranslatedEngine:
    given = {
        "source": str(folders["draft"]),
        "target_tokenizer": str(folders["target"]),
        "max_model_len": 512,
        "block_size": BLOCK,
        "num_kv_blocks": NUM_BLOCKS,
        "device": "cpu",
        **fields,
    }
    engine = load_engine(ModelConfig.model_validate(given), folders["draft"])
    assert isinstance(engine, TranslatedEngine)
    return engine


def item(
    start: int, token_ids: Sequence[int], sampling: SamplingParams = GREEDY, **more: object
) -> StepItem:
    return StepItem(1, start, tuple(token_ids), 1, sampling, **more)  # type: ignore[arg-type]


def held(engine: TranslatedEngine, sequence_id: int = 1) -> list[int]:
    """The draft's tokens in the model's cache."""
    return engine._engine._pool.table(sequence_id).token_ids
