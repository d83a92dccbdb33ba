"""What tracing costs: the same service with tracing off and at several sample ratios, in turn.

The real drivers as in `serving`, spans into files or to a collector. The modes of one round are
measured right behind each other, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from paceline.bench.ceiling import Costs
from paceline.bench.schemes import Effort, Kind, Scheme, Setting, steady
from paceline.bench.serving import Helpers, helpers, service
from paceline.config import TracingConfig

# As often right as a usual draft; a fixed K, which has nothing to learn.
ACCEPTANCE = 0.75
SCHEME = Scheme(Kind.OURS, 4)
# Short, so that the share of sampled requests is the ratio at any time.
MAX_TOKENS = 256

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Mode:
    """`ratio` None: tracing is off."""

    ratio: float | None

    @property
    def name(self) -> str:
        return "off" if self.ratio is None else f"{self.ratio:g}"

    def config(self, folder: Path, endpoint: str) -> TracingConfig:
        if self.ratio is None:
            return TracingConfig()
        if endpoint:
            return TracingConfig(sample_ratio=self.ratio, otlp_endpoint=endpoint)
        return TracingConfig(sample_ratio=self.ratio, file_dir=str(folder))


MODES = (Mode(None), Mode(0.0), Mode(0.1), Mode(1.0))


@dataclass(frozen=True, slots=True)
class Run:
    """`cpu_ms`: processor time of the target's process (clients, too) for one pass."""

    tokens_per_s: float
    cpu_ms: float
    num_spans: int = 0
    num_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """One mode: its runs, and the tokens/s of each divided by that of the run without tracing
    beside it. Spans are the target's, in all runs, those lost among them."""

    mode: Mode
    runs: tuple[Run, ...]
    ratios: tuple[float, ...]

    @property
    def num_spans(self) -> int:
        return sum(run.num_spans for run in self.runs)

    @property
    def num_dropped(self) -> int:
        return sum(run.num_dropped for run in self.runs)

    @property
    def cpu_ms(self) -> float:
        return median(run.cpu_ms for run in self.runs)

    @property
    def tokens_per_s(self) -> float:
        return median(run.tokens_per_s for run in self.runs)

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def row(self) -> dict[str, object]:
        return {
            "sample_ratio": self.mode.ratio,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "ratio": round(self.ratio, 4),
            "cpu_ms": round(self.cpu_ms, 3),
            "ratios": [round(ratio, 4) for ratio in self.ratios],
            "num_spans": self.num_spans,
            "num_dropped": self.num_dropped,
        }


def setting_of(costs: Costs, batch: int) -> Setting:
    return replace(steady(costs, 0.0, batch, ACCEPTANCE), max_tokens=MAX_TOKENS)


async def run(
    setting: Setting, effort: Effort, folder: Path, say: Say, endpoint: str = ""
) -> list[Cost]:
    """All modes `effort.runs` times; who is first changes from run to run."""
    found: dict[str, list[Run]] = {mode.name: [] for mode in MODES}
    async with helpers() as others:
        for number in range(effort.runs):
            first = number % len(MODES)
            for mode in (*MODES[first:], *MODES[:first]):
                say(f"tracing {mode.name}, run {number + 1}")
                config = mode.config(folder, endpoint)
                found[mode.name].append(await _measure(setting, config, effort, others, number))
    off = [run.tokens_per_s for run in found[MODES[0].name]]
    return [_cost(mode, found[mode.name], off) for mode in MODES]


async def _measure(
    setting: Setting, config: TracingConfig, effort: Effort, others: Helpers, number: int
) -> Run:
    async with service(setting, SCHEME, others, setting.batch, number, config) as running:
        await running.set_concurrency(setting.batch)
        stats = running.driver.scheduler.stats
        await asyncio.sleep(effort.warmup_s)
        num_passes, cpu_s = stats.num_passes, time.process_time()
        measured = await running.measure(0.0, effort.seconds)
        cpu_ms = 1e3 * (time.process_time() - cpu_s) / max(1, stats.num_passes - num_passes)
        await running.set_concurrency(0)
        tracer = running.tracer
        if tracer is None:
            return Run(measured.tokens_per_s, cpu_ms)
        await asyncio.to_thread(tracer.close)
        return Run(measured.tokens_per_s, cpu_ms, tracer.num_emitted, tracer.num_dropped)


def _cost(mode: Mode, runs: Sequence[Run], off: Sequence[float]) -> Cost:
    ratios = (run.tokens_per_s / base for run, base in zip(runs, off, strict=True))
    return Cost(mode, tuple(runs), tuple(ratios))
