"""What runs come to: the rows of the JSON file, the baseline, the best draft:target ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import ControllerConfig, SpeculationConfig
from paceline.errors import ConfigError
from paceline.simulate.config import NetworkConfig, SimulateConfig
from paceline.simulate.fleet import Fleet, Outcome, Progress
from paceline.simulate.load import Run, TraceRow

# A ratio whose goal is within so much of the best one's counts as equal: fewer drafts win.
INDIFFERENCE = 0.01
FIRST_RATIOS = (0.0, 0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
MAX_REFINEMENTS = 6

Row = dict[str, Any]
Say = Callable[[str, float], None]  # what is being run, and the share of it that is done


def row_of(outcome: Outcome) -> Row:
    """One run, measured. Rates are per second of simulated time; times are milliseconds; None
    where nothing was there to measure."""
    config, metrics = outcome.config, outcome.metrics
    fleet, seconds = config.fleet, config.duration_s
    rate = metrics.num_tokens / seconds
    has_drafts = config.speculation.method != "off"
    num_drafts = fleet.num_drafts if has_drafts else 0
    cost = config.cost_per_hour
    return {
        "num_targets": fleet.num_targets,
        "num_drafts": num_drafts,
        "tokens_per_s": round(rate, 3),
        "tokens_per_s_per_target": round(rate / fleet.num_targets, 3),
        "requests_per_s": round(metrics.num_finished / seconds, 4),
        "refused_per_s": round(metrics.num_refused / seconds, 4),
        "goodput_requests_per_s": round(metrics.num_good / seconds, 4),
        "goodput_tokens_per_s": round(metrics.num_good_tokens / seconds, 3),
        "goodput_share": _share(metrics.num_good, metrics.num_finished + metrics.num_refused),
        "ttft_ms": metrics.ttft.summary(),
        "itl_ms": metrics.itl.summary(),
        "e2e_ms": metrics.e2e.summary(),
        "target_busy": round(metrics.target_busy_us / (1e6 * seconds * fleet.num_targets), 4),
        "draft_busy": _share(metrics.draft_busy_us, 1e6 * seconds * num_drafts),
        "acceptance_rate": _share(metrics.num_accepted_tokens, metrics.num_draft_tokens),
        "mean_num_speculative_tokens": _share(metrics.num_draft_tokens, metrics.num_rounds),
        "mean_acceptance_length": _share(metrics.num_round_tokens, metrics.num_rounds),
        "mean_batch": _share(metrics.num_rounds, metrics.num_passes),
        "drafted_per_s": round(metrics.num_drafted / seconds, 3),
        "num_preemptions": metrics.num_preemptions,
        "cost_per_hour": round(cost, 6),
        "cost_per_million_tokens": _cost_per_million(cost, rate),
        "targets_with_drafts": outcome.num_deciding,
        "targets_with_a_policy": outcome.num_leaders,
        "wall_s": round(outcome.wall_s, 3),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _cost_per_million(cost_per_hour: float, tokens_per_s: float) -> float | None:
    if not tokens_per_s:
        return None
    return round(1e6 * cost_per_hour / (3600.0 * tokens_per_s), 6)


def without_drafts(config: SimulateConfig) -> SimulateConfig:
    """The same targets and requests, alone; what only drafts can tell apart is set to one value,
    so that equal baselines are equal."""
    classes = tuple(
        item.model_copy(update={"acceptance": 0.0, "runner_up": (), "drift": None})
        for item in config.traffic.classes
    )
    return config.model_copy(
        update={
            "fleet": config.fleet.model_copy(update={"num_drafts": 0, "draft": ""}),
            "hardware": config.hardware.model_copy(update={"drafts": {}}),
            "network": NetworkConfig(),
            "controller": ControllerConfig(),
            "traffic": config.traffic.model_copy(update={"classes": classes}),
            "speculation": SpeculationConfig(method="off"),
            "find": None,
            "sweep": {},
        }
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    num_drafts: int
    row: Row
    goal: float  # more is better
    is_allowed: bool


class Study:
    """All runs of one file. Baselines are run once for all runs that share them."""

    def __init__(self, trace: Sequence[TraceRow], say: Say = lambda what, share: None) -> None:
        self._trace, self._say = trace, say
        self._baselines: dict[str, Row] = {}
        self._rows: dict[str, Row] = {}  # a search comes by runs of the sweep again

    def run(self, config: SimulateConfig, what: str) -> Row:
        """Row of one run, with its baseline if the configuration wants one."""
        key = config.model_dump_json(exclude={"sweep", "find"})
        if key not in self._rows:
            self._rows[key] = self._run(config, what)
        return dict(self._rows[key])

    def _run(self, config: SimulateConfig, what: str) -> Row:
        def progress(share: float) -> None:
            self._say(what, share)

        row = self._measure(config, progress)
        if config.has_baseline:
            self._compare(row, config, f"{what}, without drafts")
        return row

    def _measure(self, config: SimulateConfig, progress: Progress) -> Row:
        return row_of(Fleet(config, self._trace).run(progress))

    def _compare(self, row: Row, config: SimulateConfig, what: str) -> None:
        alone = without_drafts(config)
        key = alone.model_dump_json()
        if key not in self._baselines:
            is_alone = not row["num_drafts"]
            baseline = row if is_alone else self._measure(alone, lambda s: self._say(what, s))
            names = ("tokens_per_s", "cost_per_million_tokens", "ttft_ms", "itl_ms", "e2e_ms")
            self._baselines[key] = {name: baseline[name] for name in names}
        baseline = self._baselines[key]
        row["baseline"] = baseline
        row["ratio"] = _ratio(row["tokens_per_s"], baseline["tokens_per_s"])
        row["cost_ratio"] = _ratio(
            row["cost_per_million_tokens"], baseline["cost_per_million_tokens"]
        )

    def sweep(self, runs: Sequence[Run]) -> list[Row]:
        rows = []
        for number, run in enumerate(runs, 1):
            what = ", ".join(f"{key} = {value}" for key, value in run.varied.items())
            what = f"run {number} of {len(runs)}{': ' if what else ''}{what}"
            rows.append({"varied": run.varied, **self.run(run.config, what)})
        return rows

    # -- the best ratio ---------------------------------------------------------------------

    def find(self, config: SimulateConfig) -> Row:
        """The draft:target ratio that `config.find` asks for, why, and all that was tried."""
        find = config.find
        if find is None:
            raise ConfigError("nothing to find")
        num_targets = config.fleet.num_targets
        most = int(find.max_drafts_per_target * num_targets)
        numbers = {min(most, round(ratio * num_targets)) for ratio in FIRST_RATIOS}
        tried = {number: self._try(config, number) for number in sorted({0, *numbers})}
        for _ in range(MAX_REFINEMENTS):
            number = _between(tried, self._best(tried).num_drafts)
            if number is None:
                break
            tried[number] = self._try(config, number)
        best = self._best(tried)
        rows = [{"goal": tried[number].goal, **tried[number].row} for number in sorted(tried)]
        return {
            "what": find.what,
            "goal": find.goal,
            "num_drafts": best.num_drafts,
            "num_targets": num_targets,
            "drafts_per_target": round(best.num_drafts / num_targets, 4),
            "reason": self._reason(config, tried, best),
            "tried": rows,
        }

    def _try(self, config: SimulateConfig, num_drafts: int) -> _Candidate:
        fleet = config.fleet.model_copy(update={"num_drafts": num_drafts})
        changed = config.model_copy(update={"fleet": fleet})
        row = self.run(changed, f"{num_drafts} drafts for {fleet.num_targets} targets")
        find = config.find
        cost = row["cost_per_million_tokens"]
        is_cost = find is not None and find.goal == "cost"
        goal = row["tokens_per_s"] if not is_cost else (1.0 / cost if cost else row["tokens_per_s"])
        good = row["goodput_share"]
        limit = find.min_goodput if find is not None else 0.0
        return _Candidate(num_drafts, row, goal, good is None or good >= limit)

    def _best(self, tried: dict[int, _Candidate]) -> _Candidate:
        allowed = [item for item in tried.values() if item.is_allowed] or list(tried.values())
        best = max(item.goal for item in allowed)
        enough = [item for item in allowed if item.goal >= best * (1.0 - INDIFFERENCE)]
        return min(enough, key=lambda item: item.num_drafts)

    def _reason(
        self, config: SimulateConfig, tried: dict[int, _Candidate], best: _Candidate
    ) -> str:
        row, alone = best.row, tried[0].row
        rate = f"{row['tokens_per_s']:.0f} tokens/s against {alone['tokens_per_s']:.0f} without"
        cost, plain = row["cost_per_million_tokens"], alone["cost_per_million_tokens"]
        price = f", {cost:.3f} against {plain:.3f} per million tokens" if cost and plain else ""
        more = sorted(number for number in tried if number > best.num_drafts)
        if not any(item.is_allowed for item in tried.values()):
            limit = config.find.min_goodput if config.find else 0.0
            return f"no ratio keeps the SLO for {limit:.0%} of requests; the best: {rate}{price}"
        if not best.num_drafts:
            return f"drafts gain nothing here: {alone['tokens_per_s']:.0f} tokens/s without any"
        if not more:
            return f"{rate}{price}; more drafts than that were not tried"
        change = 100 * (tried[more[0]].goal / best.goal - 1)
        return f"{rate}{price}; with {more[0]} drafts the goal changes by {change:+.1f} %"


def _between(tried: dict[int, _Candidate], best: int) -> int | None:
    """The next number to try: in the middle of the wider gap beside the best one."""
    numbers = sorted(tried)
    index = numbers.index(best)
    gaps = []
    if index:
        gaps.append((best - numbers[index - 1], numbers[index - 1], best))
    if index + 1 < len(numbers):
        gaps.append((numbers[index + 1] - best, best, numbers[index + 1]))
    width, low, high = max(gaps, default=(0, 0, 0))
    return (low + high) // 2 if width > 1 else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 4) if value and base else None
