"""The demo models in lock-step, without network or Ray: every window is as full as K allows.

    python -m tests.e2e.real --seeds 20      # the full matrix: some minutes
    python -m tests.e2e.real --seeds 5 --dtype bfloat16 --reproducible

Compares token ids of runs with the draft at K = 1, 4, 8 with the target alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import models
from paceline.cli.fetch import fetch
from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import Engine
from paceline.engine.loader import load_source
from paceline.gateway.chat import ChatMessage
from paceline.gateway.tokenizer import load_tokenizer
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback, Run

TARGET, DRAFT = "smollm2-135m", "smollm2-135m-draft"
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "What is 12 times 11? Show your work.",
    "List three uses of a paperclip.",
)
BATCH = 16


@dataclass(frozen=True)
class Pair:
    """Both models, float32, one thread, and the prompts as ids."""

    target: Engine
    draft: Engine
    prompts: tuple[tuple[int, ...], ...]

    def run(self, draft_tokens: int, seeds: Sequence[int | None], max_tokens: int) -> list[Run]:
        """One run per prompt and seed (None is greedy); `draft_tokens` 0 is the target alone."""
        requests = [
            self._request(prompt, seed, draft_tokens, max_tokens)
            for prompt in self.prompts
            for seed in seeds
        ]
        runs: list[Run] = []
        most = max(4, draft_tokens)  # no further ahead than needed: nothing overlaps here
        config = SpeculationConfig(max_num_speculative_tokens=most, max_draft_ahead=most)
        loopback = Loopback(self.target, self.draft, config)
        for first in range(0, len(requests), BATCH):
            runs += loopback.run(requests[first : first + BATCH])
        return runs

    def _request(
        self, prompt: tuple[int, ...], seed: int | None, draft_tokens: int, max_tokens: int
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"{prompt[:8]}-{seed}-{draft_tokens}",
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed or 0),
            speculation=SpeculationRequest("model" if draft_tokens else "off", draft_tokens),
        )


def load_pair(prompts: Sequence[str] = PROMPTS, **target: object) -> Pair:
    """Fetches what is not in the cache. `target`: fields of the target's ModelConfig."""
    folders = [fetch(name, models.no_progress) for name in (TARGET, DRAFT)]
    tokenizer = load_tokenizer(str(folders[0]))
    engines = [
        load_source(
            ModelConfig.model_validate({"source": name, "num_kv_blocks": 512, **fields}),
            draft_top_n=top_n,
        )
        for name, top_n, fields in ((TARGET, None, target), (DRAFT, 64, {}))
    ]
    ids = (tuple(tokenizer.encode_chat([ChatMessage("user", text)])) for text in prompts)
    return Pair(engines[0], engines[1], tuple(ids))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--reproducible", action="store_true")
    options = parser.parse_args()
    seeds = [None, *range(1, options.seeds + 1)]
    pair = load_pair(
        dtype=options.dtype,
        quantization=options.quantization,
        reproducible=options.reproducible,
    )
    alone = [run.token_ids for run in pair.run(0, seeds, options.max_tokens)]
    num_wrong = 0
    for draft_tokens in (1, 4, 8):
        runs = pair.run(draft_tokens, seeds, options.max_tokens)
        wrong = sum(run.token_ids != ids for run, ids in zip(runs, alone, strict=True))
        proposed = sum(run.num_draft_tokens for run in runs)
        accepted = sum(run.num_accepted_tokens for run in runs)
        sys.stdout.write(
            f"K={draft_tokens}: {len(runs)} texts, {wrong} differ;"
            f" {proposed} proposed, {accepted} accepted\n"
        )
        num_wrong += wrong
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
