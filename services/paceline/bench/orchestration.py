"""Runs suites: every cell in turn, again and again, and makes rows of what was measured.

Knows no scheme's inner life: baselines are `lockstep`, the rest is `serving`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from paceline.bench import ceiling as formulas
from paceline.bench.lockstep import LockStep
from paceline.bench.schemes import Cell, Effort, Kind, Measurement, Scheme
from paceline.bench.serving import Helpers, helpers, service
from paceline.bench.suites import Group, Steps, Suite

# What has nothing to learn is warm after this.
_PLAIN_WARMUP_S = 0.3
# To tell the best K of a lock-step baseline from its neighbors.
_K_PROBE_S = 0.8
_MIN_K_GAIN = 0.03  # what so short a run can tell

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """All runs of one cell. `step` numbers the steps of a `Steps`."""

    suite: str
    group: str
    baseline: str
    cell: Cell
    runs: tuple[Measurement, ...]
    measured_rtt_ms: float | None = None
    step: int | None = None

    @property
    def rates(self) -> list[float]:
        return [run.tokens_per_s for run in self.runs]


def middle(runs: Sequence[Measurement], name: str) -> float | None:
    """The median of one figure of all runs that have it."""
    values = [value for run in runs if (value := getattr(run, name)) is not None]
    return median(values) if values else None


async def run_suite(name: str, suite: Suite, effort: Effort, say: Say) -> list[Outcome]:
    """Measure everything, in order; `say` hears what is going on."""
    outcomes: list[Outcome] = []
    async with helpers() as others:
        for part in suite:
            if isinstance(part, Steps):
                outcomes += await _run_steps(name, part, effort, others, say)
            else:
                outcomes += await _run_group(name, part, effort, others, say)
    return outcomes


async def _run_group(
    name: str, group: Group, effort: Effort, others: Helpers, say: Say
) -> list[Outcome]:
    cells = {cell: _wireless(cell) for cell in group.cells}
    wanted = list(dict.fromkeys(cells.values()))
    ks = {cell: _lockstep_k(cell, say) for cell in wanted if cell.scheme.is_lockstep}
    runs: dict[Cell, list[Measurement]] = {cell: [] for cell in wanted}
    for number in range(effort.runs):
        for cell in wanted:
            where = f"{name}: {group.title}, RTT {cell.setting.rtt_ms:g} ms"
            say(f"{where}, {cell.scheme.name}, run {number + 1}")
            measured = await _measure(cell, ks.get(cell, 0), number, effort, others)
            runs[cell].append(measured)
    outcomes = []
    for cell, wireless in cells.items():
        rtt_ms = await _rtt_ms(cell, others)
        outcome = Outcome(name, group.title, group.baseline, cell, tuple(runs[wireless]), rtt_ms)
        outcomes.append(outcome)
    return outcomes


def _wireless(cell: Cell) -> Cell:
    """The same cell for all round trips where there is no wire."""
    if cell.scheme.kind in (Kind.NO_DRAFT, Kind.COLOCATED):
        return Cell(replace(cell.setting, rtt_ms=0.0), cell.scheme)
    return cell


async def _rtt_ms(cell: Cell, others: Helpers) -> float | None:
    if cell.scheme.kind is not Kind.OURS:
        return None
    return (await others.wire(cell.setting)).measured_rtt_ms


async def _measure(
    cell: Cell, lockstep_k: int, run: int, effort: Effort, others: Helpers
) -> Measurement:
    setting, scheme = cell.setting, cell.scheme
    if scheme.is_lockstep:
        loop = LockStep(setting, lockstep_k, setting.rtt_ms, run)
        return loop.measure(_PLAIN_WARMUP_S, effort.seconds)
    warmup_s = _PLAIN_WARMUP_S if scheme.kind is Kind.NO_DRAFT else effort.warmup_s
    async with service(setting, scheme, others, setting.batch, run) as running:
        await running.set_concurrency(setting.batch)
        return await running.measure(warmup_s, effort.seconds)


def _lockstep_k(cell: Cell, say: Say) -> int:
    """The best by the formula, unless a neighbor is measured to be clearly better."""
    if cell.scheme.k is not None:
        return cell.scheme.k
    setting = cell.setting
    acceptance = setting.acceptance or 0.0
    best = formulas.best_lockstep_k(setting.costs, acceptance, setting.batch, setting.rtt_ms)
    rates = {}
    for k in range(max(1, best - 1), min(formulas.MAX_LOCKSTEP_K, best + 1) + 1):
        say(f"the best K of {cell.scheme.name}: {k}?")
        loop = LockStep(setting, k, setting.rtt_ms)
        rates[k] = loop.measure(_K_PROBE_S / 4, _K_PROBE_S).tokens_per_s
    found = max(rates, key=lambda k: rates[k])
    return found if rates[found] > (1 + _MIN_K_GAIN) * rates[best] else best


async def _run_steps(
    name: str, part: Steps, effort: Effort, others: Helpers, say: Say
) -> list[Outcome]:
    """Each scheme goes through all steps in one service, and then the next."""
    found: dict[tuple[int, Scheme], list[Measurement]] = {}
    for number in range(effort.runs):
        for scheme in part.schemes:
            num_seqs = part.setting.batch
            async with service(part.setting, scheme, others, num_seqs, number) as running:
                for step, num_clients in enumerate(part.concurrency):
                    say(f"{name}: {num_clients} clients, {scheme.name}, run {number + 1}")
                    await running.set_concurrency(num_clients)
                    measured = await running.measure(effort.warmup_s, effort.seconds)
                    found.setdefault((step, scheme), []).append(measured)
    outcomes = []
    for (step, scheme), runs in sorted(found.items(), key=lambda item: item[0][0]):
        cell = Cell(replace(part.setting, batch=part.concurrency[step]), scheme)
        title = f"{part.title}: step {step + 1}, {part.concurrency[step]} clients"
        rtt_ms = await _rtt_ms(cell, others)
        outcome = Outcome(name, title, Kind.NO_DRAFT.value, cell, tuple(runs), rtt_ms, step)
        outcomes.append(outcome)
    return outcomes
