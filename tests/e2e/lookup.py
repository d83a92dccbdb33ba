"""Tokens per pass of our lookups beside transformers' prompt lookup: same prompts, one run.

    python -m tests.e2e.lookup                    # our prompts that repeat their context
    python -m tests.e2e.lookup --prompts FILE --categories summarisation code rag

The demo's target writes each text once, greedily, in float32; our proposers replay it (exact: a
text does not depend on proposals), while transformers generates it again and its passes are
counted. Both propose at most K tokens in any pass, the first one, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from paceline import models
from paceline.bench.prompt_sets import prompt_set
from paceline.bench.prompts import Prompt, load_prompts
from paceline.proposers.base import Proposer
from paceline.proposers.ngram import NgramProposer
from paceline.proposers.suffix import SuffixProposer
from paceline.testing.replay import Replay, replay
from tests.e2e.assisted import TARGET, num_threads

# As the configuration's defaults.
PROPOSERS: Mapping[str, Callable[[], Proposer]] = {
    "ngram": lambda: NgramProposer(2, 4),
    "suffix": lambda: SuffixProposer(24, 1.0, 0.1),
}
THEIRS = "transformers' prompt_lookup"


@dataclass(frozen=True)
class Text:
    """Greedy, with its EOS if it came to one. `theirs`: its passes with transformers' lookup."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    theirs: Replay
    is_same: bool


class Target:
    """The demo's target as transformers runs it, one thread."""

    def __init__(self) -> None:
        logging.disable_progress_bar()
        folder = models.resolve(TARGET)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def text(self, prompt: Prompt, max_tokens: int, k: int) -> Text:
        messages = prompt.fields("chat")[1]["messages"]
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        output, _ = self._generate(ids, max_tokens)
        again, num_passes = self._generate(ids, max_tokens, prompt_lookup_num_tokens=k)
        theirs = Replay(len(again), num_passes)
        return Text(tuple(ids), output, theirs, again == output)

    def _generate(
        self, ids: Sequence[int], max_tokens: int, **extra: Any
    ) -> tuple[tuple[int, ...], int]:
        """The output, and how often the model ran."""
        num_passes = 0

        def count(*_: object) -> None:
            nonlocal num_passes
            num_passes += 1

        hook = self._model.register_forward_pre_hook(count)
        try:
            with torch.inference_mode(), num_threads(1):
                found = self._model.generate(
                    torch.tensor([list(ids)]), max_new_tokens=max_tokens, do_sample=False, **extra
                )
        finally:
            hook.remove()
        return tuple(found[0, len(ids) :].tolist()), num_passes


def compare(
    prompts: Sequence[Prompt], max_tokens: int, k: int, say: Callable[[str], None]
) -> tuple[dict[str, Replay], list[Text]]:
    """Totals by proposer, transformers' too, over all prompts."""
    target = Target()
    totals = dict.fromkeys((*PROPOSERS, THEIRS), Replay())
    texts: list[Text] = []
    for prompt in prompts:
        text = target.text(prompt, max_tokens, k)
        texts.append(text)
        found = {
            name: replay(make(), text.prompt, text.output, k) for name, make in PROPOSERS.items()
        }
        found[THEIRS] = text.theirs
        totals = {name: totals[name] + found[name] for name in totals}
        figures = ", ".join(
            f"{name} {one.mean_acceptance_length:.2f}" for name, one in found.items()
        )
        same = "" if text.is_same else " (transformers' text differs)"
        say(f"{prompt.id}: {len(text.prompt)} + {len(text.output)} tokens; {figures}{same}")
    return totals, texts


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: our own")
    parser.add_argument("--categories", nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=8, help="prompts of a category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("-k", type=int, default=8, help="proposals of a pass")
    options = parser.parse_args()
    prompts = load_prompts(options.prompts) if options.prompts else prompt_set("repeat")
    names = options.categories or dict.fromkeys(prompt.category for prompt in prompts)
    for name in names:
        some = [prompt for prompt in prompts if prompt.category == name]
        if options.prompts:
            some = some[: options.limit]
        totals, _ = compare(some, options.max_tokens, options.k, say)
        for proposer, total in totals.items():
            rate = f", {total.acceptance_rate:.0%} of proposals" if total.num_proposed else ""
            say(
                f"{name}: {proposer} {total.mean_acceptance_length:.2f} tokens a pass"
                f" ({total.num_tokens} in {total.num_passes}{rate}, K {options.k})"
            )


if __name__ == "__main__":
    main()
