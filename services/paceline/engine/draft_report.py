"""How good is a draft for a target: the figures of a draft's model card, by one command.

    python -m paceline.engine.draft_report --target DIR --draft DIR --chats FILE --last 64

Both models read the same held-out chats (teacher forcing); only the answers' tokens count.
Agreement is the acceptance of greedy requests, `coupled_acceptance` that of sampled ones. The
cost ratio is one draft step over one target step, one row each, timed in turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config import ModelConfig
from paceline.engine.base import StepItem
from paceline.engine.draft_head import cut_head
from paceline.engine.torch_loader import load_torch_engine
from paceline.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

TEMPERATURES = (0.7, 1.0)
_CHUNK_ROWS = 128
_DRAFT_TOP_N = 64  # what a draft replica uses
_TIMED_PROMPT = 64
_TIMED_STEPS = 40


@dataclass(frozen=True, slots=True)
class Chat:
    """Token ids of a conversation; the answer starts at `prompt_len`."""

    ids: tuple[int, ...]
    prompt_len: int


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


def read_chats(path: Path) -> list[Chat]:
    """One JSON object a line: `ids` and `prompt_len`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [Chat(tuple(row["ids"]), row["prompt_len"]) for row in rows]


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


def load_dense(folder: Path) -> Any:
    """A plain transformers model in float32, with the draft's cut output layer if it has one."""
    from transformers import AutoModelForCausalLM

    hf_model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    cut_head(hf_model, folder)
    return hf_model.eval()


@torch.inference_mode()
def measure_acceptance(target: Any, draft: Any, chats: Sequence[Chat]) -> Acceptance:
    """Row `prompt_len - 1` predicts the answer's first token."""
    meter = AcceptanceMeter()
    for number, chat in enumerate(chats, 1):
        ids = torch.tensor([chat.ids])
        rows = torch.arange(chat.prompt_len - 1, len(chat.ids) - 1)
        logits = [
            model(ids, use_cache=False, logits_to_keep=rows).logits[0].float()
            for model in (target, draft)
        ]
        meter.add(*logits)
        logger.info("chat %d of %d: %s", number, len(chats), meter.result())
    return meter.result()


def measure_cost(target_folder: Path, draft_folder: Path) -> StepCost:
    """Decode steps with one row through our own engine, target and draft in turns."""
    times = zip(_step_times(target_folder), _step_times(draft_folder, _DRAFT_TOP_N), strict=True)
    pairs = list(times)[1:]  # the first step of each pays for warming up
    return StepCost(
        target_ms=1e3 * statistics.median(target for target, _ in pairs),
        draft_ms=1e3 * statistics.median(draft for _, draft in pairs),
        ratio=statistics.median(draft / target for target, draft in pairs),
    )


def _step_times(folder: Path, draft_top_n: int | None = None) -> Iterator[float]:
    """Seconds of one decode step after the other; nothing runs between two `next` calls."""
    config = ModelConfig(source=str(folder), max_model_len=256, num_kv_blocks=32, device="cpu")
    engine = load_torch_engine(config, folder, draft_top_n=draft_top_n)
    engine.add(1)
    sampling = SamplingParams(temperature=1.0, seed=1)
    engine.step([StepItem(1, 0, (1,) * _TIMED_PROMPT, 0, sampling)])
    for step in range(_TIMED_STEPS):
        item = StepItem(1, _TIMED_PROMPT + step, (1,), 1, sampling, step)
        began = time.perf_counter()
        engine.step([item])
        yield time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance and cost of a draft for a target.")
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--draft", type=Path, required=True, help="model folder")
    parser.add_argument("--chats", type=Path, required=True, help="JSON lines: ids, prompt_len")
    parser.add_argument("--last", type=int, default=64, help="how many chats, from the end")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    chats = read_chats(options.chats)[-options.last :]
    cost = measure_cost(options.target, options.draft)
    logger.info("%s", cost)
    target, draft = load_dense(options.target), load_dense(options.draft)
    acceptance = measure_acceptance(target, draft, chats)
    text = json.dumps({"acceptance": asdict(acceptance), "cost": asdict(cost)}, indent=2)
    logger.info("%s", text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
