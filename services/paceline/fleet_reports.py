"""What replicas tell the Controller, and what it answers: plain data, checked where it is read.

A report is a dict of plain values on the way, so that replicas of two releases understand each
other while one replaces the other: unknown names are ignored, missing ones have defaults. Both
ends use this module. It does not know Ray, time or what anybody does with a report.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.methods import SOURCES
from paceline.metrics.catalog import OF_ROLE
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot, read_snapshot
from paceline.protocol.lookahead import (
    AcceptanceClass,
    Choice,
    ClassCounts,
    Explanation,
    Guidance,
)
from paceline.report_values import MAX_NAME_CHARS as MAX_NAME_CHARS
from paceline.report_values import MAX_NUMBER, MAX_SENTENCE_CHARS, Values, listed
from paceline.report_values import ReportError as ReportError
from paceline.sampling.params import VerificationMode

Plain = dict[str, Any]

# What one report may hold. An honest replica stays below; what is longer is cut where the rest is
# of use (the heaviest classes, the first positions), and refused where it is not (names).
MAX_CONNECTED = 1024
MAX_BREAKERS = 256
MAX_CLASSES = 32
MAX_POSITIONS = 64
MAX_INPUTS = 64
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What is scarce: limits of one target beside those of its deployment. None: no limit."""

    max_draft_ahead: int | None = None
    max_fan_out: int | None = None
    max_num_speculative_tokens: int | None = None

    def plain(self) -> Plain:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @staticmethod
    def read(data: object) -> Ceilings:
        values = Values(data)
        return Ceilings(
            values.maybe_whole("max_draft_ahead"),
            values.maybe_whole("max_fan_out"),
            values.maybe_whole("max_num_speculative_tokens"),
        )


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One heartbeat of a target. `address` is host:port of its Speculation server.

    `num_speculative_tokens`: the K in force (mean over sequences); the three `max_` are its
    deployment's. `batch`: decoding sequences per pass since the last beat, `pass_ms`: what a pass
    took (0: there was none). `wanted`, `missing`: the policy's `StarvationCounts`; `num_busy`: BUSY
    answers of drafts; both since its start.
    `ceilings` are those that it obeys now. `explanation` comes with some beats only.
    `config_error`: why its last `user_config` was not taken.

    Since the last beat, None where there is nothing to divide by: `busy_share` of the time that
    passes took, `tokens_per_s`, `acceptance_rate`; `sources`: each one's share of the proposals
    that were verified, without those that have none. Now: `kv_cache_usage`, the mean number of
    proposals in a `window`, `rtt_ms` to its farthest draft, the state of each attached draft's
    circuit breaker, and whether speculation pays (`speculation_state`). `metrics` is everything
    that it counts, since its start.
    """

    replica_id: str
    boot_id: str
    address: str
    pid: int
    num_running: int = 0
    num_waiting: int = 0
    num_drafts: int = 0
    is_draining: bool = False
    batch: float = 0.0
    num_speculative_tokens: float = 0.0
    max_num_speculative_tokens: int = 0
    max_draft_ahead: int = 0
    max_fan_out: int = 0
    wanted: float = 0.0
    missing: float = 0.0
    num_busy: int = 0
    class_counts: Mapping[AcceptanceClass, ClassCounts] = field(default_factory=dict)
    ceilings: Ceilings = Ceilings()
    explanation: Explanation | None = None
    config_error: str = ""
    pass_ms: float = 0.0
    kv_cache_usage: float | None = None
    busy_share: float | None = None
    tokens_per_s: float | None = None
    acceptance_rate: float | None = None
    window: float | None = None
    rtt_ms: float | None = None
    speculation_state: str = ""
    breakers: Mapping[str, str] = field(default_factory=dict)
    metrics: Snapshot = field(default_factory=lambda: Snapshot(Role.TARGET))
    sources: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> Plain:
        return {
            **_flat(self),
            "breakers": dict(self.breakers),
            "sources": dict(self.sources),
            "metrics": self.metrics.plain(),
            "class_counts": plain_counts(self.class_counts),
            "ceilings": self.ceilings.plain(),
            "explanation": plain_explanation(self.explanation),
        }

    @staticmethod
    def read(data: object) -> TargetReport:
        """Raises ReportError."""
        values = Values(data)
        return TargetReport(
            replica_id=values.name("replica_id"),
            boot_id=values.name("boot_id"),
            address=values.name("address"),
            pid=values.whole("pid"),
            num_running=values.whole("num_running"),
            num_waiting=values.whole("num_waiting"),
            num_drafts=values.whole("num_drafts"),
            is_draining=values.flag("is_draining"),
            batch=values.number("batch"),
            num_speculative_tokens=values.number("num_speculative_tokens"),
            max_num_speculative_tokens=values.whole("max_num_speculative_tokens"),
            max_draft_ahead=values.whole("max_draft_ahead"),
            max_fan_out=values.whole("max_fan_out"),
            wanted=values.number("wanted"),
            missing=values.number("missing"),
            num_busy=values.whole("num_busy"),
            class_counts=read_counts(values.get("class_counts", ())),
            ceilings=Ceilings.read(values.get("ceilings", {})),
            explanation=read_explanation(values.get("explanation")),
            config_error=values.sentence("config_error"),
            pass_ms=values.number("pass_ms"),
            kv_cache_usage=values.maybe_number("kv_cache_usage"),
            busy_share=values.maybe_number("busy_share"),
            tokens_per_s=values.maybe_number("tokens_per_s"),
            acceptance_rate=values.maybe_number("acceptance_rate"),
            window=values.maybe_number("window"),
            rtt_ms=values.maybe_number("rtt_ms"),
            speculation_state=values.sentence("speculation_state"),
            breakers=values.words("breakers", MAX_BREAKERS),
            metrics=read_snapshot(values.get("metrics"), Role.TARGET, OF_ROLE[Role.TARGET]),
            sources=values.figures("sources", SOURCES),
        )


@dataclass(frozen=True, slots=True)
class DraftReport:
    """One heartbeat of a draft. `connected` lists the target addresses with a live stream.

    Since the last beat: `busy_share` of the time its engine was computing (None: unknown),
    `num_drafted_tokens`, `tokens_per_s` of them (None: unknown), and per pass `step_ms` and
    `batch` (sequences). `metrics` is everything that it counts, since its start.
    """

    replica_id: str
    boot_id: str
    pid: int
    max_sessions: int
    num_sessions: int = 0
    connected: tuple[str, ...] = ()
    is_draining: bool = False
    busy_share: float | None = None
    num_drafted_tokens: int = 0
    step_ms: float = 0.0
    batch: float = 0.0
    tokens_per_s: float | None = None
    metrics: Snapshot = field(default_factory=lambda: Snapshot(Role.DRAFT))

    def plain(self) -> Plain:
        return {
            **_flat(self),
            "connected": list(self.connected),
            "metrics": self.metrics.plain(),
        }

    @staticmethod
    def read(data: object) -> DraftReport:
        """Raises ReportError."""
        values = Values(data)
        busy_share = values.get("busy_share")
        return DraftReport(
            replica_id=values.name("replica_id"),
            boot_id=values.name("boot_id"),
            pid=values.whole("pid"),
            max_sessions=values.whole("max_sessions"),
            num_sessions=values.whole("num_sessions"),
            connected=values.names("connected", MAX_CONNECTED),
            is_draining=values.flag("is_draining"),
            busy_share=None if busy_share is None else min(1.0, values.number("busy_share")),
            num_drafted_tokens=values.whole("num_drafted_tokens"),
            step_ms=values.number("step_ms"),
            batch=values.number("batch"),
            tokens_per_s=values.maybe_number("tokens_per_s"),
            metrics=read_snapshot(values.get("metrics"), Role.DRAFT, OF_ROLE[Role.DRAFT]),
        )


# -- guidance -----------------------------------------------------------------------------------


def plain_guidance(priors: Mapping[AcceptanceClass, ClassCounts], ceilings: Ceilings) -> Plain:
    return {"priors": plain_counts(priors), "ceilings": ceilings.plain()}


def read_guidance(data: object) -> tuple[Mapping[AcceptanceClass, ClassCounts], Ceilings]:
    """Raises ReportError."""
    values = Values(data)
    return read_counts(values.get("priors", ())), Ceilings.read(values.get("ceilings", {}))


def guidance(priors: Mapping[AcceptanceClass, ClassCounts], ceilings: Ceilings) -> Guidance:
    """For the policy."""
    return Guidance(
        priors=priors,
        max_draft_ahead=ceilings.max_draft_ahead,
        max_num_speculative_tokens=ceilings.max_num_speculative_tokens,
        max_fan_out=ceilings.max_fan_out,
    )


# -- class counts -------------------------------------------------------------------------------


def plain_counts(counts: Mapping[AcceptanceClass, ClassCounts]) -> list[Plain]:
    """The MAX_CLASSES heaviest, the first MAX_POSITIONS of each."""
    heaviest = sorted(counts.items(), key=lambda item: (-_weight(item[1]), _class_key(item[0])))
    return [
        {
            "draft_model": kind.draft_model,
            "mode": kind.mode.value,
            "temperature": kind.temperature,
            "reached": list(each.reached[:MAX_POSITIONS]),
            "accepted": list(each.accepted[:MAX_POSITIONS]),
        }
        for kind, each in heaviest[:MAX_CLASSES]
    ]


def read_counts(data: object) -> dict[AcceptanceClass, ClassCounts]:
    """Raises ReportError; more than MAX_CLASSES or MAX_POSITIONS are cut."""
    out: dict[AcceptanceClass, ClassCounts] = {}
    for entry in listed(data, "class_counts")[:MAX_CLASSES]:
        values = Values(entry)
        try:
            mode = VerificationMode(values.name("mode"))
        except ReportError:
            raise
        except ValueError:
            continue  # of another release: nobody here could use it
        kind = AcceptanceClass(values.name("draft_model"), mode, values.number("temperature"))
        reached = values.numbers("reached", MAX_POSITIONS)
        accepted = values.numbers("accepted", MAX_POSITIONS)
        if len(reached) != len(accepted):
            raise ReportError("class_counts: reached and accepted differ in length")
        out[kind] = ClassCounts(reached, accepted)
    return out


def acceptance_rate(counts: ClassCounts) -> float:
    """Accepted share of the proposals that were reached; 0 where there were none."""
    reached = sum(counts.reached)
    return sum(counts.accepted) / reached if reached else 0.0


def _weight(counts: ClassCounts) -> float:
    return counts.reached[0] if counts.reached else 0.0


def _class_key(kind: AcceptanceClass) -> tuple[str, str, float]:
    return (kind.draft_model, kind.mode.value, kind.temperature)


# -- explanations -------------------------------------------------------------------------------


def plain_explanation(explanation: Explanation | None) -> Plain | None:
    if explanation is None:
        return None
    return {
        "inputs": {name: _finite(value) for name, value in explanation.inputs.items()},
        "choices": [
            {
                "num_speculative_tokens": _finite(choice.num_speculative_tokens),
                "rows": choice.rows,
                "tokens_per_pass": _finite(choice.tokens_per_pass),
                "pass_us": _finite(choice.pass_us),
            }
            for choice in explanation.choices[:MAX_CHOICES]
        ],
        "chosen": explanation.chosen,
        "reason": explanation.reason[:MAX_SENTENCE_CHARS],
    }


def read_explanation(data: object) -> Explanation | None:
    """Raises ReportError."""
    if data is None:
        return None
    values = Values(data)
    inputs = Values(values.get("inputs", {}))
    choices = tuple(
        _read_choice(Values(c)) for c in listed(values.get("choices", ()), "choices")[:MAX_CHOICES]
    )
    return Explanation(
        inputs={name[:MAX_NAME_CHARS]: inputs.signed(name) for name in inputs.keys(MAX_INPUTS)},
        choices=choices,
        chosen=values.whole("chosen"),
        reason=values.sentence("reason"),
    )


def _read_choice(values: Values) -> Choice:
    return Choice(
        values.number("num_speculative_tokens"),
        values.whole("rows"),
        values.number("tokens_per_pass"),
        values.number("pass_us"),
    )


def _finite(value: float) -> float:
    """Predictions may be infinite (no gain to be had); a report holds numbers only."""
    return max(-MAX_NUMBER, min(MAX_NUMBER, value)) if not math.isnan(value) else 0.0


def _flat(report: TargetReport | DraftReport) -> Plain:
    return {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
