"""Which schemes meet in which settings: the benchmark's runs by name. Values only.

The cells of a group are measured in turn (A B C A B C ...), so that whatever else the machine
does hits all of them alike. Figures of different groups are not comparable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.bench.ceiling import Costs
from paceline.bench.schemes import CORRECTIONS, Cell, Effort, Kind, Scheme, Setting, steady
from paceline.engine.scripted import Phase, Script

NO_DRAFT = Scheme(Kind.NO_DRAFT)
COLOCATED = Scheme(Kind.COLOCATED)
DISAGGREGATED = Scheme(Kind.DISAGGREGATED)

RTTS_MS = (0.5, 2.0, 10.0)
ACCEPTANCES = (0.6, 0.75, 0.9)
BATCHES = (1, 8, 32, 64)
FIXED_KS = (1, 2, 3, 4, 6, 8)
STEPS = (1, 4, 16, 64, 16, 4, 1)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line may change."""

    costs: Costs = field(default_factory=Costs)
    corrections: tuple[float, ...] = CORRECTIONS
    fan_out: int = 2


@dataclass(frozen=True, slots=True)
class Group:
    """`baseline`: the scheme that the others' ratios refer to, beside no draft."""

    title: str
    cells: tuple[Cell, ...]
    baseline: str = Kind.COLOCATED.value


@dataclass(frozen=True, slots=True)
class Steps:
    """One service, and so many clients at a time, one number after the other."""

    title: str
    setting: Setting
    schemes: tuple[Scheme, ...]
    concurrency: tuple[int, ...] = STEPS


Suite = tuple[Group | Steps, ...]


def _ours(options: Options, k: int | None = None, label: str = "") -> Scheme:
    return Scheme(Kind.OURS, k, options.fan_out, label)


def _grid(
    options: Options,
    batches: tuple[int, ...],
    acceptances: tuple[float, ...],
    rtts_ms: tuple[float, ...],
) -> Suite:
    """A group per batch and acceptance. What has no wire is measured once for all round trips."""
    groups = []
    for batch in batches:
        for acceptance in acceptances:
            cells = []
            for rtt_ms in rtts_ms:
                setting = steady(options.costs, rtt_ms, batch, acceptance, options.corrections)
                for scheme in (NO_DRAFT, COLOCATED, DISAGGREGATED, _ours(options)):
                    cells.append(Cell(setting, scheme))
            groups.append(Group(f"batch {batch}, acceptance {acceptance:g}", tuple(cells)))
    return tuple(groups)


def quick(options: Options) -> Suite:
    return _grid(options, (1, 8, 32), (0.75,), (0.5, 10.0))


def grid(options: Options) -> Suite:
    return _grid(options, BATCHES, ACCEPTANCES, RTTS_MS)


def single(options: Options) -> Suite:
    """A lone stream and a full batch; ours with and without prepared corrections."""
    chain = replace(_ours(options), fan_out=0, label="ours_chain")
    fans = [
        replace(chain, fan_out=fan_out, label=f"ours_fan_out_{fan_out}")
        for fan_out in range(1, max(options.fan_out, 2) + 1)
    ]
    groups = []
    for batch in (1, 32):
        setting = steady(options.costs, 0.5, batch, 0.75, options.corrections)
        schemes = (NO_DRAFT, COLOCATED, DISAGGREGATED, chain, *fans)
        cells = tuple(Cell(setting, scheme) for scheme in schemes)
        groups.append(Group(f"batch {batch}", cells))
    return tuple(groups)


def drifting(options: Options) -> Setting:
    """Texts of four kinds side by side; two of them change sides as they go on. Rows cost more,
    so that it matters who gets them."""
    good, bad = Phase(96, 0.9), Phase(96, 0.3)
    classes = ((good, bad), (bad, good), (Phase(1, 0.6),), (Phase(1, 0.05),))
    costs = replace(options.costs, verify_row_ms=6 * options.costs.verify_row_ms)
    script = Script(classes, options.corrections)
    return Setting(costs, 0.5, 16, None, script, max_tokens=384, name="drifting mix")


def adaptive(options: Options) -> Suite:
    costly = replace(options.costs, verify_row_ms=10 * options.costs.verify_row_ms)
    c = options.corrections
    settings = (
        steady(options.costs, 0.5, 1, 0.6, c),
        steady(options.costs, 0.5, 1, 0.9, c),
        steady(options.costs, 0.5, 8, 0.75, c),
        steady(options.costs, 0.5, 32, 0.9, c),
        steady(options.costs, 10.0, 16, 0.75, c),
        steady(costly, 0.5, 32, 0.6, c),
        drifting(options),
    )
    fixed = [_ours(options, k, f"fixed_{k}") for k in FIXED_KS]
    schemes = (NO_DRAFT, *fixed, _ours(options, label="adaptive"))
    return tuple(
        Group(
            setting.name
            or f"batch {setting.batch}, acceptance {setting.acceptance:g}, "
            f"RTT {setting.rtt_ms:g} ms, {setting.costs.verify_row_ms:g} ms a row",
            tuple(Cell(setting, scheme) for scheme in schemes),
            baseline="best fixed",
        )
        for setting in settings
    )


def adversarial(options: Options) -> Suite:
    """Where a draft can only do harm."""
    ours = _ours(options)
    hopeless = [
        Group(
            f"acceptance 0, batch {batch}",
            tuple(
                Cell(steady(options.costs, 0.5, batch, 0.0, (0.0,)), scheme)
                for scheme in (NO_DRAFT, ours)
            ),
        )
        for batch in BATCHES
    ]
    fast = replace(options.costs, verify_ms=10.0)
    far = [
        Group(
            f"RTT 50 ms, target 10 ms, batch {batch}",
            tuple(
                Cell(steady(fast, 50.0, batch, 0.75, options.corrections), scheme)
                for scheme in (NO_DRAFT, ours)
            ),
        )
        for batch in (1, 8)
    ]
    return (*hopeless, *far)


def steps(options: Options) -> Suite:
    setting = steady(options.costs, 0.5, max(STEPS), 0.75, options.corrections)
    setting = replace(setting, max_tokens=256)
    return (Steps("concurrency in steps", setting, (NO_DRAFT, _ours(options))),)


SUITES: dict[str, Callable[[Options], Suite]] = {
    "quick": quick,
    "grid": grid,
    "single": single,
    "adaptive": adaptive,
    "adversarial": adversarial,
    "steps": steps,
}
EFFORTS = {
    "quick": Effort(runs=2, warmup_s=1.0, seconds=2.0),
    "grid": Effort(runs=3, warmup_s=1.5, seconds=3.0),
    "single": Effort(runs=5, warmup_s=3.0, seconds=10.0),
    "adaptive": Effort(runs=3, warmup_s=2.0, seconds=4.0),
    "adversarial": Effort(runs=3, warmup_s=2.0, seconds=5.0),
    "steps": Effort(runs=3, warmup_s=1.0, seconds=3.0),
}
