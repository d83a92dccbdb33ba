"""The report of a draft or of Medusa heads: measured on chats, with the card that shows it.

Knows nothing of how they were trained.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.engine.chat_files import Chat, check_chats, read_chats
from paceline.engine.distill_data import load_tokenizer, use_device
from paceline.engine.distill_folders import CARD, REPORT
from paceline.engine.draft_card import acceptances, card, speedup
from paceline.engine.draft_report import load_dense, measure_acceptance, measure_cost
from paceline.engine.medusa_folder import read_medusa
from paceline.engine.medusa_training import measure_heads
from paceline.engine.plain_texts import greedy_answers
from paceline.errors import ConfigError
from paceline.models import Progress, no_progress, tokenizer_hash

_GREEDY_TOKENS = 128  # of an answer, when heads are measured
_GREEDY_BATCH = 16


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """What `--report-only` does. One of `draft` and `heads`; the last `last` chats of the file."""

    target: Path
    name: str
    chats: Path
    last: int
    draft: Path | None = None
    heads: Path | None = None
    device: str = "cpu"
    num_threads: int = 1
    command: str = ""


def measure(job: MeasureJob, progress: Progress = no_progress) -> dict[str, Any]:
    """The report, without how the draft was made."""
    use_device(job.device, job.num_threads)
    chats = read_chats(job.chats)[-job.last :]
    what = job.draft or job.heads
    if what is None:
        raise ConfigError("name a draft or Medusa heads to measure")
    report = report_heads if job.heads else report_draft
    figures = report(job.target, what, chats, job.device, job.num_threads, progress)
    names = {"name": what.resolve().name, "target": job.name, "measure_command": job.command}
    return {**figures, **names}


def report_draft(
    target: Path,
    draft: Path,
    chats: Sequence[Chat],
    device: str,
    num_threads: int,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Acceptance, cost and the speed-up that they promise."""
    if tokenizer_hash(target) != tokenizer_hash(draft):
        raise ConfigError(f"{draft} has another tokenizer than {target}")
    progress("timing a step of each", 0, 0)
    cost = measure_cost(target, draft, device, num_threads)
    torch.set_num_threads(num_threads)
    models = load_dense(target, device), load_dense(draft, device)
    widths = {model.config.vocab_size for model in models}
    if len(widths) > 1:
        raise ConfigError(f"{draft} has an output layer of another width than {target}")
    _check(chats, models[0].config)
    found = json.loads(json.dumps(asdict(measure_acceptance(*models, chats, progress))))
    each = acceptances(found).items()
    return {
        "kind": "draft",
        "num_chats": len(chats),
        "acceptance": found,
        "cost": asdict(cost),
        "speedup": {key: asdict(speedup(value, cost.ratio)) for key, value in each},
        "machine": machine(device, num_threads),
    }


def report_heads(
    target: Path,
    heads: Path,
    chats: Sequence[Chat],
    device: str,
    num_threads: int,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Accuracy at T = 0, on answers that the target gives to the chats' prompts; acceptance."""
    model = load_dense(target, device)
    width, size = model.get_output_embeddings().weight.shape
    tensors = read_medusa(heads, size, width)
    _check(chats, model.config)
    progress("asking the target at T = 0", 0, 0)
    greedy = _greedy(model, load_tokenizer(target), chats, len(tensors.heads))
    progress("measuring the heads", 0, 0)
    found = measure_heads(model, tensors, greedy, chats)
    figures = json.loads(json.dumps(asdict(found)))
    about = {"num_chats": len(greedy), "machine": machine(device, num_threads)}
    return {"kind": "medusa", **figures, **about}


def _check(chats: Sequence[Chat], config: Any) -> None:
    check_chats(chats, "the chats", config.vocab_size, config.max_position_embeddings)


def _greedy(target: Any, tokenizer: Any, chats: Sequence[Chat], num_heads: int) -> list[Chat]:
    """Of a text without a prompt, its first half is the prompt."""
    prompts = [list(c.ids[: c.prompt_len if c.prompt_len > 1 else len(c.ids) // 2]) for c in chats]
    longest = max(len(prompt) for prompt in prompts)
    limit = min(_GREEDY_TOKENS, target.config.max_position_embeddings - longest)
    answers: list[list[int]] = []
    if limit > 0:
        answers = greedy_answers(target, tokenizer, prompts, _GREEDY_BATCH, limit)
    pairs = zip(prompts, answers, strict=False)
    found = [Chat((*p, *a), len(p)) for p, a in pairs if len(a) > num_heads]
    if not found:
        raise ConfigError(f"the target answers none of the chats with more than {num_heads} tokens")
    return found


def machine(device: str, num_threads: int) -> str:
    """One line for cards."""
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    return f"{device}, {threads} of {platform.machine()}, torch {torch.__version__}"


def write_report(report: dict[str, Any], folder: Path) -> None:
    """report.json, and the card."""
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / CARD).write_text(card(report), encoding="utf-8")
