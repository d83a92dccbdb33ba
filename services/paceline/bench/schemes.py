"""What the orchestration benchmark compares: settings, schemes, and what a run of one says.

Values only. Knows no engine, process or clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.bench.ceiling import Costs
from paceline.engine.base import EngineInfo
from paceline.engine.scripted import Script, ScriptedEngine
from paceline.engine.timed import TimedEngine
from paceline.protocol.draft_branches import MAX_BRANCHES

VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
# Where the draft was wrong, the target's token is among its first n runner-ups so often: measured
# on Qwen2.5-Coder 1.5B / 0.5B logits at .47, .66 and (first four) .85.
CORRECTIONS = (0.5, 0.66, 0.76, 0.85)


class Kind(StrEnum):
    """Who drafts, and where."""

    NO_DRAFT = "no_draft"
    COLOCATED = "colocated_lockstep"
    DISAGGREGATED = "disaggregated_lockstep"
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Scheme:
    """`k` None: adaptive (ours), or the best one (lock-step). `name` is its name in rows."""

    kind: Kind
    k: int | None = None
    fan_out: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.kind.value

    @property
    def is_lockstep(self) -> bool:
        return self.kind in (Kind.COLOCATED, Kind.DISAGGREGATED)


@dataclass(frozen=True, slots=True)
class Setting:
    """A machine, a pair of models and a load. `acceptance` None: `script` has several classes,
    and no formula says what is possible. `max_tokens`: length of each request."""

    costs: Costs
    rtt_ms: float
    batch: int
    acceptance: float | None
    script: Script
    max_tokens: int = 1024
    name: str = ""


def steady(
    costs: Costs,
    rtt_ms: float,
    batch: int,
    acceptance: float,
    corrections: tuple[float, ...] = CORRECTIONS,
) -> Setting:
    return Setting(costs, rtt_ms, batch, acceptance, Script.steady(acceptance, corrections))


@dataclass(frozen=True, slots=True)
class Cell:
    """One scheme in one setting: what is measured again and again."""

    setting: Setting
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Effort:
    """`runs` of each cell; each is warm after `warmup_s` and measured for `seconds`."""

    runs: int
    warmup_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a cell. `pass_ms` and `gap_ms` are the means of a target pass and of the time
    between two; `draft_busy` the share of time that the draft computed; `num_late` passes whose
    engine needed more than their cost; `num_failures` requests that ended in an error."""

    tokens_per_s: float
    target_busy: float
    tokens_per_pass: float
    rows_per_pass: float
    pass_ms: float
    gap_ms: float
    k: float | None = None
    predicted_tokens_per_s: float | None = None
    draft_busy: float | None = None
    num_late: int = 0
    num_failures: int = 0
    counts: dict[str, float] = field(default_factory=dict)


PROMPT_LEN = 4


def prompt(place: int, number: int, run: int) -> tuple[int, ...]:
    """Of the `number`-th request, by a client or sequence at `place`, which is its class too.

    The same in all schemes of a run, and so are the texts and where the draft is right: what one
    scheme is lucky with, the others are, too.
    """
    return (place, number // 1000, number % 1000, run)


def target_engine(costs: Costs, max_len: int, num_seqs: int) -> TimedEngine:
    engine = ScriptedEngine(engine_info("scripted-target", max_len, num_seqs))
    return TimedEngine(engine, base_ms=costs.verify_ms, row_ms=costs.verify_row_ms)


def draft_engine(costs: Costs, script: Script, max_len: int, num_seqs: int) -> TimedEngine:
    engine = ScriptedEngine(engine_info("scripted-draft", max_len, num_seqs), script)
    return TimedEngine(engine, base_ms=costs.draft_ms, row_ms=costs.draft_row_ms)


def engine_info(model_id: str, max_len: int, num_seqs: int) -> EngineInfo:
    """With room for all and their branches, of which this engine does not count what they share
    with the main text: this benchmark is not about memory."""
    num_blocks = (max_len // BLOCK_SIZE + 2) * (num_seqs + 1) * (2 + MAX_BRANCHES)
    return EngineInfo(model_id, VOCAB_SIZE, max_len, BLOCK_SIZE, num_blocks, "scripted")
