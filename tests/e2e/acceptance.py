"""What the draft's copies of the sampling filters are worth, on the demo's pair.

    python -m tests.e2e.acceptance

The closed form of coupled acceptance (math.md 2e.3), A(p, q) = sum over i of 1 / sum over j of
max(p_j / p_i, q_j / q_i), averaged over the positions of texts that the target wrote: the same
contexts for every setting, and no noise of sampling in the figure. "target only" is a draft that
does not filter.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import torch

from paceline.config import SpeculationConfig
from paceline.engine.base import StepItem
from paceline.engine.logit_filters import filter_row
from paceline.generation import GenerateRequest
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback
from tests.e2e import real

SETTINGS: dict[str, dict[str, float]] = {
    "top_p 1": {},
    "top_p .9": {"top_p": 0.9},
    "top_k 40": {"top_k": 40},
    "min_p .05": {"min_p": 0.05},
}
NUM_SEEDS, MAX_TOKENS = 6, 48


def law(row: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Probabilities float64 [vocab] after temperature and filters."""
    return torch.softmax(filter_row(row.float(), sampling).double() / sampling.temperature, -1)


def acceptance(target: torch.Tensor, draft: torch.Tensor) -> float:
    """A(p, q) in O(V log V): ids by falling p / q, where each maximum is p's before, q's after."""
    is_live = (target > 0) | (draft > 0)
    p, q = target[is_live], draft[is_live]
    ratio = torch.where(q > 0, p / q.clamp_min(1e-300), torch.inf)
    order = ratio.argsort(descending=True, stable=True)
    p, q = p[order], q[order]
    both = (p > 0) & (q > 0)
    rest = (1.0 - q.cumsum(0)).clamp_min(0.0)
    sums = p.cumsum(0)[both] / p[both] + rest[both] / q[both]
    return float((1.0 / sums).sum())


def measure(pair: real.Pair, temperature: float) -> dict[tuple[str, str], float]:
    plain = SamplingParams(temperature=temperature)
    requests = [
        GenerateRequest(
            f"{index}-{seed}", prompt, MAX_TOKENS, SamplingParams(temperature, seed=seed)
        )
        for index, prompt in enumerate(pair.prompts)
        for seed in range(NUM_SEEDS)
    ]
    runs = Loopback(pair.target, None, SpeculationConfig()).run(requests)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sequence_id, (request, run) in enumerate(zip(requests, runs, strict=True), start=1 << 20):
        text = (*request.prompt_token_ids, *run.token_ids[:-1])
        item = StepItem(sequence_id, 0, text, len(run.token_ids), plain)
        rows = []
        for engine in (pair.target, pair.draft):
            engine.add(sequence_id)
            rows.append(engine.logits([item]))  # type: ignore[attr-defined]
            engine.free(sequence_id)
        for target_row, draft_row in zip(*rows, strict=True):
            for name, changes in SETTINGS.items():
                sampling = SamplingParams(temperature, **changes)  # type: ignore[arg-type]
                truth = law(target_row, sampling)
                found[name, "both"].append(acceptance(truth, law(draft_row, sampling)))
                found[name, "target only"].append(acceptance(truth, law(draft_row, plain)))
    return {key: sum(values) / len(values) for key, values in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    pair = real.load_pair()
    for temperature in (0.8, 1.0):
        rates = measure(pair, temperature)
        base = rates["top_p 1", "both"]
        for (name, kind), rate in rates.items():
            sys.stdout.write(
                f"T={temperature} {name}, {kind}: {rate:.4f}, {rate / base:.3f} of unfiltered\n"
            )


if __name__ == "__main__":
    main()
