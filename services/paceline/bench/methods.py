"""`paceline bench methods`: every method of speculation beside none, on sets of prompts.

Over a running service. In each round every method sends the same requests right behind the
others, another one first each time, so that whatever else the machine does hits all alike; a
ratio compares with `off` of the same round. Knows no terminal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline import __version__
from paceline.bench.client import MAX_MESSAGE_CHARS, Clock, LoadClient, Outcome
from paceline.bench.live import OFF, LiveBench, LiveConfig, Side, Status
from paceline.bench.load import Amount, Sleep
from paceline.bench.prompts import Prompt
from paceline.bench.statistics import spread
from paceline.errors import ConfigError, PacelineError
from paceline.methods import METHODS, SpeculationMethod

COMPARED: tuple[SpeculationMethod, ...] = tuple(name for name in METHODS if name != "off")
Sets = Mapping[str, Sequence[Prompt]]
MAX_ROUNDS = 1000
# A draft replica may still be joining; without any the rest is measured all the same.
DRAFT_WAIT_S = 30.0
DRAFT_POLL_S = 0.5
NO_REASON = "it does not say why"


@dataclass(frozen=True, slots=True)
class MethodsConfig:
    """`live` says what each request asks, and of whom; its `speculation` is not looked at.
    `methods`: empty for all that the service offers."""

    live: LiveConfig
    methods: tuple[SpeculationMethod, ...] = ()
    rounds: int = 5

    def check(self) -> None:
        """Raises ConfigError, one sentence, for what cannot be run."""
        self.live.check()
        if not 0 < self.rounds <= MAX_ROUNDS:
            raise ConfigError(f"--rounds must be above 0 and at most {MAX_ROUNDS}")


def method_names(names: Sequence[str]) -> tuple[SpeculationMethod, ...]:
    """Each once; ConfigError for what is no method to compare with `off`."""
    for name in names:
        if name not in COMPARED:
            raise ConfigError(f"--methods are of {', '.join(COMPARED)}; '{name}' is none of them")
    return tuple(name for name in COMPARED if name in names)


def sets_of(prompts: Sequence[Prompt], names: Sequence[str]) -> dict[str, list[Prompt]]:
    """Prompts by category: those `names`, in that order, or all; ConfigError for none of a name."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category or "all", []).append(prompt)
    for name in names:
        if name not in found:
            raise ConfigError(f"there is no set '{name}' of prompts, only {', '.join(found)}")
    return {name: found[name] for name in names} if names else found


async def run_methods(
    config: MethodsConfig,
    sets: Sets,
    api_key: str = "",
    status: Status = lambda text: None,
    clock: Clock = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> dict[str, Any]:
    """The whole benchmark. PacelineError when there is no service, or none that answers."""
    config.check()
    live = config.live
    client = LoadClient(live.url, api_key, live.concurrency, live.timeout_s, clock)
    async with client:
        served = await client.served(live.model)
        model = str(served["id"])
        methods, refused = offered(config.methods, served)
        benches = {
            name: LiveBench(live, prompts, model, client, status, clock, sleep)
            for name, prompts in sets.items()
        }
        refused |= await _warm_up(methods, benches, status)
        if wanted := [name for name in config.methods if name in refused]:
            raise PacelineError(f"the service refuses {wanted[0]}: {refused[wanted[0]]}")
        methods = tuple(name for name in methods if name not in refused)
        rows: list[dict[str, Any]] = []
        for name, bench in benches.items():
            rows += await _measure(config, name, bench, methods, len(sets[name]), status)
        return {
            "benchmark": "methods",
            "version": __version__,
            "model": model,
            "config": asdict(replace(config, methods=methods)),
            "sets": {name: len(prompts) for name, prompts in sets.items()},
            "refused": refused,
            "rows": rows,
        }


def offered(
    wanted: Sequence[SpeculationMethod], served: Mapping[str, Any]
) -> tuple[tuple[SpeculationMethod, ...], dict[str, str]]:
    """The methods to measure, and why each other one is not; a service that says nothing of
    methods has to be tried. PacelineError for a wanted one that the model has not, or for none."""
    reasons = served.get("refused_speculation_methods")
    known = reasons if isinstance(reasons, dict) else {}
    refused = {
        str(name): str(said or NO_REASON)[:MAX_MESSAGE_CHARS] for name, said in known.items()
    }
    if lacking := [name for name in wanted if name in refused]:
        have = ", ".join(name for name in COMPARED if name not in refused) or "none"
        raise PacelineError(
            f"{served['id']} has no {lacking[0]}: {refused[lacking[0]]}; it offers {have}"
        )
    methods = tuple(name for name in wanted or COMPARED if name not in refused)
    if not methods:
        raise PacelineError(f"{served['id']} offers no method: {refused[COMPARED[0]]}")
    return methods, {} if wanted else refused


def side_of(bench: LiveBench, method: SpeculationMethod) -> Side:
    return Side(bench, OFF if method == "off" else {"method": method}, keep_outcomes=True)


async def _warm_up(
    methods: Sequence[SpeculationMethod], benches: Mapping[str, LiveBench], status: Status
) -> dict[str, str]:
    """One request of each set and method, not measured. What the service does not offer, and its
    sentence."""
    refused: dict[str, str] = {}
    for bench in benches.values():
        for method in ("off", *methods):
            if method in refused:
                continue
            status(f"warming up {method}")
            outcome = await _one(bench, method)
            since_s = bench.clock()
            while method == "model" and not (outcome.num_proposed or outcome.error):
                if bench.clock() - since_s >= DRAFT_WAIT_S:
                    break
                status("waiting for a draft to take part")
                await bench.sleep(DRAFT_POLL_S)
                outcome = await _one(bench, method)
            if outcome.error:
                if method == "off":
                    raise PacelineError(
                        f"the service answers no request without speculation: {outcome.error},"
                        f" {outcome.message}"
                    )
                refused[method] = outcome.message
    return refused


async def _one(bench: LiveBench, method: SpeculationMethod) -> Outcome:
    side = side_of(bench, method)
    await side.closed(Amount(1), 1)
    return side.recorder.outcomes[0]


async def _measure(
    config: MethodsConfig,
    name: str,
    bench: LiveBench,
    methods: Sequence[SpeculationMethod],
    num_prompts: int,
    status: Status,
) -> list[dict[str, Any]]:
    """A row for `off` and for each method, of one set."""
    sides = {method: side_of(bench, method) for method in ("off", *methods)}
    speeds: dict[str, list[float]] = {method: [] for method in sides}
    for number in range(config.rounds):
        first = number % len(sides)
        order = [*sides][first:] + [*sides][:first]
        for method in order:
            status(f"{name}, round {number + 1}/{config.rounds}, {method}")
            sides[method].next_index = 0  # the same requests in every round
            block = await sides[method].closed(Amount(num_prompts), config.live.concurrency)
            speeds[method].append(block["tokens_per_s"] or 0.0)
    texts = _texts(sides["off"].recorder.outcomes)
    return [_row(name, method, side, speeds, texts) for method, side in sides.items()]


def _row(
    name: str,
    method: SpeculationMethod,
    side: Side,
    speeds: Mapping[str, Sequence[float]],
    texts: Mapping[int, str],
) -> dict[str, Any]:
    """`equal`: of the answers that both gave, those with the text of `off`'s first answer."""
    summary = side.recorder.summary()
    told = summary["speculation"]
    both = [one for one in side.recorder.outcomes if not one.error and one.ask.index in texts]
    ratios = zip(speeds[method], speeds["off"], strict=True)
    return {
        "set": name,
        "method": method,
        "tokens_per_s": spread(speeds[method]),
        "ratio": spread([own / off for own, off in ratios if off]),
        "mean_acceptance_length": told["mean_acceptance_length"],
        "acceptance_rate": told["acceptance_rate"],
        "rounds": told["rounds"],
        "proposed": told["proposed"],
        "accepted": told["accepted"],
        "num_failed": summary["num_failed"],
        "example_errors": summary["example_errors"],
        "texts": {
            "compared": len(both),
            "equal": sum(one.text_digest == texts[one.ask.index] for one in both),
        },
    }


def _texts(outcomes: Sequence[Outcome]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for outcome in outcomes:
        if not outcome.error:
            texts.setdefault(outcome.ask.index, outcome.text_digest)
    return texts
