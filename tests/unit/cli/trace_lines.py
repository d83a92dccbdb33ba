"""Traces as our processes write them, made up: a request of several rounds, with drafts or not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
BEGAN_MS = 1_764_489_600_000.0
SERVER, INTERNAL = 2, 1

Json = dict[str, Any]


def value_of(value: object) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}


def attributes_of(given: Mapping[str, object]) -> list[Json]:
    return [{"key": key, "value": value_of(value)} for key, value in given.items()]


def line_of(service: str, spans: Sequence[Json]) -> str:
    resource = {"attributes": attributes_of({"service.name": service})}
    scopes = [{"scope": {"name": "paceline"}, "spans": list(spans)}]
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}) + "\n"


@dataclass
class Made:
    """Spans of one trace by service; times in milliseconds from its begin."""

    trace_id: str = TRACE_ID
    began_ms: float = BEGAN_MS
    spans: dict[str, list[Json]] = field(default_factory=dict)
    count: int = 0

    def span(
        self,
        service: str,
        name: str,
        parent: str,
        began_ms: float,
        ended_ms: float,
        kind: int = INTERNAL,
        **attributes: object,
    ) -> str:
        """The id of a new span. In names of attributes __ stands for a dot."""
        self.count += 1
        given = {key.replace("__", "."): value for key, value in attributes.items()}
        made = {
            "traceId": self.trace_id,
            "spanId": f"{self.count:016x}",
            "parentSpanId": parent,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": self._time(began_ms),
            "endTimeUnixNano": self._time(ended_ms),
            "attributes": attributes_of(given),
            "status": {},
        }
        self.spans.setdefault(f"paceline-{service}", []).append(made)
        return f"{self.count:016x}"

    def _time(self, ms: float) -> str:
        return str(round(self.began_ms) * 1_000_000 + round(ms * 1e6))

    def all(self) -> list[Json]:
        return [span for spans in self.spans.values() for span in spans]

    def named(self, name: str) -> list[Json]:
        return [span for span in self.all() if span["name"] == name]

    def lines(self, per_line: int = 32) -> Iterator[tuple[str, str]]:
        """(service, line), spans in the order in which they ended."""
        for service, spans in self.spans.items():
            order = sorted(spans, key=lambda span: int(span["endTimeUnixNano"]))
            for first in range(0, len(order), per_line):
                yield service, line_of(service, order[first : first + per_line])

    def write(self, folder: Path) -> None:
        for service, line in self.lines():
            with (folder / f"{service}-7.jsonl").open("a") as file:
                file.write(line)


@dataclass
class Choice:
    """How one choice of a request goes."""

    made: Made
    gateway: str
    draws: random.Random
    number: int = 0
    k: int = 4
    is_drafted: bool = True
    source: str = ""

    def run(self, at_ms: float, num_rounds: int) -> float:
        """From when the target got it; returns when its last pass ended."""
        began_ms = at_ms
        self.made.count += 1
        session = f"{self.made.count:016x}"
        kept_all = False
        for number in range(1, num_rounds + 1):
            at_ms, kept_all = self._round(session, number, at_ms, kept_all)
        named = self.made.span(
            "target", "session", self.gateway, began_ms, at_ms, paceline__choice=self.number,
            paceline__mode="coupled", paceline__replica_id="default#Target#a1b2c3",
        )  # fmt: skip
        self.made.spans["paceline-target"][-1]["spanId"] = session
        assert named
        return at_ms

    def _round(self, session: str, number: int, at_ms: float, kept_all: bool) -> tuple[float, bool]:
        self.made.count += 1
        span_id, made, draws = f"{self.made.count:016x}", self.made, self.draws
        began_ms, proposed = at_ms, 0
        if self.is_drafted and number > 1:
            proposed = self.k
            back = draws.uniform(0.6, 1.4)
            made.span("draft", "wire_back", span_id, at_ms, at_ms + back)
            at_ms += back
            if not kept_all:
                rewind = draws.uniform(0.2, 0.5)
                made.span("draft", "rewind", span_id, at_ms, at_ms + rewind)
                at_ms += rewind
            for _ in range(1 if kept_all else proposed):
                took = draws.uniform(1.8, 2.6)
                made.span("draft", "draft", span_id, at_ms, at_ms + took, paceline__num_tokens=1)
                at_ms += took
            out = draws.uniform(0.6, 1.6)
            made.span("target", "wire_out", span_id, at_ms, at_ms + out)
            at_ms += out
            waited = draws.uniform(0.1, 3.0)
            made.span("target", "window", span_id, at_ms, at_ms + waited)
            at_ms += waited
        queued = draws.uniform(0.2, 4.0)
        made.span("target", "queue", span_id, at_ms, at_ms + queued)
        at_ms += queued
        verify = draws.uniform(20, 25) if number > 1 else 38.0
        made.span("target", "verify", span_id, at_ms, at_ms + verify)
        ahead = at_ms + 1.0
        for _ in range(3 if self.is_drafted and number > 1 else 0):
            made.span("draft", "draft", span_id, ahead, ahead + 2.0, paceline__num_tokens=1)
            ahead += 2.1
        at_ms += verify
        sample = draws.uniform(0.3, 0.8)
        made.span("target", "sample", span_id, at_ms, at_ms + sample)
        at_ms += sample
        accepted = sum(draws.random() < 0.9 for _ in range(proposed)) if proposed else 0
        made.span(
            "target", "round", session, began_ms, at_ms, paceline__round=number,
            paceline__k=self.k, paceline__proposed=proposed, paceline__accepted=accepted,
            paceline__num_tokens=accepted + 1, paceline__batch_size=draws.randint(1, 8),
            paceline__num_rows=draws.randint(5, 40), paceline__epoch=1,
            paceline__replica_id="default#Target#a1b2c3",
            paceline__source=self.source if proposed else "",
            paceline__draft_replica_id="default#Draft#d4e5f6" if proposed else "",
        )  # fmt: skip
        self.made.spans["paceline-target"][-1]["spanId"] = span_id
        return at_ms, proposed > 0 and accepted == proposed


def make_trace(
    num_rounds: int = 12,
    num_choices: int = 1,
    seed: int = 1,
    trace_id: str = TRACE_ID,
    began_ms: float = BEGAN_MS,
    is_drafted: bool = True,
    model: str = "smollm2-135m",
    source: str = "",
) -> Made:
    """One request: 2 ms to the target, its rounds, 1.5 ms back."""
    made = Made(trace_id, began_ms)
    made.count = seed << 32
    gateway = f"{made.count:016x}"
    draws = random.Random(seed)
    ends = [
        Choice(made, gateway, draws, number, is_drafted=is_drafted, source=source).run(
            2.0, num_rounds
        )
        for number in range(num_choices)
    ]
    made.span(
        "gateway", f"chat {model}", CLIENT_SPAN, 0.0, max(ends) + 1.5, SERVER,
        gen_ai__operation__name="chat", gen_ai__request__model=model,
        gen_ai__usage__input_tokens=31, paceline__request_id="chatcmpl-1f",
        gen_ai__response__time_to_first_chunk=0.0415,
    )  # fmt: skip
    made.spans["paceline-gateway"][-1]["spanId"] = gateway
    return made
