"""The data that a draft is trained on: a target's own chats, text files, and what it makes of them.

A work folder keeps every stage in pieces, so that an interrupted run goes on behind the last
whole one: chats (`chats-NNNN.jsonl`), then the target's last hidden states (`teacher-NNNN`).
It remembers the settings that it was begun with. A draft and Medusa heads may share a folder.

Knows nothing about training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from paceline.engine import self_chats
from paceline.engine.chat_files import (
    Chat,
    check_chats,
    common_prefix,
    read_chats,
    read_windows,
    write_chats,
)
from paceline.engine.distill import by_size, load_whole, padded, save_whole
from paceline.engine.distill_lineage import BESIDES, MADE_UP
from paceline.engine.model_config import read_model_config
from paceline.engine.plain_texts import make_texts
from paceline.engine.rejection_texts import Rejected, kept_rejections
from paceline.engine.student import FAMILIES, Example
from paceline.errors import ConfigError
from paceline.models import Progress, gguf_file, no_progress, sha256_of

_TEACHER, _CHATS = "teacher-{:04d}.safetensors", "chats-{:04d}.jsonl"
_CHATS_A_SHARD = 64
_TEACHER_ROWS = 4096  # tokens of one pass of the target, padding included
_MADE_AT_ONCE = 64  # chats of one batch of the target
_SEEDS_A_RUN = 1_000_003  # shards of one seed never have the torch seed of another's
_BFLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Where the examples come from. `chats`: a file, else `num_chats` are made up.

    `length`: most tokens of a made-up chat or of a piece of a text file, and how many last tokens
    of a rejection's context count. `rejections`: files of targets, or folders of them.
    """

    chats: Path | None = None
    num_chats: int = 512
    texts: tuple[Path, ...] = ()
    length: int = 320
    held_out: int = 0
    seed: int = 0
    rejections: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Data:
    """Chats to train on (pieces of text among them) and chats that are only measured on.

    `prefix`: how many ids all chats begin with. `description`: for the model card. `places`: where
    drafts failed, for the last chats to train on, which are texts of a rejection log.
    """

    train: list[Chat]
    held_out: list[Chat]
    prefix: int
    description: str
    places: tuple[tuple[int, ...], ...] = ()


def load_target(folder: Path, dtype: torch.dtype | str, device: str = "cpu") -> Any:
    """The whole target, "auto" in its stored type; `ConfigError` when it cannot be distilled."""
    check_target(folder)
    transformers_logging.disable_progress_bar()
    try:
        target, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load {folder}: {error}") from error
    missing = [*loading["missing_keys"], *loading["mismatched_keys"]]
    if missing:
        raise ConfigError(f"{folder} lacks weights that its config.json asks for: {missing[0]}")
    if target.get_output_embeddings().bias is not None:
        raise ConfigError(f"{folder}: its output layer has a bias, which a draft could not follow")
    return target.to(device).eval()


def use_device(device: str, num_threads: int) -> None:
    """Set torch's threads; `ConfigError` for a device that is not here."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r} is no device such as cpu or cuda:0") from error
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= num:
        raise ConfigError(f"no CUDA device here that is {device}: take --device cpu")
    torch.set_num_threads(num_threads)


def check_target(folder: Path, length: int = 0) -> None:
    """`ConfigError` unless it can be distilled, from texts of so many tokens."""
    if gguf_file(folder) is not None:
        raise ConfigError(f"{folder} is a GGUF file: only safetensors can be distilled")
    config = read_model_config(folder)
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{folder} is a {config.model_type}: only {known} can be distilled")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{folder} is quantized: distill from the weights before that")
    if length > config.max_position_embeddings:
        raise ConfigError(
            f"--length {length} is more than the {config.max_position_embeddings} positions that "
            f"{folder} has"
        )


def load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read the tokenizer in {folder}: {error}") from error


# ------------------------------------------------------------------------------------- settings


def fingerprint(folder: Path) -> dict[str, Any]:
    """What tells one target from another, without reading its weights."""
    names = ("config.json", "tokenizer.json")
    hashes = {name: sha256_of(folder / name) for name in names if (folder / name).is_file()}
    return hashes | {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}


def remember(settings: Mapping[str, Any], work: Path, name: str) -> None:
    """Write the settings of a work folder; `ConfigError` if it was begun with others."""
    path = work / name
    work.mkdir(parents=True, exist_ok=True)
    given = json.loads(json.dumps(settings, default=str))
    if path.is_file():
        try:
            known = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: delete the work folder") from error
        for key in sorted(known.keys() | given.keys()):
            if known.get(key) != given.get(key):
                raise ConfigError(
                    f"{work} was begun with another {key} ({_short(known.get(key))}, now "
                    f"{_short(given.get(key))}): name another --work folder or delete this one"
                )
        return
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
    staged.rename(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---------------------------------------------------------------------------------------- chats


def gather(
    target_folder: Path,
    settings: DataSettings,
    work: Path,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> Data:
    """All examples of the settings; those that the target makes up are kept in the work folder."""
    tokenizer = load_tokenizer(target_folder)
    texts = [w for path in settings.texts for w in read_windows(path, tokenizer, settings.length)]
    config = AutoConfig.from_pretrained(target_folder, local_files_only=True)
    # Before chats are made up for hours: nothing may come of the logs.
    rejected = _rejected(settings, work, config, progress) if settings.rejections else None
    chats: list[Chat] = []
    if settings.chats is not None:
        chats = read_chats(settings.chats)
    elif settings.num_chats:
        _held_out(settings, settings.num_chats)  # before they are made up for hours
        chats = _made_up(target_folder, tokenizer, settings, work, device, progress)
    for what, part in ((str(settings.chats or work), chats), ("the text files", texts)):
        check_chats(part, what, config.vocab_size, config.max_position_embeddings)
    # Measured are chats; pieces of text only where there is nothing else.
    measured, others = (chats, texts) if chats else (texts, chats)
    held_out = _held_out(settings, len(measured))
    said = [f"{len(chats):,} {MADE_UP}"] if chats else []
    if settings.chats is not None:
        said = [f"{len(chats):,} chats of {settings.chats.name}"]
    said += [f"{len(texts):,} pieces of text files"] if texts else []
    num_tokens = sum(len(chat.ids) for chat in (*chats, *texts))
    said[-1] += f", {num_tokens:,} tokens; the last {held_out} are held out"
    prefix = common_prefix(chats) if chats else 0
    data = Data([*others, *measured[:-held_out]], measured[-held_out:], prefix, ", ".join(said))
    return data if rejected is None else _with_rejections(data, rejected)


def _held_out(settings: DataSettings, num_chats: int) -> int:
    held_out = settings.held_out or min(64, max(1, num_chats // 8))
    if num_chats <= held_out:
        raise ConfigError(
            f"there are {num_chats} chats: {held_out} held out leave nothing to train on"
        )
    return held_out


def _rejected(settings: DataSettings, work: Path, config: Any, progress: Progress) -> Rejected:
    longest, vocab_size = config.max_position_embeddings, config.vocab_size
    found = kept_rejections(settings.rejections, settings.length, longest, vocab_size, work)
    progress(found.sentence(), 0, 0)
    return found


def _with_rejections(data: Data, rejected: Rejected) -> Data:
    """They are never measured on: a report is of the same kind of chats with and without them."""
    return replace(
        data,
        train=[*data.train, *[Chat(text.ids, 1) for text in rejected.texts]],
        places=tuple(text.places for text in rejected.texts),
        description=f"{data.description}{BESIDES}{rejected.sentence()}",
    )


def _made_up(
    folder: Path,
    tokenizer: Any,
    settings: DataSettings,
    work: Path,
    device: str,
    progress: Progress,
) -> list[Chat]:
    """Piece after piece, each from a seed of its own: the same whether it was interrupted or not.

    A piece has whole rounds of the generator's, which takes temperatures in turns.
    """
    size = _MADE_AT_ONCE * len(self_chats.ANSWER_TEMPERATURES)
    num, target = settings.num_chats, None
    chats: list[Chat] = []
    for shard, start in enumerate(range(0, num, size)):
        path = work / _CHATS.format(shard)
        if not path.exists():
            if target is None:
                target = load_target(folder, torch.bfloat16, device)
            seed = settings.seed * _SEEDS_A_RUN + shard
            wanted, made = min(size, num - start), []
            progress("making up chats", start, num)
            batch = min(_MADE_AT_ONCE, max(1, wanted // len(self_chats.ANSWER_TEMPERATURES)))
            for chat in _generate(target, tokenizer, wanted, batch, settings.length, seed):
                made.append(chat)
                progress("making up chats", start + len(made), num)
            if not made:
                raise ConfigError(f"{folder} made up no chats: it ends every text at once")
            write_chats(made, path)
        chats += read_chats(path)
    return chats


def _generate(
    target: Any, tokenizer: Any, num: int, batch: int, length: int, seed: int
) -> Iterator[Chat]:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    make = self_chats.make_chats if has_template else make_texts
    yield from make(target, tokenizer, num, batch, length, seed)


# -------------------------------------------------------------------------------- hidden states


def prepare(
    target_folder: Path,
    chats: Sequence[Chat],
    work: Path,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> None:
    """Write the hidden states of all chats, a shard at a time; shards that exist are kept."""
    work.mkdir(parents=True, exist_ok=True)
    target = None
    for shard, start in enumerate(range(0, len(chats), _CHATS_A_SHARD)):
        path = work / _TEACHER.format(shard)
        if path.exists():
            continue
        if target is None:
            target = load_target(target_folder, torch.bfloat16, device)
            num_tokens = sum(len(chat.ids) for chat in chats[start:])
            _check_room(work, num_tokens * target.config.hidden_size * _BFLOAT16_BYTES)
            progress("reading the target's hidden states", start, len(chats))
        part = chats[start : start + _CHATS_A_SHARD]
        hidden = dict(hidden_states(target.model, part))
        save_whole({str(start + index): states for index, states in hidden.items()}, path)
        progress("reading the target's hidden states", start + len(part), len(chats))


@torch.inference_mode()
def hidden_states(trunk: Any, chats: Sequence[Chat]) -> Iterator[tuple[int, torch.Tensor]]:
    """(index, bfloat16 [length, hidden] on the CPU) of every chat, after the final norm."""
    order = sorted(range(len(chats)), key=lambda index: len(chats[index].ids))
    for batch in by_size(order, [len(chat.ids) for chat in chats], _TEACHER_ROWS):
        ids = padded([torch.tensor(chats[index].ids) for index in batch]).to(trunk.device)
        states = trunk(input_ids=ids, use_cache=False).last_hidden_state.bfloat16().cpu()
        for row, index in enumerate(batch):
            yield index, states[row, : len(chats[index].ids)].clone()


def _check_room(work: Path, needed: int) -> None:
    free = shutil.disk_usage(work).free
    if needed > free:
        raise ConfigError(
            f"{work} needs {needed >> 20} MiB for hidden states and has {free >> 20} MiB: "
            "take fewer chats or another --work folder"
        )


def load_examples(data: Data, work: Path, skip: int, num_heads: int = 0) -> list[Example]:
    """Those with a row to learn from, in the chats' order, whatever the files' order."""
    chats = data.train
    hidden: dict[int, torch.Tensor] = {}
    for shard in sorted(work.glob("teacher-*.safetensors")):
        hidden |= {int(index): states for index, states in load_whole(shard).items()}
    missing = [index for index in range(len(chats)) if index not in hidden]
    if missing:
        raise ConfigError(f"{work} lacks {len(missing)} of {len(chats)} chats: delete the folder")
    places = [()] * (len(chats) - len(data.places)) + [*data.places]
    examples = [
        Example(torch.tensor(chat.ids), hidden[index], places[index])
        for index, chat in enumerate(chats)
    ]
    return [example for example in examples if len(example.rows(skip, num_heads))]
