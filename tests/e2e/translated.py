"""A draft with another tokenizer than its target, in lock-step: SmolLM2 for Qwen2.5-Coder.

    python -m tests.e2e.translated FOLDER                    # FOLDER: Qwen2.5-Coder-0.5B-Instruct
    python -m tests.e2e.translated FOLDER --draft smollm2-135m-draft --seeds 20

Compares token ids of runs with the draft with the target alone, and counts what is accepted. With
`--cut both` also where the draft reads the prompt token by token, not in its own tokenizer's cut.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline import models
from paceline.cli.fetch import fetch
from paceline.config import ModelConfig
from paceline.engine.loader import load_source
from paceline.engine.translated import TranslatedEngine
from paceline.engine.translation import Translated
from paceline.gateway.chat import ChatMessage
from paceline.gateway.tokenizer import load_tokenizer
from paceline.testing.loopback import Run
from tests.e2e.real import Pair

PROMPTS = (
    "Write a Python function that reverses a string.",
    "Explain in two sentences why the sky is blue.",
    "Write a SQL query that counts the orders of each customer.",
    "Erkläre in zwei Sätzen, warum der Himmel blau ist.",
)


def load_pair(target: str, draft: str, dtype: str) -> Pair:
    """Fetches the draft if it is an alias that is not in the cache."""
    if draft in models.ALIASES:
        fetch(draft, models.no_progress)
    shared = {"dtype": dtype, "num_kv_blocks": 512}
    configs = [
        {"source": target, **shared},
        {"source": draft, "target_tokenizer": target, **shared},
    ]
    engines = [
        load_source(ModelConfig.model_validate(config), draft_top_n=top_n)
        for config, top_n in zip(configs, (None, 64), strict=True)
    ]
    tokenizer = load_tokenizer(target)
    ids = (tuple(tokenizer.encode_chat([ChatMessage("user", text)])) for text in PROMPTS)
    return Pair(engines[0], engines[1], tuple(ids))


def cut_by_tokens(engine: TranslatedEngine) -> None:
    """Every token of the target is translated on its own from now on."""
    translate: Callable[..., Translated] = engine._translation.translate

    def apart(
        token_ids: Sequence[int], *, num_apart: int = 0, is_start: bool = False
    ) -> Translated:
        return translate(token_ids, num_apart=len(token_ids), is_start=is_start)

    engine._translation.translate = apart  # type: ignore[method-assign]


def summary(runs: Sequence[Run]) -> str:
    """Of the proposals whose turn came (none behind a refused one), the share that was accepted."""
    rounds = [delta for run in runs for delta in run.deltas if delta.num_draft_tokens]
    accepted = sum(delta.num_accepted_tokens for delta in rounds)
    refused = sum(delta.num_accepted_tokens < delta.num_draft_tokens for delta in rounds)
    proposed = sum(delta.num_draft_tokens for delta in rounds)
    return (
        f"{accepted / max(1, accepted + refused):.3f} a token, {accepted} of {proposed},"
        f" {accepted / max(1, len(rounds)):.2f} a round"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cut", choices=("text", "both"), default="text")
    options = parser.parse_args()
    seeds = [None, *range(1, options.seeds + 1)]
    pair = load_pair(str(options.target), options.draft, options.dtype)
    assert isinstance(pair.draft, TranslatedEngine)
    sys.stdout.write(f"{options.draft}: {pair.draft.overlap}\n")
    alone = [run.token_ids for run in pair.run(0, seeds, options.max_tokens)]
    num_wrong = 0
    for cut in ("text", "token")[: 1 + (options.cut == "both")]:
        if cut == "token":
            cut_by_tokens(pair.draft)
        runs = pair.run(options.draft_tokens, seeds, options.max_tokens)
        wrong = sum(run.token_ids != ids for run, ids in zip(runs, alone, strict=True))
        num_wrong += wrong
        greedy = runs[:: len(seeds)]
        coupled = [run for index, run in enumerate(runs) if index % len(seeds)]
        sys.stdout.write(
            f"prompt cut by {cut}: {len(runs)} texts, {wrong} differ\n"
            f"  greedy:  {summary(greedy)}\n  coupled: {summary(coupled)}\n"
        )
        sys.stdout.flush()
    pair.draft.check_integrity()
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
