"""What a translated draft takes from its folders: the common tokens, and the target's name tags.

Of the target only the small files are read. Knows no tensor and runs no model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.engine.base import EngineInfo
from paceline.engine.draft_head import read_draft_vocab
from paceline.engine.json_files import read_json
from paceline.engine.translation import Translation
from paceline.engine.vocabulary import Vocabulary
from paceline.errors import ConfigError
from paceline.grammars import TokenGrammars, load_grammars
from paceline.models import num_token_ids, tokenizer_hash


def load_translation(draft_folder: Path, target_folder: Path) -> Translation:
    """Between a draft's folder and one with the target's tokenizer (other files are optional).
    `ConfigError` when one of them cannot be translated, or when they share too little."""
    draft, target = Vocabulary(draft_folder), Vocabulary(target_folder)
    size = _width(draft_folder)
    if size and draft.size > size:
        raise ConfigError(
            f"{draft_folder}: the tokenizer has {draft.size} token ids but the model only {size}"
            " rows for them; such a draft cannot be translated"
        )
    return Translation(
        draft,
        target,
        target_size=_num_real_ids(target_folder),
        allowed_draft_ids=read_draft_vocab(draft_folder),
    )


def target_info(info: EngineInfo, translation: Translation, target_folder: Path) -> EngineInfo:
    """What the draft of `info` announces: as the target does, from the files of its tokenizer."""
    eos_ids = tuple(i for i in _eos_token_ids(target_folder) if i < translation.target_size)
    return replace(
        info,
        vocab_size=translation.target_size,
        tokenizer_hash=tokenizer_hash(target_folder),
        eos_token_ids=eos_ids,
        grammars=_grammars(target_folder, translation.target_size, eos_ids),
        adapters=(),
        num_heads=0,
    )


def _num_real_ids(folder: Path) -> int:
    """As the target's own engine counts them, where its config is there to say how wide it is."""
    num_ids, width = num_token_ids(folder)[1], _width(folder)
    return min(num_ids, width) if width else num_ids


def _width(folder: Path) -> int:
    """Rows of the output layer; 0: nothing says."""
    config = _read(folder / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else 0


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        eos = _read(folder / name).get("eos_token_id")
        listed = eos if isinstance(eos, list) else [eos]
        if all(isinstance(token_id, int) for token_id in listed):
            return tuple(listed)
    return ()


def _grammars(folder: Path, size: int, eos_ids: tuple[int, ...]) -> TokenGrammars | None:
    """A draft may do without: what its target's grammar forbids is refused there."""
    try:
        return load_grammars(str(folder), size, eos_ids) if eos_ids else None
    except ValueError:
        return None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = read_json(path)
    return data if isinstance(data, dict) else {}
