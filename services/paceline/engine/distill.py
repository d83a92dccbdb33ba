"""Trains a small draft, or Medusa heads, on a target's stored last hidden states.

What is trained is an `Objective` (`DraftObjective` here, `medusa_training`'s heads). Training
never runs the target. It may be stopped at any step and goes on from its last checkpoint: the
order of the data depends on the recipe's seed alone and all state of the optimizer is kept, so
that a run with a number of steps ends in the same bytes however often it was stopped (on one
machine, with the same number of threads).

Where the hidden states come from is `distill_data`'s; from a folder of them to a draft with its
card is `distill_run`'s.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from paceline.engine.convert import DRAFT_LAYERS
from paceline.engine.packed import pack_int8
from paceline.engine.student import Example, Loss, Recipe, Student
from paceline.errors import ConfigError
from paceline.models import ASSET_DESCRIPTION, sha256_of

CHECKPOINT = "checkpoint.safetensors"
_POOL = 96  # chats that are sorted by length together, against padding
_WARMUP_STEPS = 30
_CLIP_NORM = 1.0
_CHECKPOINT_S = 60.0
_OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    """What a resumed run must know; `seconds` counts training only."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """How much to train in all, earlier calls included: so many steps, else so many seconds.

    With seconds the number of steps, and so the result, depends on the machine's clock.
    """

    steps: int = 0
    seconds: float = 0.0

    def share(self, progress: Progress) -> float:
        """How much of it is spent, in [0, 1]."""
        spent = progress.steps / self.steps if self.steps else progress.seconds / self.seconds
        return min(1.0, spent)


@dataclass(frozen=True, slots=True)
class StepReport:
    """After a step: `divergence` is the KL to the target's law, in nats, of its batch."""

    progress: Progress
    divergence: float
    tokens_per_s: float
    share: float

    @property
    def remaining_s(self) -> float:
        """Seconds to go, when all steps take as long as those so far."""
        return self.progress.seconds * (1.0 - self.share) / max(self.share, 1e-9)


def no_report(report: StepReport) -> None:
    """Shows nothing."""


class Objective(Protocol):
    """What is trained. Parameters with `map` in their name learn at the recipe's `map_rate`."""

    def trained(self) -> dict[str, torch.nn.Parameter]: ...

    def loss(self, batch: Sequence[Example], done: float) -> tuple[torch.Tensor, float, int]:
        """The loss, the mean KL in nats, and how many rows they are over."""


class DraftObjective:
    """A student against the target's hidden states."""

    def __init__(self, student: Student, loss: Loss, recipe: Recipe) -> None:
        self.student, self._loss, self._skip = student, loss, recipe.skip

    def trained(self) -> dict[str, torch.nn.Parameter]:
        return self.student.trained()

    def loss(self, batch: Sequence[Example], done: float) -> tuple[torch.Tensor, float, int]:
        device = self.student.head_map.weight.device
        guess = self.student(padded([example.ids for example in batch]).to(device))
        rows = [example.rows(self._skip) for example in batch]
        kept = [g[at.to(device)] for g, at in zip(guess, rows, strict=True)]
        hidden = torch.cat([e.hidden[at] for e, at in zip(batch, rows, strict=True)]).to(device)
        return *self._loss(torch.cat(kept), hidden, done), len(hidden)


class Trainer:
    """AdamW with warm-up and a linear end; keeps an average of the weights, which is the result."""

    def __init__(self, objective: Objective, recipe: Recipe, work: Path) -> None:
        self._objective, self._recipe, self._work = objective, recipe, work
        self.params = objective.trained()
        self.average = {name: p.detach().clone() for name, p in self.params.items()}
        self.progress = Progress()
        maps = [p for n, p in self.params.items() if "map" in n]
        matrices = [p for n, p in self.params.items() if p.dim() == 2 and "map" not in n]
        vectors = [p for p in self.params.values() if p.dim() == 1]
        rate, decay = recipe.rate, recipe.weight_decay
        groups: list[dict[str, Any]] = [
            {"params": matrices, "full_rate": rate, "weight_decay": decay},
            {"params": vectors, "full_rate": rate, "weight_decay": 0.0},
            {"params": maps, "full_rate": recipe.map_rate, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)

    def step(self, batch: Sequence[Example], done: float) -> float:
        """One update; returns the KL. `done` is the share of the run in [0, 1]."""
        loss, divergence, num_rows = self._objective.loss(batch, done)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.params.values()), _CLIP_NORM)
        self.progress.steps += 1
        self.progress.tokens += num_rows
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
        """One file, so that weights and progress are always of the same step."""
        tensors = {f"param|{name}": p.detach() for name, p in self.params.items()}
        tensors |= {f"average|{name}": tensor for name, tensor in self.average.items()}
        for name, p in self.params.items():
            for key, value in self._optimizer.state.get(p, {}).items():
                tensors[f"{key}|{name}"] = value
        progress = json.dumps(asdict(self.progress))
        save_whole(tensors, self._work / CHECKPOINT, {"progress": progress})

    @torch.no_grad()
    def resume(self) -> bool:
        """Whether there was a checkpoint to go on from; `ConfigError` if it does not fit."""
        path = self._work / CHECKPOINT
        if not path.exists():
            return False
        saved = load_whole(path)
        try:
            for name, p in self.params.items():
                p.copy_(saved[f"param|{name}"])
                self.average[name].copy_(saved[f"average|{name}"])
                state = {key: saved[f"{key}|{name}"].to(p.device) for key in _OPTIMIZER_KEYS}
                self._optimizer.state[p] = state
        except (KeyError, RuntimeError) as error:
            raise ConfigError(f"{path} is of another draft: delete the work folder") from error
        self.progress = read_progress(self._work)
        return True


def read_progress(work: Path) -> Progress:
    """That of the checkpoint in the folder."""
    path = work / CHECKPOINT
    try:
        with safe_open(path, framework="pt") as file:
            return Progress(**json.loads((file.metadata() or {})["progress"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: delete it to train anew") from error


def read_average(work: Path) -> dict[str, torch.Tensor]:
    """The averaged weights of the checkpoint, by parameter name."""
    prefix = "average|"
    saved = load_whole(work / CHECKPOINT)
    return {n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)}


def train(
    trainer: Trainer,
    examples: Sequence[Example],
    recipe: Recipe,
    budget: Budget,
    report: Callable[[StepReport], None] = no_report,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train until the budget is spent, then True; False when told to stop before. Saves both."""
    progress, before, tokens = trainer.progress, trainer.progress.seconds, trainer.progress.tokens
    began = saved = time.monotonic()
    stream = batches(examples, recipe, skip=progress.steps)
    while (share := budget.share(progress)) < 1.0:
        if should_stop():
            trainer.save()
            return False
        divergence = trainer.step(next(stream), share)
        if not math.isfinite(divergence):
            raise ConfigError(f"training went astray at step {progress.steps}: KL {divergence}")
        now = time.monotonic()
        progress.seconds = before + now - began
        rate = (progress.tokens - tokens) / max(now - began, 1e-9)
        report(StepReport(progress, divergence, rate, budget.share(progress)))
        if now - saved > _CHECKPOINT_S:
            trainer.save()
            saved = time.monotonic()
    trainer.save()
    return True


def batches(examples: Sequence[Example], recipe: Recipe, skip: int) -> Iterator[list[Example]]:
    """Endless; the same for the same seed. `skip` batches are left out: a resumed run's past."""
    rng = random.Random(recipe.seed)
    sizes = [len(example.ids) for example in examples]
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        for start in range(0, len(order), _POOL):
            pool = sorted(order[start : start + _POOL], key=lambda index: sizes[index])
            found = list(by_size(pool, sizes, recipe.batch_tokens))
            for batch in rng.sample(found, len(found)):
                skip -= 1
                if skip < 0:
                    yield [examples[index] for index in batch]


def by_size(order: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Neighbors of `order` (ascending sizes) together, at most `limit` tokens with padding."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * sizes[index] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Zeros behind the shorter ones: causal attention never sees them."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def save_whole(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """All or nothing: a process that dies leaves the file as it was."""
    staged = path.with_suffix(".new")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, staged, metadata={"format": "pt"} | (metadata or {}))
    staged.chmod(0o644)  # safetensors keeps files to their owner
    staged.rename(path)


def load_whole(path: Path, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """What `save_whole` wrote, with the tensors of these names at least."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({error}): delete it, it is made again") from error
    for name in names:
        if name not in tensors:
            raise ConfigError(f"{path} is damaged (no {name}): delete it, it is made again")
    return tensors


def draft_tensors(work: Path, vocab: torch.Tensor, num_rows: int) -> dict[str, torch.Tensor]:
    """The averaged weights by the names that `convert.compose_draft` reads.

    `vocab`: ascending ids; named in the result only when they are fewer than `num_rows`.
    """
    average = read_average(work)
    maps = {n: average.pop(f"{n}.weight", None) for n in ("head_map", "embed_map")}
    tensors = {"model." + n.removeprefix("trunk."): t for n, t in average.items()}
    tensors |= {name: tensor for name, tensor in maps.items() if tensor is not None}
    if len(vocab) < num_rows:
        tensors["draft_vocab"] = vocab.int()
    return tensors


def write_asset(tensors: dict[str, torch.Tensor], description: dict[str, Any], out: Path) -> None:
    """The small form of a draft: matrices as int8, without the target's embeddings."""
    packed = pack_int8({n: t for n, t in tensors.items() if n != "draft_vocab"})
    packed |= {n: t for n, t in tensors.items() if n == "draft_vocab"}
    out.mkdir(parents=True, exist_ok=True)
    save_whole(packed, out / DRAFT_LAYERS)
    description = {**description, "weights_sha256": sha256_of(out / DRAFT_LAYERS)}
    (out / ASSET_DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", "utf-8")
