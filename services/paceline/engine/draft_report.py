"""How good is a draft for a target: acceptance on held-out chats, the cost of a step.

Both models read the same held-out chats (teacher forcing); only the answers' tokens count.
Agreement is the acceptance of greedy requests, `coupled` that of sampled ones. The cost ratio is
one draft step over one target step, one row each, timed in turns.

What the figures promise and how they are shown is `draft_card`'s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from paceline.config import ModelConfig
from paceline.engine.base import StepItem
from paceline.engine.chat_files import Chat
from paceline.engine.draft_head import cut_head
from paceline.engine.torch_loader import load_torch_engine
from paceline.errors import ConfigError
from paceline.models import Progress, no_progress
from paceline.sampling.params import SamplingParams

TEMPERATURES = (0.7, 1.0)
_CHUNK_ROWS = 128
_DRAFT_TOP_N = 64  # what a draft replica uses
_TIMED_LEN = 128
_TIMED_PROMPT = 64
_TIMED_STEPS = 40


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Means over `num_tokens` answer tokens; `coupled` and `optimal` by temperature."""

    num_tokens: int
    agreement: float
    coupled: dict[float, float]
    optimal: dict[float, float]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Median milliseconds of a step with one row, and the median of the pairs' ratios."""

    target_ms: float
    draft_ms: float
    ratio: float


def coupled_acceptance(log_target: torch.Tensor, log_draft: torch.Tensor) -> torch.Tensor:
    """Chance that both laws pick the same token under the same Gumbel noise, one per row.

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i). With ids sorted by p / q, falling, the inner sum is
    P(up to i) / p_i + Q(after i) / q_i, so a row costs one sort. The draft's law sums to one over
    the columns given; the target's may not: its mass elsewhere counts as p / q = infinity.
    """
    order = (log_target - log_draft).argsort(dim=-1, descending=True)
    target = log_target.exp().double().gather(-1, order)
    draft = log_draft.exp().double().gather(-1, order)
    elsewhere = (1.0 - target.sum(dim=-1, keepdim=True)).clamp(min=0.0)
    up_to = elsewhere + target.cumsum(dim=-1)
    after = (1.0 - draft.cumsum(dim=-1)).clamp(min=0.0)
    tiny = torch.finfo(torch.float64).tiny
    return (1.0 / (up_to / target.clamp(min=tiny) + after / draft.clamp(min=tiny))).sum(dim=-1)


class AcceptanceMeter:
    """Adds up rows of target and draft logits; -inf draft logits are tokens it cannot propose."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._agreed = 0
        self._coupled = dict.fromkeys(TEMPERATURES, 0.0)
        self._optimal = dict.fromkeys(TEMPERATURES, 0.0)

    def add(self, target: torch.Tensor, draft: torch.Tensor) -> None:
        """float32 logits [rows, vocab_size] of the same positions."""
        for start in range(0, len(target), _CHUNK_ROWS):
            self._add_chunk(target[start : start + _CHUNK_ROWS], draft[start : start + _CHUNK_ROWS])

    def _add_chunk(self, target: torch.Tensor, draft: torch.Tensor) -> None:
        self._num_tokens += len(target)
        self._agreed += int((target.argmax(dim=-1) == draft.argmax(dim=-1)).sum())
        columns = draft[0].isfinite().nonzero()[:, 0]
        for temperature in TEMPERATURES:
            log_target = (target / temperature).log_softmax(dim=-1)[:, columns]
            log_draft = (draft[:, columns] / temperature).log_softmax(dim=-1)
            coupled = coupled_acceptance(log_target, log_draft)
            self._coupled[temperature] += float(coupled.sum())
            overlap = torch.minimum(log_target, log_draft).exp()
            self._optimal[temperature] += float(overlap.sum())

    def result(self) -> Acceptance:
        num = max(self._num_tokens, 1)
        coupled = {key: total / num for key, total in self._coupled.items()}
        optimal = {key: total / num for key, total in self._optimal.items()}
        return Acceptance(self._num_tokens, self._agreed / num, coupled, optimal)


def load_dense(folder: Path, device: str = "cpu") -> Any:
    """A plain transformers model in float32, with the draft's cut output layer if it has one."""
    transformers_logging.disable_progress_bar()
    try:
        hf_model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load {folder}: {error}") from error
    cut_head(hf_model, folder)
    return hf_model.to(device).eval()


@torch.inference_mode()
def measure_acceptance(
    target: Any, draft: Any, chats: Sequence[Chat], progress: Progress = no_progress
) -> Acceptance:
    """Row `prompt_len - 1` predicts the answer's first token."""
    meter = AcceptanceMeter()
    for number, chat in enumerate(chats, 1):
        ids = torch.tensor([chat.ids], device=target.device)
        rows = torch.arange(chat.prompt_len - 1, len(chat.ids) - 1, device=target.device)
        logits = [
            model(ids, use_cache=False, logits_to_keep=rows).logits[0].float()
            for model in (target, draft)
        ]
        meter.add(*logits)
        progress("measuring acceptance", number, len(chats))
    return meter.result()


def measure_cost(
    target_folder: Path, draft_folder: Path, device: str = "cpu", num_threads: int = 1
) -> StepCost:
    """Decode steps with one row through our own engine, target and draft in turns."""
    steps = partial(_step_times, device=device, num_threads=num_threads)
    times = zip(steps(target_folder), steps(draft_folder, draft_top_n=_DRAFT_TOP_N), strict=True)
    pairs = list(times)[1:]  # the first step of each pays for warming up
    return StepCost(
        target_ms=1e3 * statistics.median(target for target, _ in pairs),
        draft_ms=1e3 * statistics.median(draft for _, draft in pairs),
        ratio=statistics.median(draft / target for target, draft in pairs),
    )


def _step_times(
    folder: Path, *, device: str, num_threads: int, draft_top_n: int | None = None
) -> Iterator[float]:
    """Seconds of one decode step after the other; nothing runs between two `next` calls."""
    config = ModelConfig(
        source=str(folder),
        max_model_len=_TIMED_LEN,
        num_kv_blocks=32,
        device=device,
        num_threads=num_threads,
    )
    engine = load_torch_engine(config, folder, draft_top_n=draft_top_n)
    engine.add(1)
    sampling = SamplingParams(temperature=1.0, seed=1)
    engine.step([StepItem(1, 0, (1,) * _TIMED_PROMPT, 0, sampling)])
    for step in range(_TIMED_STEPS):
        item = StepItem(1, _TIMED_PROMPT + step, (1,), 1, sampling, step)
        began = time.perf_counter()
        engine.step([item])
        yield time.perf_counter() - began
