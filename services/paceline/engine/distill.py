"""Trains a small draft for a target from the target's own chats; made `assets/smollm2-draft`.

    python -m paceline.engine.distill prepare --target DIR --chats FILE --work DIR
    python -m paceline.engine.distill train   --target DIR --chats FILE --work DIR --minutes 60
    python -m paceline.engine.distill export  --target DIR --work DIR --out ASSET_DIR

`prepare` stores the target's last hidden states once, so training never runs the target. `train`
may be stopped and started at will: it goes on from its last checkpoint in the work folder. The
data order and the start depend on `--seed` alone; the number of steps depends on the clock.

What is trained is in `student`; measuring the result is `draft_report`'s.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from paceline.engine.draft_report import Chat, read_chats
from paceline.engine.packed import pack_int8
from paceline.engine.student import (
    FIT_CHATS,
    Example,
    Loss,
    Recipe,
    Student,
    choose_vocab,
    fit_head_map,
)
from paceline.errors import ConfigError
from paceline.models import sha256_of

logger = logging.getLogger(__name__)

_TEACHER = "teacher-{:04d}.safetensors"
_CHECKPOINT = "checkpoint.safetensors"
_PROGRESS = "progress.json"
_VOCAB = "vocab.safetensors"
_CHATS_A_SHARD = 64
_TEACHER_ROWS = 4096  # tokens of one pass of the target, padding included
_POOL = 96  # chats that are sorted by length together, against padding
_WARMUP_STEPS = 30
_CLIP_NORM = 1.0
_LOG_STEPS = 50


@dataclass(slots=True)
class Progress:
    """What a resumed run must know; `seconds` counts training only."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


# --------------------------------------------------------------------------- the target's part


@torch.inference_mode()
def prepare(target: Any, chats: Sequence[Chat], work: Path) -> None:
    """Write the hidden states of all chats, a shard at a time; shards that exist are kept."""
    work.mkdir(parents=True, exist_ok=True)
    for shard, start in enumerate(range(0, len(chats), _CHATS_A_SHARD)):
        path = work / _TEACHER.format(shard)
        if path.exists():
            continue
        part = chats[start : start + _CHATS_A_SHARD]
        hidden = dict(_hidden_states(target.model, part))
        _save_whole({str(start + index): states for index, states in hidden.items()}, path)
        logger.info("%d of %d chats", start + len(part), len(chats))


def _hidden_states(trunk: Any, chats: Sequence[Chat]) -> Iterator[tuple[int, torch.Tensor]]:
    order = sorted(range(len(chats)), key=lambda index: len(chats[index].ids))
    for batch in _by_size(order, [len(chat.ids) for chat in chats], _TEACHER_ROWS):
        ids = _padded([torch.tensor(chats[index].ids) for index in batch])
        states = trunk(input_ids=ids, use_cache=False).last_hidden_state
        for row, index in enumerate(batch):
            yield index, states[row, : len(chats[index].ids)].bfloat16().clone()


def load_examples(chats: Sequence[Chat], work: Path) -> list[Example]:
    examples: list[Example] = []
    for shard in sorted(work.glob("teacher-*.safetensors")):
        for index, hidden in load_file(shard).items():
            if int(index) < len(chats):
                examples.append(Example(torch.tensor(chats[int(index)].ids), hidden))
    if len(examples) < len(chats):
        raise ConfigError(f"{work} has {len(examples)} of {len(chats)} chats: run `prepare` first")
    return examples


# --------------------------------------------------------------------------------------- training


class Trainer:
    """AdamW with warm-up and a linear end; keeps an average of the weights, which is the draft."""

    def __init__(self, student: Student, loss: Loss, recipe: Recipe, work: Path) -> None:
        self._student, self._loss, self._recipe, self._work = student, loss, recipe, work
        self.params = student.trained()
        self.average = {name: p.detach().clone() for name, p in self.params.items()}
        self.progress = Progress()
        matrices = [p for n, p in self.params.items() if p.dim() == 2 and "head_map" not in n]
        vectors = [p for p in self.params.values() if p.dim() == 1]
        rate, decay = recipe.rate, recipe.weight_decay
        groups: list[dict[str, Any]] = [
            {"params": matrices, "full_rate": rate, "weight_decay": decay},
            {"params": vectors, "full_rate": rate, "weight_decay": 0.0},
            {
                "params": [student.head_map.weight],
                "full_rate": recipe.map_rate,
                "weight_decay": 0.0,
            },
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)

    def step(self, batch: Sequence[Example], done: float) -> float:
        """One update; returns the KL. `done` is the share of the run in [0, 1]."""
        ids = _padded([example.ids for example in batch])
        guess = self._student(ids)
        kept = [row[self._recipe.skip : len(e.ids)] for row, e in zip(guess, batch, strict=True)]
        hidden = torch.cat([example.hidden[self._recipe.skip :] for example in batch])
        loss, divergence = self._loss(torch.cat(kept), hidden, done)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.params.values()), _CLIP_NORM)
        self.progress.steps += 1
        self.progress.tokens += len(hidden)
        warmup = min(1.0, self.progress.steps / _WARMUP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = group["full_rate"] * warmup * max(self._falling(done), 0.02)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        keep = min(self._recipe.average, self.progress.steps / (self.progress.steps + 10))
        averages, params = list(self.average.values()), list(self.params.values())
        torch._foreach_lerp_(averages, [p.detach() for p in params], 1.0 - keep)
        return divergence

    def _falling(self, done: float) -> float:
        return min(1.0, (1.0 - done) / self._recipe.decay_share)

    def save(self) -> None:
        tensors = {f"param|{name}": p.detach() for name, p in self.params.items()}
        tensors |= {f"average|{name}": tensor for name, tensor in self.average.items()}
        for name, p in self.params.items():
            for key, value in self._optimizer.state.get(p, {}).items():
                tensors[f"{key}|{name}"] = value
        _save_whole(tensors, self._work / _CHECKPOINT)
        (self._work / _PROGRESS).write_text(json.dumps(asdict(self.progress)) + "\n")

    @torch.no_grad()
    def resume(self) -> bool:
        if not (self._work / _CHECKPOINT).exists():
            return False
        self.progress = Progress(**json.loads((self._work / _PROGRESS).read_text()))
        saved = load_file(self._work / _CHECKPOINT)
        for name, p in self.params.items():
            p.copy_(saved[f"param|{name}"])
            self.average[name].copy_(saved[f"average|{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            self._optimizer.state[p] = {key: saved[f"{key}|{name}"].clone() for key in keys}
        return True


def train(target: Any, chats: Sequence[Chat], work: Path, recipe: Recipe, seconds: float) -> None:
    """Train until `seconds` of training are spent, those of earlier calls included."""
    torch.manual_seed(recipe.seed)
    examples = load_examples(chats, work)
    head = target.get_output_embeddings().weight.detach()
    vocab = _vocab(head, examples, recipe, work)
    student = Student(target, recipe.layers)
    trainer = Trainer(student, Loss(head[vocab], recipe), recipe, work)
    if not trainer.resume():
        fit_head_map(student, examples[:FIT_CHATS], recipe.skip)
    (work / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n")
    progress, divergences = trainer.progress, []
    before = progress.seconds
    began = time.monotonic()
    for batch in batches(examples, recipe, skip=progress.steps):
        divergences.append(trainer.step(batch, min(1.0, progress.seconds / seconds)))
        progress.seconds = before + time.monotonic() - began
        if progress.steps % _LOG_STEPS == 0 or progress.seconds >= seconds:
            trainer.save()
            mean, divergences = sum(divergences) / len(divergences), []
            logger.info("%s KL %.3f", progress, mean)
        if progress.seconds >= seconds:
            return


def _vocab(
    head: torch.Tensor, examples: Sequence[Example], recipe: Recipe, work: Path
) -> torch.Tensor:
    """Chosen once a work folder."""
    if not (work / _VOCAB).exists():
        vocab = choose_vocab(head, examples, recipe)
        _save_whole({"draft_vocab": vocab.int()}, work / _VOCAB)
    return load_file(work / _VOCAB)["draft_vocab"].long()


def batches(examples: Sequence[Example], recipe: Recipe, skip: int) -> Iterator[list[Example]]:
    """Endless; the same for the same seed. `skip` batches are left out: a resumed run's past."""
    rng = random.Random(recipe.seed)
    sizes = [len(example.ids) for example in examples]
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        for start in range(0, len(order), _POOL):
            pool = sorted(order[start : start + _POOL], key=lambda index: sizes[index])
            found = list(_by_size(pool, sizes, recipe.batch_tokens))
            for batch in rng.sample(found, len(found)):
                skip -= 1
                if skip < 0:
                    yield [examples[index] for index in batch]


def _by_size(order: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Neighbors of `order` (ascending sizes) together, at most `limit` tokens with padding."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * sizes[index] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Right padding: with causal attention it changes no position that counts."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _save_whole(tensors: dict[str, torch.Tensor], path: Path) -> None:
    staged = path.with_suffix(".tmp")
    save_file(tensors, staged)
    os.replace(staged, path)


# ----------------------------------------------------------------------------------------- asset


def export(work: Path, out: Path, target_name: str) -> None:
    """The averaged weights as an asset that `convert.compose_draft` reads."""
    recipe = json.loads((work / "recipe.json").read_text())
    prefix = "average|"
    saved = load_file(work / _CHECKPOINT)
    average = {n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)}
    tensors = {"head_map": average.pop("head_map.weight")}
    tensors |= {"model." + n.removeprefix("trunk."): t for n, t in average.items()}
    tensors = pack_int8(tensors)
    out.mkdir(parents=True, exist_ok=True)
    tensors |= load_file(work / _VOCAB)
    save_file(tensors, out / "layers.safetensors", metadata={"format": "pt"})
    (out / "layers.safetensors").chmod(0o644)  # safetensors keeps files to their owner
    description = {
        "target": target_name,
        "weights_sha256": sha256_of(out / "layers.safetensors"),
        "num_hidden_layers": len(recipe["layers"]),
        "recipe": recipe,
        "progress": json.loads((work / _PROGRESS).read_text()),
    }
    (out / "draft.json").write_text(json.dumps(description, indent=2) + "\n")


def load_target(folder: Path, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()
    target = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True
    )
    if target.config.model_type != "llama":
        raise ConfigError(f"{folder} is a {target.config.model_type}, only llama can be distilled")
    return target.eval()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distill a small draft from a target.")
    parser.add_argument("what", choices=("prepare", "train", "export"))
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--work", type=Path, required=True, help="hidden states and checkpoints")
    parser.add_argument("--chats", type=Path, help="JSON lines: ids, prompt_len")
    parser.add_argument("--out", type=Path, help="where `export` writes the asset")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training, in all")
    parser.add_argument("--threads", type=int, default=1)
    default = Recipe(layers=(0, 1, 2, 3))
    parser.add_argument("--layers", type=int, nargs="+", default=default.layers)
    for name, value in asdict(default).items():
        if name != "layers":
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    return parser.parse_args()


def main() -> None:
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    if options.what == "export":
        export(options.work, options.out, options.target.name)
        return
    values = {name: getattr(options, name) for name in Recipe.__dataclass_fields__}
    recipe = Recipe(**values | {"layers": tuple(options.layers)})
    chats = read_chats(options.chats)
    chats = chats[: len(chats) - recipe.held_out]
    if options.what == "prepare":
        prepare(load_target(options.target, torch.bfloat16), chats, options.work)
    else:
        target = load_target(options.target, torch.float32)
        train(target, chats, options.work, recipe, 60.0 * options.minutes)


if __name__ == "__main__":
    main()
