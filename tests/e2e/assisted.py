"""transformers' own generation of the demo's pair, and what each round of its assisted mode did.

Its assisted generation takes one prompt at a time; alone it takes a batch. We look into its
candidate generator, which is told after every pass how many candidates matched.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from paceline import models
from paceline.engine.draft_head import cut_head

TARGET, DRAFT = "smollm2-135m", "smollm2-135m-draft"


Place = tuple[int, int]


@dataclass(slots=True)
class Rounds:
    """(proposed, accepted) of every pass of the target that checked a proposal, by where it began:
    the prompt's number, and how many tokens of the answer there were."""

    found: dict[Place, tuple[int, int]] = field(default_factory=dict)

    def add(self, place: Place, num_proposed: int, num_accepted: int) -> None:
        """A pass without proposals says nothing of the draft: ours has one for each prompt."""
        if num_proposed:
            self.found[place] = (num_proposed, num_accepted)

    def at(self, places: Set[Place]) -> Rounds:
        """Only those that began there."""
        return Rounds({place: pair for place, pair in self.found.items() if place in places})

    @property
    def num_proposed(self) -> int:
        return sum(proposed for proposed, _ in self.found.values())

    @property
    def num_accepted(self) -> int:
        return sum(accepted for _, accepted in self.found.values())

    @property
    def acceptance_rate(self) -> float:
        """accepted / proposed: falls with K, since what follows a rejection is lost."""
        return self.num_accepted / max(1, self.num_proposed)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per pass that checked a proposal, the target's own included."""
        return 1 + self.num_accepted / max(1, len(self.found))

    @property
    def token_acceptance_rate(self) -> float:
        """How often a draft token is accepted whose predecessors in the round were."""
        num_rejections = sum(accepted < proposed for proposed, accepted in self.found.values())
        return self.num_accepted / max(1, self.num_accepted + num_rejections)


class Transformers:
    """Both models as `generate` wants them, greedy, every answer `max_tokens` long.

    `has_cut_head`: the draft gets our output layer of a quarter of the vocabulary, too.
    """

    def __init__(
        self, target_dtype: torch.dtype, draft_dtype: torch.dtype, has_cut_head: bool
    ) -> None:
        logging.set_verbosity_error()  # it warns of what its own assisted mode does
        logging.disable_progress_bar()
        folders = [models.resolve(name) for name in (TARGET, DRAFT)]
        self.tokenizer = AutoTokenizer.from_pretrained(folders[0], padding_side="left")
        self.target = AutoModelForCausalLM.from_pretrained(folders[0], dtype=target_dtype)
        self.draft = AutoModelForCausalLM.from_pretrained(folders[1], dtype=draft_dtype)
        if has_cut_head:
            cut_head(self.draft, folders[1])
        self._defaults = dict(vars(self.draft.generation_config))

    def ids(self, messages: Sequence[Any]) -> tuple[int, ...]:
        encoded = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )
        return tuple(encoded["input_ids"])

    def alone(
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, batch: int
    ) -> list[list[int]]:
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            outputs += self._generate(prompts[first : first + batch], max_tokens)
        return outputs

    def assisted(
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, num_tokens: int | None
    ) -> tuple[list[list[int]], Rounds]:
        """`num_tokens`: always so many candidates (K); None: its own defaults, which are up to 20
        and fewer where the draft is not confident."""
        config = self.draft.generation_config
        if num_tokens is None:
            vars(config).update(self._defaults)
        else:
            config.num_assistant_tokens = num_tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
        outputs: list[list[int]] = []
        rounds = Rounds()
        for number, prompt in enumerate(prompts):
            with self._noting(rounds, number, len(prompt)):
                outputs += self._generate([prompt], max_tokens, assistant_model=self.draft)
        return outputs, rounds

    @contextlib.contextmanager
    def _noting(self, rounds: Rounds, number: int, prompt_len: int) -> Iterator[None]:
        """Notes the rounds of the generation inside the block.

        After each pass `_assisted_decoding` calls `update_candidate_strategy(input_ids, scores,
        num_matches)`; `scores` has a row for each candidate and one for the target's own token.
        `num_matches` counts what was kept, so a cut at EOS or at the length would lower it: both
        are ruled out here by `min_new_tokens` and by candidates that never pass the length.
        """
        make = self.target._get_candidate_generator

        def make_watched(**arguments: Any) -> Any:
            generator = make(**arguments)
            update = generator.update_candidate_strategy

            def note(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
                num_accepted = int(num_matches)
                began = input_ids.shape[1] - (num_accepted + 1) - prompt_len
                rounds.add((number, began), scores.shape[1] - 1, num_accepted)
                update(input_ids, scores, num_matches)

            generator.update_candidate_strategy = note
            return generator

        self.target._get_candidate_generator = make_watched
        try:
            yield
        finally:
            del self.target._get_candidate_generator

    def _generate(
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, **extra: Any
    ) -> list[list[int]]:
        encoded = self.tokenizer.pad(
            {"input_ids": [list(prompt) for prompt in prompts]}, return_tensors="pt"
        )
        with torch.inference_mode():
            output = self.target.generate(
                **encoded,
                **extra,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
            )
        rows: list[list[int]] = output[:, encoded["input_ids"].shape[1] :].tolist()
        return rows


@contextlib.contextmanager
def num_threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(work: Any, *arguments: Any) -> tuple[float, Any]:
    """Seconds, and the result."""
    began = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - began, result
