"""What lookups bring as sources of `auto`: `suffix`, `ngram` and both, on texts that are known.

    python -m tests.e2e.lookup_sources FILE...

Files are JSON lines of ids: `prompt` and `output`, or `ids` and `prompt_len`.

No model runs: the scheduler and its policy are the real ones, the engine says the text (exact, as
a text does not depend on proposals), and a pass takes 1 + `row` for each proposal that it
verifies, so tokens per time are computed, never measured. All texts of a file share a target:
`batch` of them run at a time, in order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo, StepItem, StepResult
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.methods import ProposalSource
from paceline.sampling.params import SamplingParams
from paceline.target import local_drafts
from paceline.target.scheduler import Hold, Scheduler
from paceline.target.sequence import PassTimes

Text = tuple[tuple[int, ...], tuple[int, ...]]
PASS_US = 20_000
INFO = EngineInfo("known", 1 << 20, 4096, 16, 1 << 16)
CHOICES: tuple[tuple[ProposalSource, ...], ...] = (("suffix",), ("ngram",), ("suffix", "ngram"))


@dataclass
class Outcome:
    num_tokens: int = 0
    num_proposed: int = 0
    time_us: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens in the time of a pass without proposals, of each place in the batch."""
        return self.num_tokens * PASS_US / max(1.0, self.time_us)


def answer(text: Sequence[int], item: StepItem) -> StepResult:
    """The text's own tokens for the sampled rows, whatever is proposed."""
    end = item.start + len(item.token_ids)
    first = end - item.num_samples + 1
    token_ids = tuple(text[place] if place < len(text) else 0 for place in range(first, end + 1))
    return StepResult(item.sequence_id, token_ids)


def run(
    texts: Sequence[Text],
    names: tuple[ProposalSource, ...],
    batch: int,
    row: float,
    cached_tokens: int,
) -> Outcome:
    speculation = SpeculationConfig(method="auto", suffix_decoding_max_cached_tokens=cached_tokens)
    target = TargetConfig(max_num_seqs=batch, max_queued_seqs=4096, max_rows_per_pass=4096)
    scheduler = Scheduler(INFO, target, speculation, RpcConfig())
    known: dict[int, tuple[int, ...]] = {}
    outcome, now_us = Outcome(), 0.0
    with mock.patch.object(local_drafts, "sources_of", return_value=("model", *names)):
        for prompt, output in texts:
            asked = GenerateRequest(
                "r", prompt, len(output), SamplingParams(temperature=0.0), (), SpeculationRequest()
            )
            known[scheduler.add(asked, 0)] = (*prompt, *output)
        while scheduler.num_running:
            plan = scheduler.plan(int(now_us))
            assert not isinstance(plan, Hold)
            results = [answer(known[item.sequence_id], item) for item in plan.items]
            decoding = [entry for entry in plan.entries if not entry.is_prefill]
            num_drafts = sum(len(entry.draft_token_ids) for entry in decoding)
            pass_us = PASS_US * (1.0 + row * num_drafts)
            times = PassTimes(int(now_us), int(now_us + pass_us))
            now_us += pass_us
            scheduler.take_released()
            deltas = scheduler.end_pass(plan, results, times, INFO.num_blocks)
            if not decoding:
                continue
            ids = {entry.session_id for entry in decoding}
            outcome.num_tokens += sum(len(d.token_ids) for i, d in deltas if i in ids)
            outcome.num_proposed += num_drafts
            outcome.time_us += pass_us
    return outcome


def read(path: Path) -> list[Text]:
    texts = []
    for line in path.read_text().splitlines():
        found = json.loads(line)
        ids = found["ids"] if "ids" in found else [*found["prompt"], *found["output"]]
        prompt_len = found["prompt_len"] if "ids" in found else len(found["prompt"])
        if 0 < prompt_len < len(ids) - 8:
            texts.append((tuple(ids[:prompt_len]), tuple(ids[prompt_len:])))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=96, help="texts of a file")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--row", type=float, nargs="*", default=[0.005, 0.02, 0.08])
    parser.add_argument("--repeat", type=int, default=1, help="times that a file is run through")
    parser.add_argument("--cached-tokens", type=int, default=20_000, help="of recent outputs")
    options = parser.parse_args()
    for path in options.files:
        texts = read(path)[: options.limit] * options.repeat
        for batch in options.batch:
            for row in options.row:
                found = {
                    " + ".join(names): run(texts, names, batch, row, options.cached_tokens)
                    for names in CHOICES
                }
                said = ", ".join(
                    f"{name} {one.rate:.3f} ({one.num_proposed})" for name, one in found.items()
                )
                sys.stdout.write(f"{path.name} batch {batch} row {row}: {said}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
