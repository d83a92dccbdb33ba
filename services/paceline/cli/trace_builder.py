"""Spans as a request: which belong to it, whose rounds they are, and what is missing.

Pure. Spans that it does not know are left alone; what is missing is a sentence in
`Request.problems`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from paceline.cli.trace_model import Part, Request, Round
from paceline.cli.trace_spans import Span
from paceline.round_times import STAGE_OF_SPAN, Stage, partition

GATEWAY_SERVICE = "paceline-gateway"
SESSION, ROUND = "session", "round"
MAX_PARTS = 1_000  # of one round


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
    by_id = {span.span_id: span for span in spans}
    root = newest(by_id.values())
    return None if root is None else _Builder(root, by_id).request()


class _Builder:
    """Holds one trace's spans by parent while a request is put together."""

    def __init__(self, root: Span, by_id: dict[str, Span]) -> None:
        self.root = root
        self._by_id = by_id
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
        num_missing = 0
        for choice, members in self._chains(sessions):
            parts_before: list[Part] = []
            number = 0
            for span in members:
                parts = self._parts(span)
                # Only what a session begins with follows what was before the session.
                before_ns = None if number else ends.get(choice, first_ns)
                number, told = span.count("paceline.round"), number + 1
                num_missing += max(0, number - told)
                if number > told:
                    before_ns, parts_before = None, []
                found.append(self._round(choice, span, before_ns, [*parts_before, *parts]))
                parts_before = parts
                ends[choice] = span.ended_ns
        if num_missing:
            self._problems.append(
                f"{num_missing} rounds are in no file: of a request that only turned out to be "
                "slow the last ones are kept"
            )
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
            times=partition(began_ns, span.ended_ns, [part.interval for part in kept]),
        )


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
