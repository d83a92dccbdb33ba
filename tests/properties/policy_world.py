"""A target and a draft as events on a virtual clock, around the real `LookaheadPolicy`.

The policy is called as `target/scheduler.py` calls it. Everything else is a model: passes cost
`base_us` + rows, the draft steps all its sequences at once, messages take half a round trip, and
whether the draft's token at a position is right depends on the position alone (as in the coupled
mode), so that every policy meets the same text. A wrong token is followed by others that are wrong.
Nothing here is drawn while a run goes on, so a run is a function of its `Setting` and its policy.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from paceline.protocol.lone_wait import WindowOutlook
from paceline.protocol.lookahead import (
    AcceptanceClass,
    LookaheadLimits,
    LookaheadPolicy,
    PassRecord,
    SequenceLookahead,
    Window,
)
from paceline.sampling.params import VerificationMode

MAX_UNTOLD = 32
OFF = LookaheadLimits(max_num_speculative_tokens=0)


def fixed(count: int, **kwargs: int) -> LookaheadLimits:
    return LookaheadLimits(is_adaptive=False, num_speculative_tokens=count, **kwargs)


@dataclass(frozen=True)
class Setting:
    """`acceptance(sequence, position, now_us)`; `num_sequences` from a time (us) on; times in us.

    `noise`: relative deviation of a pass; `contention`: passes are so much slower when the draft
    has been at work since the last one began, until `calm_us`; `num_tokens`: length of a sequence,
    then a new one follows.
    """

    num_sequences: tuple[tuple[int, int], ...] = ((0, 1),)
    acceptance: float = 0.75
    base_us: float = 25_000
    row_us: float = 250
    stair: int = 1
    step_us: float = 3_000
    step_row_us: float = 10
    rtt_us: float = 500
    host_us: float = 100
    noise: float = 0.01
    contention: float = 0.0
    calm_us: float = float("inf")
    num_tokens: int = 400
    classes: tuple[str, ...] = ("draft",)
    drift: Callable[[int, int, float], float] | None = None
    seed: int = 1

    def alpha(self, index: int, position: int, now_us: float) -> float:
        return self.acceptance if self.drift is None else self.drift(index, position, now_us)


@cache
def _uniform(seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.random() for _ in range(1 << 16)]


@dataclass
class Flow:
    """One sequence: the target's side, the draft's side, and the policy's.

    A log is the committed length (all right) and what lies behind: 0 for a right token, else a
    number of its own.
    """

    index: int
    end: int
    lookahead: SequenceLookahead
    committed: int = 0
    window: list[int] = field(default_factory=list)
    told: int = 0
    granted: int = 0
    max_ahead: int = 0
    ready_us: float = 0.0
    last_arrival_us: float = 0.0
    is_flushed: bool = True
    hold_until_us: float = 0.0
    hold_have: int = 0
    # The draft's side.
    known: int = 0
    log: list[int] = field(default_factory=list)
    limit: int = 0

    @property
    def length(self) -> int:
        return self.known + len(self.log)

    def context(self) -> int:
        """Of the draft's log: its first wrong token, 0 if there is none."""
        return next((token for token in self.log if token), 0)


@dataclass
class Outcome:
    """`by_step`: tokens and time of each step of `Setting.num_sequences`."""

    tokens: int = 0
    us: float = 0.0
    passes: int = 0
    proposals: int = 0
    by_step: list[list[float]] = field(default_factory=list)
    policy: LookaheadPolicy | None = None
    trace: list[tuple[float, int, str, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1e6 * self.tokens / self.us


class Lab:
    """One run. Events: (time, number, what, payload)."""

    def __init__(self, setting: Setting, limits: LookaheadLimits) -> None:
        self.setting = setting
        self.policy = LookaheadPolicy(limits)
        self.now = 0.0
        self.flows: dict[int, Flow] = {}
        self._events: list[tuple[float, int, str, tuple]] = []
        self._number = 0
        self._next_index = 0
        self._next_wrong = 1
        self._uniform = _uniform(setting.seed)
        self._is_stepping = False
        self._is_passing = False
        self._worked_us, self._pass_began_us = -1.0, 0.0
        self._hold_until = 0.0
        self._free_us: float | None = None
        self._step = 0
        self.out = Outcome(policy=self.policy)

    # -- the clock --------------------------------------------------------------------------

    def run(self, until_us: float, max_tokens: int = 1 << 60) -> Outcome:
        for start_us, count in self.setting.num_sequences:
            self._at(start_us, "resize", (count,))
        while self._events and self.out.tokens < max_tokens:
            time, _, what, payload = heapq.heappop(self._events)
            if time > until_us:
                break
            self.now = time
            getattr(self, "_on_" + what)(*payload)
            if not self._is_passing:
                self._plan()
        self.out.us = min(self.now, until_us)
        self.out.by_step[-1][1] += self.out.us
        return self.out

    def _at(self, time: float, what: str, payload: tuple) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, what, payload))

    def _on_resize(self, count: int) -> None:
        if self.out.by_step:
            self.out.by_step[-1][1] += self.now
        self.out.by_step.append([0.0, -self.now])
        while len(self.flows) > count:
            del self.flows[next(reversed(self.flows))]
        while len(self.flows) < count:
            self._new()

    def _new(self) -> None:
        index, self._next_index = self._next_index, self._next_index + 1
        name = self.setting.classes[index % len(self.setting.classes)]
        lookahead = SequenceLookahead(AcceptanceClass.of(name, VerificationMode.GREEDY, 0.0))
        length = self.setting.num_tokens // 2 + index * 7919 % self.setting.num_tokens
        flow = Flow(index, length, lookahead)
        self.policy.add(lookahead)
        flow.ready_us = self.now
        self.flows[index] = flow
        self._tell(flow)

    # -- the target -------------------------------------------------------------------------

    def _plan(self) -> None:
        if not self.flows:
            self._free_us = None
            return
        if len(self.flows) == 1:
            until = self._lone_hold(next(iter(self.flows.values())))
            if until is not None:
                if until != self._hold_until:
                    self._hold_until = until
                    self._at(until, "wake", ())
                return
        flows = list(self.flows.values())
        first = self.out.passes % len(flows)
        flows = flows[first:] + flows[:first]
        windows = [Window(flow.lookahead, len(flow.window)) for flow in flows]
        counts = self.policy.plan(windows, 0, 2048)
        rows = len(flows) + sum(counts)
        started = self.now + self.setting.host_us
        self._is_passing = True
        self._at(started + self._pass_us(rows), "pass", (flows, counts, started))

    def _pass_us(self, rows: int) -> float:
        s = self.setting
        padded = -(-rows // s.stair) * s.stair
        us = s.base_us + s.row_us * padded
        us *= 1.0 + s.noise * (2 * self._uniform[(self.out.passes * 31 + 7) & 0xFFFF] - 1)
        is_contended = self._worked_us >= self._pass_began_us and self.now < s.calm_us
        self._pass_began_us = self.now
        return us * (1.0 + s.contention * is_contended)

    def _on_wake(self) -> None:
        pass

    def _lone_hold(self, flow: Flow) -> float | None:
        """As `target/lone_hold.py`."""
        policy = self.policy.lone
        if not flow.lookahead.cap:
            return None
        have = len(flow.window)
        if flow.hold_until_us:
            if have > flow.hold_have:
                policy.record_wait(hit=True)
            elif self.now >= flow.hold_until_us:
                policy.record_wait(hit=False)
                return None
        limit = min(flow.committed + flow.max_ahead, flow.end - 1)
        want = min(flow.lookahead.cap, limit - flow.committed)
        is_due = flow.is_flushed and have == 0
        since = flow.ready_us if is_due else flow.last_arrival_us or flow.ready_us
        outlook = WindowOutlook(have, want, int(since), is_due)
        lookahead = flow.lookahead
        rate = lookahead.posterior.rate
        until = policy.wait_until(outlook, rate, int(self.now), lookahead.survivals)
        until = min(until, flow.ready_us + policy.max_wait_us)
        if until <= self.now:
            return None
        flow.hold_until_us, flow.hold_have = until, have
        return until

    def _on_pass(self, flows: list[Flow], counts: list[int], started: float) -> None:
        out, committed = self.out, 0
        out.passes += 1
        for flow, count in zip(flows, counts, strict=True):
            verified = flow.window[:count]
            right = next((i for i, token in enumerate(verified) if token), count)
            out.proposals += count
            if flow.index in self.flows:
                committed += self._commit(flow, count, right)
        out.tokens += committed
        out.by_step[-1][0] += committed
        idle = None if self._free_us is None else int(started - self._free_us)
        self._free_us = self.now
        num = len(flows)
        self.policy.end_pass(
            PassRecord(
                num, num + sum(counts), 0, sum(counts), committed, int(started), int(self.now), idle
            )
        )
        if self.out.passes % 64 == 0:
            mean = sum(f.lookahead.cap for f in flows) / num
            out.trace.append((self.now, num, self.policy.profit.deal.state.value, mean))
        self._is_passing = False

    def _commit(self, flow: Flow, count: int, accepted: int) -> int:
        foreseen = None
        if accepted == count and len(flow.window) > count:
            foreseen = not flow.window[count]
        self.policy.end_round(flow.lookahead, count, accepted, foreseen)
        flow.max_ahead = self.policy.grant(flow.lookahead).draft_ahead
        num = min(accepted + 1, flow.end - flow.committed)
        flow.committed += num
        rest = flow.window[num:]
        fits = len(flow.window) >= num and not any(flow.window[:num])
        flow.is_flushed = not fits
        flow.window = rest if fits else []
        flow.ready_us, flow.hold_until_us = self.now, 0.0
        if flow.committed >= flow.end:
            del self.flows[flow.index]
            self._new()
        elif flow.max_ahead or flow.committed - flow.told >= MAX_UNTOLD:
            self._tell(flow)
        return num

    def _tell(self, flow: Flow) -> None:
        if not flow.told and not flow.max_ahead:
            flow.max_ahead = self.policy.grant(flow.lookahead).draft_ahead
        limit = min(flow.committed + flow.max_ahead, flow.end - 1)
        flow.granted = max(flow.granted, limit)
        flow.told = flow.committed
        delay = self.setting.rtt_us / 2
        self._at(self.now + delay, "verdict", (flow, flow.committed, flow.granted))

    def _on_tokens(self, drafts: list[tuple[Flow, int, int, int]], step_us: float) -> None:
        self.policy.learn_rtt(self.setting.rtt_us)
        for flow, start, context, token in drafts:
            if flow.index not in self.flows:
                continue
            window, place = flow.window, start - flow.committed
            mine = next((t for t in window[: max(0, place)] if t), 0)
            if place != len(window) or context != mine:
                if place < 0 or place >= len(window) or window[place] != token:
                    continue
                continue
            goes_on = len(window) > 0 and flow.last_arrival_us > flow.ready_us
            since, flow.last_arrival_us = self.now - flow.last_arrival_us, self.now
            window.append(token)
            self.policy.learn_draft_step(step_us, 1)
            if goes_on:
                self.policy.learn_arrival(since, 1)

    # -- the draft --------------------------------------------------------------------------

    def _on_verdict(self, flow: Flow, committed: int, limit: int) -> None:
        if flow.index not in self.flows:
            return
        keep = flow.log[committed - flow.known :] if committed <= flow.length else []
        if any(flow.log[: committed - flow.known]):
            keep = []
        flow.log, flow.known = keep, max(flow.known, committed)
        flow.limit = max(flow.limit, limit)
        self._start_step()

    def _start_step(self) -> None:
        if self._is_stepping:
            return
        work = [f for f in self.flows.values() if f.length < f.limit]
        if not work:
            return
        self._is_stepping = True
        contexts = [(flow, flow.length, flow.context()) for flow in work]
        us = self.setting.step_us + self.setting.step_row_us * len(work)
        self._at(self.now + us, "step", (contexts, us))

    def _on_step(self, contexts: list[tuple[Flow, int, int]], step_us: float) -> None:
        self._is_stepping, self._worked_us = False, self.now
        drafts = []
        for flow, start, context in contexts:
            if flow.length != start or flow.context() != context or start >= flow.limit:
                continue
            token = self._draw(flow, start, context)
            flow.log.append(token)
            drafts.append((flow, start, context, token))
        if drafts:
            delay = self.setting.rtt_us / 2
            self._at(self.now + delay, "tokens", (drafts, step_us))
        self._start_step()

    def _draw(self, flow: Flow, position: int, context: int) -> int:
        alpha = self.setting.alpha(flow.index, position, self.now)
        place = (flow.index * 40_503 + position * 9_973) & 0xFFFF
        if not context and self._uniform[place] < alpha:
            return 0
        self._next_wrong += 1
        return self._next_wrong


def run(setting: Setting, limits: LookaheadLimits, seconds: float) -> Outcome:
    return Lab(setting, limits).run(1e6 * seconds)
