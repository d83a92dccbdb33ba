"""From a `ModelConfig` to a ready `Engine`: toy, timed toy, or weights from a local folder.

Refuses, with a sentence that says the fix, every model that the engine would compute wrongly.
Downloads nothing and runs no code from a model folder. torch is imported only when needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline import models
from paceline.config import ModelConfig
from paceline.engine.base import NO_ADAPTERS, Engine, EngineInfo
from paceline.engine.medusa_source import resolve_medusa
from paceline.engine.timed import TimedEngine
from paceline.engine.toy import ToyEngine
from paceline.errors import ConfigError
from paceline.grammars import load_grammars

TOY_NUM_HEADS = 3


def load_engine(
    model: ModelConfig,
    path: Path | None = None,
    *,
    draft_top_n: int | None = None,
    adapters: Mapping[str, str] = NO_ADAPTERS,
    medusa: str = "",
) -> Engine:
    """The engine that `model` describes; `path` is its resolved folder, None for toys.

    `draft_top_n` limits a draft's noise to its most likely tokens (safe only for a draft).
    `adapters`: name -> PEFT folder; a toy opens no folder and makes an adapter of the name alone.
    `medusa`: where its Medusa heads are (`medusa_source.resolve_medusa`), or empty; `toy` gives a
    toy heads that guess by its rule. `ConfigError` when the folder cannot be served.
    """
    if model.source in models.BUILTIN_SOURCES:
        if medusa not in ("", "toy"):
            raise ConfigError(f"target.medusa: the heads of model {model.source} are named toy")
        if model.target_tokenizer:
            raise ConfigError(f"{model.source} has no tokenizer: it drafts for no target_tokenizer")
        return _load_toy(model, adapters, num_heads=TOY_NUM_HEADS if medusa else 0)
    if path is None:
        raise ConfigError(f"model {model.source} needs a folder; resolve it first")
    # Importing torch takes seconds, which a toy deployment should not pay.
    from paceline.engine.torch_loader import load_torch_engine

    heads = resolve_medusa(medusa) if medusa else None
    return load_torch_engine(model, path, draft_top_n=draft_top_n, adapters=adapters, medusa=heads)


def load_source(
    model: ModelConfig,
    *,
    draft_top_n: int | None = None,
    adapters: Mapping[str, str] = NO_ADAPTERS,
    medusa: str = "",
) -> Engine:
    """`load_engine` for whatever `model.source` names: a built-in, a folder, an alias, a Hub id."""
    path = None if model.source in models.BUILTIN_SOURCES else models.resolve(model.source)
    return load_engine(model, path, draft_top_n=draft_top_n, adapters=adapters, medusa=medusa)


def toy_info(model: ModelConfig) -> EngineInfo:
    """What a toy engine of this configuration announces."""
    return EngineInfo(
        model_id=model.source,
        vocab_size=models.TOY_VOCAB_SIZE,
        max_model_len=model.max_model_len,
        block_size=model.block_size,
        num_blocks=model.num_kv_blocks,
        tokenizer_hash=models.TOY_TOKENIZER_HASH,
        eos_token_ids=(models.TOY_EOS_TOKEN_ID,),
        grammars=load_grammars(model.source, models.TOY_VOCAB_SIZE, (models.TOY_EOS_TOKEN_ID,)),
    )


def _load_toy(model: ModelConfig, adapters: Mapping[str, str], num_heads: int) -> Engine:
    toy = ToyEngine(
        replace(toy_info(model), adapters=tuple(adapters), num_heads=num_heads),
        error_rate=model.toy_error_rate,
        head_error_rate=model.toy_head_error_rate,
        enable_prefix_caching=model.enable_prefix_caching,
    )
    if model.source == "toy":
        return toy
    return TimedEngine(toy, base_ms=model.toy_step_ms, row_ms=model.toy_row_ms)
