"""The demo's pair here and in transformers, in one run on one machine.

    python -m tests.e2e.pair acceptance              # what is accepted, same K, same contexts
    python -m tests.e2e.pair speed                   # tokens/s, in turns, at 1, 4 and 8 requests

`acceptance` runs both in this process, in lock-step, greedy, with full windows of K: then every
round of both checks the draft's K next tokens behind the same text. The two differ in where rounds
begin: transformers checks a proposal in the prefill already, we begin one token later, and until a
round of both happens to begin at the same token they look at other places. So the figures are
given for all rounds and for those that begin at the same token ("common"). Passes without
proposals count for neither. EOS is ruled out on both sides.

Our drafts compute only part of their output layer (draft_vocab.json): what is left out cannot be
proposed. `--head cut` gives transformers the same draft, `full` gives both the whole layer, and
`served` lets each have its own: what cutting costs.

`speed` measures the service of deploy/serve/smollm2.yaml over HTTP (adaptive, fixed K, off) and
transformers (alone, alone in a batch, assisted with K, assisted with its defaults) in turns, with
as many threads as target and draft have together, and without prefix caches. One does not run while
the other does; what the idle service takes from transformers is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from paceline import models
from paceline.bench.live import LiveConfig, run_live
from paceline.bench.prompts import Prompt, load_prompts
from paceline.bench.statistics import spread
from paceline.cli.cluster import free_port, local_service
from paceline.cli.servefile import ServeFile, load
from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.draft_head import DRAFT_VOCAB
from paceline.engine.loader import load_source
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback
from tests.e2e.assisted import DRAFT, TARGET, Rounds, Transformers, num_threads, timed

SERVE_FILE = "deploy/serve/smollm2.yaml"
HOST = "127.0.0.1"
BATCH = 8
CONCURRENCIES = (1, 4, 8)
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short Python function that reverses a list, then explain it.",
    "Tell me a long story about a lighthouse keeper.",
    "List ten uses of a paperclip.",
    "Explain how a bicycle stays upright.",
    "Write a SQL query that counts orders per customer.",
    "Summarize the plot of Romeo and Juliet.",
    "What is the difference between a virus and a bacterium?",
)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def chat_prompts(options: argparse.Namespace) -> list[Prompt]:
    """The first `--num-prompts` that are chats of the file, or of the questions above."""
    found = [Prompt(f"q{i}", "", text, is_text=True) for i, text in enumerate(QUESTIONS)]
    if options.prompts is not None:
        found = [p for p in load_prompts(options.prompts) if "messages" in p.fields()[1]]
    return found[: options.num_prompts]


# -------------------------------------------------------------------------------- acceptance


@contextlib.contextmanager
def draft_folder(head: str) -> Iterator[str]:
    """Our draft's source: itself, or for "full" a folder of links without the list that cuts."""
    if head != "full":
        yield DRAFT
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in models.resolve(DRAFT).iterdir():
            if file.name != DRAFT_VOCAB:
                (Path(folder) / file.name).symlink_to(file)
        yield folder


def our_rounds(
    prompts: Sequence[tuple[int, ...]], max_tokens: int, k: int, draft: str, draft_dtype: str
) -> tuple[list[list[int]], Rounds]:
    """Lock-step with full windows: the scheduler, the sessions and the engines of the service."""
    engines = [
        load_source(
            ModelConfig.model_validate({"source": name, "num_kv_blocks": 1024, "dtype": dtype}),
            draft_top_n=top_n,
        )
        for name, dtype, top_n in ((TARGET, "float32", None), (draft, draft_dtype, 64))
    ]
    config = SpeculationConfig(
        lookahead="fixed",
        num_speculative_tokens=k,
        max_num_speculative_tokens=k,
        max_draft_ahead=k,
    )
    loopback, rounds, texts = Loopback(engines[0], engines[1], config), Rounds(), []
    requests = [
        GenerateRequest(
            f"pair-{index}",
            prompt,
            max_tokens,
            SamplingParams(0.0, min_tokens=max_tokens),
            speculation=SpeculationRequest("model", k, lookahead="fixed"),
        )
        for index, prompt in enumerate(prompts)
    ]
    for first in range(0, len(requests), BATCH):
        runs = loopback.run(requests[first : first + BATCH])
        for number, run in enumerate(runs, start=first):
            texts.append(run.token_ids)
            began = 0
            for delta in run.deltas:
                rounds.add((number, began), delta.num_draft_tokens, delta.num_accepted_tokens)
                began += len(delta.token_ids)
    return texts, rounds


def measure_acceptance(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.draft_dtype)
    theirs = Transformers(torch.float32, dtype, options.head == "cut")
    prompts = [theirs.ids(p.fields("chat")[1]["messages"]) for p in chat_prompts(options)]
    their_texts, their = theirs.assisted(prompts, options.max_tokens, options.k)
    with draft_folder(options.head) as draft:
        our_texts, our = our_rounds(
            prompts, options.max_tokens, options.k, draft, options.draft_dtype
        )
    num_equal = sum(a == b for a, b in zip(our_texts, their_texts, strict=True))
    say(
        f"T=0, K={options.k}, {len(prompts)} prompts x {options.max_tokens} tokens, draft"
        f" {options.draft_dtype}, head {options.head}; {num_equal} of {len(prompts)} texts equal"
    )
    common = our.found.keys() & their.found.keys()
    num_same = sum(our.found[place] == their.found[place] for place in common)
    say(
        f"rounds: {len(our.found)} and {len(their.found)}; {len(common)} begin at the same token,"
        f" and {num_same} of these accept the same number"
    )
    report: dict[str, Any] = {
        "k": options.k,
        "head": options.head,
        "num_prompts": len(prompts),
        "num_equal_texts": num_equal,
        "num_common_rounds": len(common),
        "num_same_rounds": num_same,
    }
    for where, mine, other in (
        ("all rounds", our, their),
        ("common rounds", our.at(common), their.at(common)),
    ):
        report[where] = compare(where, mine, other)
    return report


def compare(where: str, our: Rounds, their: Rounds) -> dict[str, Any]:
    """Said and returned; the difference is in percentage points, but for the length."""
    found: dict[str, Any] = {}
    for name in ("acceptance_rate", "token_acceptance_rate", "mean_acceptance_length"):
        ours, others = getattr(our, name), getattr(their, name)
        is_rate = name.endswith("rate")
        shown = f"{(ours - others) * 100:+.2f} points" if is_rate else f"{ours - others:+.3f}"
        say(f"{where}, {name}: paceline {ours:.4f}, transformers {others:.4f} ({shown})")
        found[name] = {"paceline": ours, "transformers": others}
    return found


# ------------------------------------------------------------------------------------- speed

Rates = dict[tuple[str, int], list[float]]


class SpeedBench:
    """All ways in turns; `rates` has tokens/s of each way and concurrency, one per repeat."""

    def __init__(self, options: argparse.Namespace, url: str, threads: int) -> None:
        self._options, self._url, self._threads = options, url, threads
        self._theirs = Transformers(torch.float32, torch.bfloat16, options.head == "cut")
        self._prompts = chat_prompts(options)
        self._ids = [self._theirs.ids(p.fields("chat")[1]["messages"]) for p in self._prompts]
        self.rates: Rates = defaultdict(list)
        self.acceptance: dict[str, Mapping[str, Any]] = {}

    def run(self) -> None:
        fixed = {"lookahead": "fixed", "max_tokens": self._options.k}
        ours: dict[str, Mapping[str, Any]] = {
            "paceline adaptive": {"lookahead": "adaptive"},
            f"paceline K={self._options.k}": fixed,
            "paceline off": {"method": "off"},
        }
        self._warm_up(ours)
        for repeat in range(self._options.repeats):
            for concurrency in CONCURRENCIES:
                turns: list[tuple[str, Callable[[], tuple[float, Any]]]] = [
                    (name, self._service(spec, concurrency)) for name, spec in ours.items()
                ]
                turns += self._transformers(concurrency)
                for name, measure in turns if repeat % 2 == 0 else reversed(turns):
                    rate, self.acceptance[name, concurrency] = measure()  # type: ignore[index]
                    self.rates[name, concurrency].append(rate)
                    say(f"  {repeat + 1}: {concurrency} at a time, {name}: {rate:.1f} tokens/s")

    def _warm_up(self, ours: Mapping[str, Mapping[str, Any]]) -> None:
        for speculation in ours.values():
            self._ask(speculation, 8, 16)
        with num_threads(self._threads):
            self._theirs.alone(self._ids[:1], 8, 1)
            self._theirs.assisted(self._ids[:1], 8, self._options.k)

    def _service(
        self, speculation: Mapping[str, Any], concurrency: int
    ) -> Callable[[], tuple[float, Any]]:
        def measure() -> tuple[float, Any]:
            summary = self._ask(speculation, concurrency, self._options.max_tokens)
            return summary["tokens_per_s"], summary["speculation"]

        return measure

    def _ask(
        self, speculation: Mapping[str, Any], concurrency: int, max_tokens: int
    ) -> dict[str, Any]:
        config = LiveConfig(
            self._url,
            concurrency=concurrency,
            max_tokens=max_tokens,
            extra_body={"min_tokens": max_tokens},  # as min_new_tokens: no EOS before
            speculation=speculation,
        )
        summary: dict[str, Any] = asyncio.run(run_live(config, self._prompts))["summary"]
        if summary["num_failed"]:
            raise SystemExit(f"requests failed: {summary['example_errors']}")
        return summary

    def _transformers(self, concurrency: int) -> list[tuple[str, Callable[[], tuple[float, Any]]]]:
        """Assisted generation takes one at a time, whatever waits: it is measured once a repeat."""
        num, k = self._options.max_tokens, self._options.k

        def alone() -> tuple[float, Any]:
            with num_threads(self._threads):
                seconds, texts = timed(self._theirs.alone, self._ids, num, concurrency)
            return _count(texts) / seconds, {}

        def assisted(num_tokens: int | None) -> Callable[[], tuple[float, Any]]:
            def measure() -> tuple[float, Any]:
                with num_threads(self._threads):
                    seconds, (texts, rounds) = timed(
                        self._theirs.assisted, self._ids, num, num_tokens
                    )
                return _count(texts) / seconds, {
                    "acceptance_rate": rounds.acceptance_rate,
                    "token_acceptance_rate": rounds.token_acceptance_rate,
                    "mean_acceptance_length": rounds.mean_acceptance_length,
                }

            return measure

        ways = [("transformers alone", alone)]
        if concurrency == 1:
            ways += [
                (f"transformers assisted K={k}", assisted(k)),
                ("transformers assisted, its defaults", assisted(None)),
            ]
        return ways


def _count(texts: Sequence[Sequence[int]]) -> int:
    return sum(len(text) for text in texts)


def idle_cores(seconds: float = 2.0) -> float:
    """Cores in use on this machine while we wait."""

    def busy() -> float:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return (sum(fields[:8]) - fields[3] - fields[4]) / 100  # all but idle and iowait

    before, began = busy(), time.perf_counter()
    time.sleep(seconds)
    return (busy() - before) / (time.perf_counter() - began)


@contextlib.contextmanager
def serve_file(options: argparse.Namespace) -> Iterator[tuple[ServeFile, int]]:
    """The file without prefix caches (the same prompts come again and again, and transformers
    computes each of them anew), and the threads that target and draft have together."""
    data = yaml.safe_load(Path(options.config).read_text(encoding="utf-8"))
    arguments = data["applications"][0]["args"]
    for role in ("target", "draft"):
        arguments[role]["model"]["enable_prefix_caching"] = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pair.yaml"
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        file = load(path)
        app = file.apps[0]
        yield file, app.target.model.num_threads + app.draft.model.num_threads


def measure_speed(options: argparse.Namespace) -> dict[str, Any]:
    port = free_port(HOST)
    with (
        serve_file(options) as (file, threads),
        local_service(file, HOST, port, lambda _: None) as url,
    ):
        bench = SpeedBench(options, url, options.threads or threads)
        say(f"the idle service and the rest of the machine use {idle_cores():.2f} cores")
        bench.run()
    return speed_report(bench.rates, bench.acceptance, options.k)


def speed_report(
    rates: Rates, acceptance: Mapping[Any, Mapping[str, Any]], k: int
) -> dict[str, Any]:
    """Ratios are of the same repeat, then the median and the range over repeats."""
    report: dict[str, Any] = {"rates": {}, "ratios": {}}
    for (name, concurrency), values in rates.items():
        known = acceptance.get((name, concurrency)) or {}
        report["rates"][f"{name}, {concurrency}"] = spread(values) | dict(known)
        shown = ", ".join(
            f"{key} {known[key]:.3f}"
            for key in ("token_acceptance_rate", "mean_acceptance_length")
            if known.get(key)
        )
        say(f"{concurrency} at a time, {name}: {statistics.median(values):.1f} tokens/s {shown}")
    for concurrency in CONCURRENCIES:
        ours = rates["paceline adaptive", concurrency]
        others = {
            "paceline off": rates["paceline off", concurrency],
            f"paceline K={k}": rates[f"paceline K={k}", concurrency],
            "transformers assisted": rates[f"transformers assisted K={k}", 1],
            "transformers assisted, its defaults": rates["transformers assisted, its defaults", 1],
            "transformers alone, one by one": rates["transformers alone", 1],
            "transformers alone, batched": rates["transformers alone", concurrency],
        }
        for name, values in others.items():
            found = spread([a / b for a, b in zip(ours, values, strict=True)])
            report["ratios"][f"adaptive / {name}, {concurrency}"] = found
            say(
                f"{concurrency} at a time, adaptive / {name}: {found['median']:.2f}"
                f" ({found['min']:.2f}-{found['max']:.2f})"
            )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("acceptance", "speed"))
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompts", type=Path, help="JSON lines, chats of it; else 8 questions")
    parser.add_argument("--threads", type=int, default=0, help="transformers'; 0: as the service")
    parser.add_argument("--draft-dtype", default="bfloat16", help="of acceptance; both sides")
    parser.add_argument("--head", default="cut", choices=("cut", "full", "served"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--config", default=SERVE_FILE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "acceptance":
        options.threads = options.threads or 1
        report = measure_acceptance(options)
    else:
        report = measure_speed(options)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
