"""The bounded wait of a lone sequence for its draft: every other pass starts at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.protocol.link import LinkState
from paceline.protocol.lone_wait import LocalOffer, LonePolicy, WindowOutlook
from paceline.target.sequence import Sequence
from paceline.target.sources import Source


def local_offer(sources: Iterable[Source]) -> LocalOffer | None:
    """The best of what local sources have at hand that is worth its rows."""
    offers = (
        LocalOffer(count, _expected(source, count))
        for source in sources
        if source.is_local and (count := min(source.have, source.lookahead.cap))
    )
    return max(offers, key=lambda offer: offer.expected, default=None)


def _expected(source: Source, count: int) -> float:
    """How many of its first `count` proposals will be accepted."""
    survivals = source.survivals or source.lookahead.survivals
    if survivals is not None and len(survivals.sums) > count:
        return survivals.sums[count]
    rate = source.lookahead.posterior.rate
    return sum(rate**place for place in range(1, count + 1))


def lone_hold(
    sequence: Sequence, policy: LonePolicy, now_us: int, offer: LocalOffer | None = None
) -> int | None:
    """Until when the pass of the only sequence waits; None: it starts now. `offer`: what it would
    verify then of the target's own."""
    session = sequence.session
    streaming = session.link is LinkState.STREAMING
    if not (sequence.is_decoding and sequence.lookahead.cap and streaming):
        return None
    have = session.window_len
    if sequence.hold_until_us:
        if have > sequence.hold_have:
            policy.record_wait(hit=True)
        elif now_us >= sequence.hold_until_us:
            policy.record_wait(hit=False)
            return None
    want = min(sequence.lookahead.cap, session.limit_position - session.committed_len)
    # Nothing new here after a flush: the draft must hear our last verdict before it can go on. A
    # branch that has become the window was here before, and when it came says nothing.
    is_due = session.is_flushed and have == session.num_adopted
    since_us = sequence.ready_us if is_due else sequence.last_arrival_us or sequence.ready_us
    outlook = WindowOutlook(have, want, since_us, is_due, offer)
    lookahead = sequence.lookahead
    until_us = policy.wait_until(outlook, lookahead.posterior.rate, now_us, lookahead.survivals)
    until_us = min(until_us, sequence.ready_us + policy.max_wait_us)
    if until_us <= now_us:
        return None
    sequence.hold_until_us, sequence.hold_have = until_us, have
    return until_us


def end_holds(running: Iterable[Sequence], now_us: int) -> None:
    """A pass begins: whoever was held, until now or until somebody else came, is ready only now."""
    for sequence in running:
        if sequence.hold_until_us:
            sequence.clock.ready_us, sequence.hold_until_us = now_us, 0
