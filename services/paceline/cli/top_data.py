"""What `paceline top` shows, from what a service says: rates between two looks, a bounded history,
who serves whom. Pure: time is an argument. Knows neither network nor terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cli.fleet_pools import targets_of
from paceline.cli.values import Json, dicts, listed, mapping, number, whole, word

# Looks that are remembered; a wide terminal shows no more.
MAX_HISTORY = 240
# The names that vLLM exports.
GENERATED = "vllm:generation_tokens_total"
PROPOSED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
COUNTERS = (GENERATED, PROPOSED, ACCEPTED)

DIALLING = "dialling"
HEALTHY = "closed"  # of a circuit breaker, as in target/breaker.py


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at a time: the fleet, and counters summed over the models. None: no answer."""

    now_s: float
    fleet: Json | None = None
    counters: Mapping[str, float] | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Rates:
    """Between two looks. None: not known, or nothing to divide by."""

    tokens_per_s: float | None = None
    acceptance_rate: float | None = None
    num_speculative_tokens: float | None = None
    num_running: int = 0
    num_waiting: int = 0

    def plain(self) -> Json:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class History:
    """Invariant: each line is at most MAX_HISTORY long. A look without a value leaves a gap."""

    last: Look | None = None
    tokens_per_s: deque[float | None] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    acceptance_rate: deque[float | None] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    num_speculative_tokens: deque[float | None] = field(
        default_factory=lambda: deque(maxlen=MAX_HISTORY)
    )

    def receive(self, look: Look) -> Rates:
        rates = rates_between(self.last, look)
        # The first look has no past: a gap at the start would say that something was missing.
        if self.last is not None:
            self.tokens_per_s.append(rates.tokens_per_s)
            self.acceptance_rate.append(rates.acceptance_rate)
            self.num_speculative_tokens.append(rates.num_speculative_tokens)
        self.last = look
        return rates


def read_counters(text: str) -> dict[str, float] | None:
    """Sums over the labels of what we know; None for what is no Prometheus text."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in COUNTERS:
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except (ValueError, LookupError):
        return None
    return sums


def rates_between(before: Look | None, now: Look) -> Rates:
    targets = targets_of(now.fleet or {})
    generated = _gained(GENERATED, before, now)
    seconds = now.now_s - before.now_s if before else 0.0
    return Rates(
        tokens_per_s=generated / seconds if generated is not None and seconds > 0 else None,
        acceptance_rate=_acceptance_rate(before, now, targets),
        num_speculative_tokens=_mean_k(targets),
        num_running=sum(whole(target.get("num_running")) for target in targets),
        num_waiting=sum(whole(target.get("num_waiting")) for target in targets),
    )


def _gained(name: str, before: Look | None, now: Look) -> float | None:
    """None, too, where another gateway process has answered, or the old one began anew."""
    if before is None or before.counters is None or now.counters is None:
        return None
    if name not in before.counters or name not in now.counters:
        return None
    gained = now.counters[name] - before.counters[name]
    return gained if gained >= 0 else None


def _acceptance_rate(before: Look | None, now: Look, targets: list[Json]) -> float | None:
    """Of the proposals since the last look; without metrics, of all that targets remember."""
    proposed, accepted = (_gained(name, before, now) for name in (PROPOSED, ACCEPTED))
    if proposed is not None and accepted is not None:
        return min(1.0, accepted / proposed) if proposed else None
    pairs = [
        (number(kind.get("num_draft_tokens")) or 0.0, number(kind.get("acceptance_rate")) or 0.0)
        for target in targets
        for kind in dicts(target.get("classes"))
    ]
    weight = sum(num for num, _ in pairs)
    return sum(num * rate for num, rate in pairs) / weight if weight > 0 else None


def _mean_k(targets: list[Json]) -> float | None:
    """Over the targets that have something to do; over all when none has."""
    busy = [target for target in targets if whole(target.get("num_running"))]
    known = [number(target.get("num_speculative_tokens")) for target in busy or targets]
    values = [value for value in known if value is not None]
    return sum(values) / len(values) if values else None


def link_state(target: Json, draft: Json | None) -> str:
    """Of a target to a draft that is assigned to it; empty when all is well."""
    if draft is None:
        return ""
    state = mapping(target.get("breakers")).get(word(draft.get("replica_id")))
    if state is not None and state != HEALTHY:
        return word(state)
    return "" if target.get("address") in listed(draft.get("connected")) else DIALLING


def look_json(look: Look, rates: Rates, url: str) -> dict[str, Any]:
    """One refresh as `--json` prints it."""
    return {
        "time_s": round(look.now_s, 3),
        "url": url,
        "problem": look.problem or None,
        "rates": rates.plain(),
        "fleet": look.fleet,
        "counters": None if look.counters is None else dict(look.counters),
    }
