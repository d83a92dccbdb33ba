"""A request made of its spans: rounds, their stages, and who did what.

Pure: spans in, `Request` out. Knows neither files nor drawing. Spans that it does not know are
left alone; what is missing is a sentence in `Request.problems`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

from paceline.cli.trace_spans import Span
from paceline.round_times import STAGE_OF_SPAN, Interval, RoundTimes, Stage, partition

GATEWAY_SERVICE = "paceline-gateway"
SESSION, ROUND = "session", "round"
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
MAX_PARTS = 1_000  # of one round


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
    def ms(self) -> float:
        return (self.ended_ns - self.began_ns) / NS_PER_MS


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
    def num_tokens(self) -> int:
        return self.span.count("paceline.num_tokens")

    @property
    def own_token(self) -> str:
        """What the target's own token is: recovered, bonus, plain; empty when it wrote none."""
        if self.num_tokens <= self.accepted:
            return ""  # a text that ended inside the draft's tokens
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
        return [_interval(part) for part in self.parts]

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
    def model(self) -> str:
        return self.attribute("gen_ai.request.model") or self.attribute("gen_ai.response.model")

    def total_ms(self, stage: Stage) -> float:
        return sum(stage_ns(item.times, stage) for item in self.rounds) / NS_PER_MS


def stage_ns(times: RoundTimes, stage: Stage) -> int:
    """Of times in nanoseconds."""
    return int(getattr(times, stage.span_name))


def is_request(span: Span) -> bool:
    """Whether a request can be made of it and what hangs on it."""
    return is_gateway(span) or span.name == SESSION


def is_gateway(span: Span) -> bool:
    return span.is_server and span.service == GATEWAY_SERVICE


def newest(spans: Iterable[Span]) -> Span | None:
    """The request that ended last; of one request the gateway's span, which ends after its
    sessions unless the clocks of two hosts differ."""
    found = [span for span in spans if is_request(span)]
    last = max(found, key=lambda span: span.ended_ns, default=None)
    if last is None or is_gateway(last):
        return last
    gateways = [span for span in found if is_gateway(span) and span.span_id == last.parent_id]
    return gateways[0] if gateways else last


def request_of(spans: Sequence[Span]) -> Request | None:
    """The newest request of one trace's spans; None when there is none in it."""
    root = newest(spans)
    if root is None:
        return None
    builder = _Builder(root, spans)
    return builder.request()


class _Builder:
    """Holds one trace's spans by parent while a request is put together."""

    def __init__(self, root: Span, spans: Sequence[Span]) -> None:
        self.root = root
        self._by_id = {span.span_id: span for span in spans}
        self._children: dict[str, list[Span]] = defaultdict(list)
        for span in self._by_id.values():
            self._children[span.parent_id].append(span)
        self._problems: list[str] = []
        requests = [span for span in self._by_id.values() if is_gateway(span)]
        # What hangs on nothing can only be the one request's.
        self._adopts = len(requests) == 1
        if len(requests) > 1:
            self._problems.append(
                f"the trace has {len(requests)} requests; this is the one that ended last"
            )

    def request(self) -> Request:
        sessions = self._sessions()
        rounds = self._rounds(sessions)
        began_ns, ended_ns = self.root.began_ns, self.root.ended_ns
        if not is_gateway(self.root):
            self._problems.append(
                "no file has the gateway's span: the request is taken to begin with its sessions"
            )
            began_ns = min(span.began_ns for span in sessions)
            ended_ns = max(span.ended_ns for span in sessions)
        elif not sessions:
            self._problems.append("no file has a session of the request")
        self._tell_of_orphans()
        return Request(
            trace_id=self.root.trace_id,
            span=self.root,
            sessions=tuple(sessions),
            rounds=tuple(rounds),
            began_ns=began_ns,
            ended_ns=ended_ns,
            problems=tuple(self._problems),
        )

    def _sessions(self) -> list[Span]:
        """In order of time."""
        if not is_gateway(self.root):
            # The sessions of one request have the same parent, though nobody has it.
            found = [span for span in self._children[self.root.parent_id] if span.name == SESSION]
            return sorted(found if self.root.parent_id else [self.root], key=_time)
        found = [span for span in self._below(self.root) if span.name == SESSION]
        if self._adopts:
            found += [span for span in self._orphans() if span.name == SESSION]
        return sorted(found, key=_time)

    def _below(self, root: Span) -> Iterable[Span]:
        """Each span once, whatever the parents say."""
        seen, waiting = {root.span_id}, deque([root])
        while waiting:
            for span in self._children[waiting.popleft().span_id]:
                if span.span_id not in seen:
                    seen.add(span.span_id)
                    waiting.append(span)
                    yield span

    def _orphans(self) -> list[Span]:
        """The gateway's own parent is the client's, and no file of ours has that."""
        return [
            span
            for span in self._by_id.values()
            if span.parent_id and span.parent_id not in self._by_id and not is_gateway(span)
        ]

    def _tell_of_orphans(self) -> None:
        lost = [span for span in self._orphans() if span.parent_id != self.root.parent_id]
        if lost:
            names = ", ".join(sorted({span.name for span in lost})[:5])
            self._problems.append(
                f"{len(lost)} spans name a parent that no file has ({names}): "
                "a process is missing, or has not written it yet"
            )

    def _rounds(self, sessions: Sequence[Span]) -> list[Round]:
        """Of every choice a chain without gaps at its beginning and between two of its sessions."""
        ends: dict[int, int] = {}
        first_ns = self.root.began_ns if is_gateway(self.root) else None
        found: list[Round] = []
        for choice, members in self._chains(sessions):
            before_ns = ends.get(choice, first_ns)
            parts_before: list[Part] = []
            for span in members:
                parts = self._parts(span)
                found.append(self._round(choice, span, before_ns, [*parts_before, *parts]))
                before_ns, parts_before = None, parts
                ends[choice] = span.ended_ns
        return sorted(found, key=lambda item: (item.began_ns, item.choice, item.ended_ns))

    def _chains(self, sessions: Sequence[Span]) -> Iterable[tuple[int, list[Span]]]:
        """(choice, its rounds in order) for each session, then for those whose session is lost."""
        for session in sessions:
            members = [span for span in self._children[session.span_id] if span.name == ROUND]
            yield session.count("paceline.choice"), sorted(members, key=_time)
        if not self._adopts:
            return
        lost: dict[str, list[Span]] = defaultdict(list)
        for span in self._orphans():
            if span.name == ROUND:
                lost[span.parent_id].append(span)
        for members in lost.values():
            yield members[0].count("paceline.choice"), sorted(members, key=_time)

    def _parts(self, span: Span) -> list[Part]:
        """What was done for one round, by whoever did it."""
        children = self._children[span.span_id]
        parts = [_part(child) for child in children if child.name in STAGE_OF_SPAN]
        if len(parts) > MAX_PARTS:
            number = span.count("paceline.round")
            self._problems.append(f"of round {number} only the first {MAX_PARTS} spans are shown")
        return sorted(parts, key=_time)[:MAX_PARTS]

    def _round(
        self, choice: int, span: Span, before_ns: int | None, parts: Sequence[Part]
    ) -> Round:
        """`parts`: of this round and the one before; what of that is still going on belongs to
        both. `before_ns`, for a session's first round: when the choice's earlier life ended; what
        is between is a wait for the target."""
        kept = [part for part in parts if part.ended_ns > span.began_ns]
        began_ns = span.began_ns
        if before_ns is not None and before_ns < began_ns:
            kept.append(Part(Stage.QUEUE, before_ns, began_ns, self.root.service))
            began_ns = before_ns
        return Round(
            choice=choice,
            number=span.count("paceline.round"),
            began_ns=began_ns,
            ended_ns=span.ended_ns,
            span=span,
            parts=tuple(sorted(kept, key=_time)),
            times=partition(began_ns, span.ended_ns, map(_interval, kept)),
        )


def _interval(part: Part) -> Interval:
    return part.stage, part.began_ns, part.ended_ns


def _time(span: Span | Part) -> tuple[int, int]:
    return span.began_ns, span.ended_ns


def _part(span: Span) -> Part:
    return Part(
        stage=STAGE_OF_SPAN[span.name],
        began_ns=span.began_ns,
        ended_ns=span.ended_ns,
        service=span.service,
        num_tokens=span.count("paceline.num_tokens"),
        is_reconstructed=span.attributes.get("paceline.reconstructed") is True,
    )


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
        "proposed": item.proposed,
        "accepted": item.accepted,
    }
