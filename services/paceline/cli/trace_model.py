"""A traced request: its rounds, their stages, and who did what. Pure; knows no file and no sign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

from paceline.cli.trace_spans import Span
from paceline.round_times import Interval, RoundTimes, Stage

# In the order in which a round goes through them.
STAGES = (
    *(Stage.WIRE_BACK, Stage.REWIND, Stage.DRAFT, Stage.WIRE_OUT),
    *(Stage.WINDOW, Stage.QUEUE, Stage.VERIFY, Stage.SAMPLE),
)
LANES: Mapping[str, tuple[Stage, ...]] = {
    "draft": (Stage.DRAFT, Stage.REWIND),
    "wire": (Stage.WIRE_OUT, Stage.WIRE_BACK),
    "target": (Stage.WINDOW, Stage.QUEUE, Stage.VERIFY, Stage.SAMPLE),
}
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Part:
    """Some time of one stage, in one process. It may begin before its round and end after it."""

    stage: Stage
    began_ns: int
    ended_ns: int
    service: str
    num_tokens: int = 0
    is_reconstructed: bool = False

    @property
    def interval(self) -> Interval:
        return self.stage, self.began_ns, self.ended_ns


_OWN_TOKENS = ("recovered", "bonus", "plain")


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the target over one choice. `times` are nanoseconds, their sum is the wall."""

    choice: int
    number: int
    began_ns: int
    ended_ns: int
    span: Span
    parts: tuple[Part, ...]
    times: RoundTimes

    @property
    def wall_ms(self) -> float:
        return self.times.wall / NS_PER_MS

    @property
    def num_speculative_tokens(self) -> int:
        return self.span.count("paceline.k")

    @property
    def proposed(self) -> int:
        return self.span.count("paceline.proposed")

    @property
    def accepted(self) -> int:
        return min(self.span.count("paceline.accepted"), self.proposed)

    @property
    def source(self) -> str:
        """What made the proposals; empty where there were none, or nobody said."""
        return self.span.text("paceline.source")

    @property
    def num_tokens(self) -> int:
        return self.span.count("paceline.num_tokens")

    @property
    def own_token(self) -> str:
        """What the target's own token is: recovered, bonus, plain; empty when it wrote none. Older
        releases did not say, and had no trees, of which counts do not tell."""
        if self.num_tokens <= self.accepted:
            return ""  # a text that ended inside the draft's tokens
        if (told := self.span.text("paceline.own_token")) in _OWN_TOKENS:
            return told
        if not self.proposed:
            return "plain"
        return "recovered" if self.accepted < self.proposed else "bonus"

    def tokens(self, limit: int) -> list[str]:
        """What became of the first `limit`: the draft's, then the target's own."""
        kinds = (
            repeat("accepted", self.accepted),
            repeat("rejected", self.proposed - self.accepted),
            repeat(self.own_token, bool(self.own_token)),
        )
        return list(islice(chain(*kinds), limit))

    @property
    def intervals(self) -> list[Interval]:
        return [part.interval for part in self.parts]

    def ms(self, stage: Stage) -> float:
        return stage_ns(self.times, stage) / NS_PER_MS


@dataclass(frozen=True, slots=True)
class Request:
    """`span` is the gateway's, or the newest session's where that one is missing.

    `rounds` are in order of time, those of all choices together. Invariant: began_ns <= ended_ns.
    """

    trace_id: str
    span: Span
    sessions: tuple[Span, ...]
    rounds: tuple[Round, ...]
    began_ns: int
    ended_ns: int
    problems: tuple[str, ...] = ()

    @property
    def ms(self) -> float:
        return (self.ended_ns - self.began_ns) / NS_PER_MS

    @property
    def choices(self) -> list[int]:
        return sorted({item.choice for item in self.rounds})

    @property
    def proposed(self) -> int:
        return sum(item.proposed for item in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(item.accepted for item in self.rounds)

    @property
    def num_tokens(self) -> int:
        said = self.span.count("gen_ai.usage.output_tokens")
        return said or sum(item.num_tokens for item in self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def num_tokens_per_round(self) -> float | None:
        told = sum(item.num_tokens for item in self.rounds)
        return told / len(self.rounds) if self.rounds else None

    def attribute(self, name: str) -> str:
        """The gateway's, else the first session's that has it."""
        found = (span.text(name) for span in (self.span, *self.sessions) if name in span.attributes)
        return next(found, "")

    @property
    def first_chunk_ms(self) -> float | None:
        """Until the gateway had the first tokens."""
        value = self.span.attributes.get("gen_ai.response.time_to_first_chunk")
        return 1000.0 * value if isinstance(value, int | float) else None

    @property
    def failure(self) -> str:
        """Why it did not end well; empty when it did."""
        return self.span.text("error.type") or ("failed" if self.span.is_error else "")

    @property
    def model(self) -> str:
        return self.attribute("gen_ai.request.model") or self.attribute("gen_ai.response.model")

    def total_ms(self, stage: Stage) -> float:
        return sum(stage_ns(item.times, stage) for item in self.rounds) / NS_PER_MS


def stage_ns(times: RoundTimes, stage: Stage) -> int:
    """Of times in nanoseconds."""
    return int(getattr(times, stage.span_name))


_JSON_ORDER = (*STAGES[2:], *STAGES[:2])


def request_json(request: Request, rounds: Sequence[Round]) -> dict[str, Any]:
    """What `paceline trace --json` prints. Milliseconds keep their nanoseconds: then the eight add
    up to the round. Of a request for several choices every round says whose it is."""
    is_several = len(request.choices) > 1
    return {
        "trace_id": request.trace_id,
        "request_ms": request.ms,
        "rounds": [
            ({"choice": item.choice} if is_several else {}) | _round_json(item) for item in rounds
        ],
    }


def _round_json(item: Round) -> dict[str, Any]:
    return {
        "round": item.number,
        "wall_ms": item.wall_ms,
        **{f"{stage.span_name}_ms": item.ms(stage) for stage in _JSON_ORDER},
        "source": item.source,
        "proposed": item.proposed,
        "accepted": item.accepted,
    }
