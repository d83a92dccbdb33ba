"""Everything between a target's sequences and its drafts: open, receive, reopen, quarantine. Pure.

It decides which draft serves a sequence and what a message of a draft does; it does not know
passes, engines or sockets. A draft can cost time here, never a token.

What a draft's failure costs, from the least to the most:

- A message that does not fit (late, double, from another context) is counted and dropped.
- A broken rule costs the sequence this draft for good, and the draft a strike. Too many strikes
  cost it its stream; when it dials again it is dark.
- A draft that owes a sequence proposals for too long, or does not answer an Open, loses the
  sequence, which pauses (longer each time) and prefers another draft next.
- These, a draft that gives a sequence up and a stream lost while it served are failures: too many
  in a row make the draft dark (`breaker`). One that is full, does not know the mode or has no room
  for a text (it says that it has finished with it) has not failed.
- After `rpc.max_reopens` drafts a sequence does without.

A draft that drains has not failed: its sequences move where they can, and stay while they cannot.
Nothing of this holds up a pass: until a draft is there, it is a plain one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from paceline.config import RpcConfig
from paceline.errors import RemoteProtocolError
from paceline.protocol.link import LinkEvent, LinkState
from paceline.protocol.lookahead import AcceptanceClass, LookaheadPolicy
from paceline.protocol.messages import (
    CloseReason,
    CloseSession,
    DraftMessage,
    DraftTokens,
    Drain,
    Hello,
    Nack,
    Opened,
    OpenStatus,
    Verdict,
)
from paceline.protocol.target_session import Disposition
from paceline.target.breaker import BreakerState
from paceline.target.draft_pool import DraftLink, DraftPool
from paceline.target.open_len import max_open_len
from paceline.target.sequence import Sequence

_US = 1_000_000
MAX_DRAFT_US = _US
# Prompt tokens for which a draft that has not said anything yet gets `rpc.stall_timeout_s` more.
TOKENS_PER_STALL_TIMEOUT = 512
MAX_STALL_TIMEOUTS = 16

SequenceMessage = DraftTokens | Opened | Nack | CloseSession


class DraftDesk:
    """`counts` has one entry per `Disposition` and per event named below; all only rise.

    Of drafts: attached, drained, dark (and of these: outlawed), probed, restored. Of sequences:
    opened, reopened, moved, open_timeout, stalled, given_up, remote_error, outgrown, gave_up and
    each refusal (busy, unsupported). Of messages: nack, nack_repeated, unknown_session, flood.
    Of branches: adopted, one for each that became a window. Of proposals: dropped_tokens.
    """

    def __init__(
        self, sequences: dict[int, Sequence], policy: LookaheadPolicy, config: RpcConfig
    ) -> None:
        self._sequences = sequences
        self._policy = policy
        self._config = config
        self.pool = DraftPool(config)
        self.counts: Counter[str] = Counter()
        self._now_us = 0  # the latest that we were told
        # By link, as of this `maintain`: a sum over all sessions for each of them is too slow.
        self._num_unproven: dict[int, int] = {}

    # -- links ------------------------------------------------------------------------------

    def attach(self, link_id: int, hello: Hello) -> None:
        """A draft has dialled in and fits."""
        self.pool.attach(link_id, hello)
        self.counts["attached"] += 1

    def detach(self, link_id: int, now_us: int | None = None, num_remote_errors: int = 0) -> None:
        """A draft is gone: its sequences go on alone and look for another.

        `now_us`: None: as in the last call. `num_remote_errors`: unreadable messages, like strikes.
        """
        self._now_us = self._now_us if now_us is None else now_us
        link = self.pool.get(link_id)
        if link is not None and link.strikes + num_remote_errors >= self.pool.max_strikes:
            link.breaker.trip(self._now_us)
            self.counts.update(("outlawed", "dark"))
        elif link is not None and link.sessions and not link.is_draining:
            self._fail(link, None, self._now_us)
        for session_id in self.pool.detach(link_id):
            sequence = self._sequences.get(session_id)
            if sequence is not None and sequence.draft_id == link_id:
                self._lose(sequence, LinkEvent.PEER_LOST)

    def maintain(self, running: Iterable[int], now_us: int) -> None:
        """Open what has no draft, take away from drafts what they do not serve or should not."""
        self._now_us = now_us
        self._num_unproven.clear()
        has_draining, can_open = self.pool.has_draining, self.pool.can_open(now_us)
        for session_id in running:
            sequence = self._sequences[session_id]
            link = sequence.session.link
            if link is LinkState.OPENING and now_us >= sequence.open_deadline_us:
                self.counts["open_timeout"] += 1
                self._part(sequence, CloseReason.REPLACED)
                self._lose(sequence, LinkEvent.OPEN_TIMEOUT, now_us)
            elif link is LinkState.STREAMING and self._is_stalled(sequence, now_us):
                self.counts["stalled"] += 1
                sequence.patience.num_stalls += 1
                self._part(sequence, CloseReason.REPLACED)
                self._lose(sequence, LinkEvent.PEER_LOST, now_us)
            elif has_draining and sequence.session.is_attached:
                self._move(sequence, now_us)
            if can_open or sequence.draft_id is not None:
                self.try_open(sequence, now_us)

    def _is_stalled(self, sequence: Sequence, now_us: int) -> bool:
        """A draft that owes a first proposal gets time for its prompt, and for all the prompts
        that we have given it beside it; one that has begun shares its passes with them."""
        patience = sequence.patience
        limit_us = int(self._config.stall_timeout_s * _US)
        if not patience.is_due(limit_us, now_us):
            return False
        if sequence.draft_id is not None and not patience.is_proven:
            num_tokens = self._num_unproven_tokens(sequence.draft_id)
            limit_us *= min(MAX_STALL_TIMEOUTS, 1 + num_tokens // TOKENS_PER_STALL_TIMEOUT)
        return patience.is_over(limit_us, now_us)

    def _num_unproven_tokens(self, link_id: int) -> int:
        """Of the texts that a draft has been given and not proposed anything for."""
        if link_id not in self._num_unproven:
            link = self.pool.get(link_id)
            others = map(self._sequences.get, () if link is None else link.sessions)
            unproven = (s for s in others if s is not None and not s.patience.is_proven)
            self._num_unproven[link_id] = sum(s.session.committed_len for s in unproven)
        return self._num_unproven[link_id]

    def _move(self, sequence: Sequence, now_us: int) -> None:
        """Leave a draft that drains for one that can take the sequence, if there is one: promised
        now, opened when what the old one has sent is used up, as an open empties the window."""
        link = self.pool.get(sequence.draft_id)
        if link is None or not link.is_draining or not self.may_open(sequence, now_us):
            return
        link_id = self._choose(sequence, now_us)
        if link_id is None:
            return
        self.counts["moved"] += 1
        self._part(sequence, CloseReason.REPLACED)
        self._lose(sequence, LinkEvent.PEER_LOST)
        if self._policy.grant(sequence.lookahead).draft_ahead:
            self._assign(sequence, link_id)

    def try_open(self, sequence: Sequence, now_us: int) -> None:
        """Hand the sequence to the least loaded draft, if it wants one and one is there."""
        session = sequence.session
        if session.link is not LinkState.LOST or not self.may_open(sequence, now_us):
            return
        if not self._policy.grant(sequence.lookahead).draft_ahead:
            return  # it is to rest
        link = self.pool.get(sequence.draft_id)
        if link is None or link.is_draining or link.breaker.state is BreakerState.DARK:
            self._detach_sequence(sequence, None)
            link_id = self._choose(sequence, now_us)
            link = self.pool.get(link_id)
            if link_id is None or link is None:
                return
            self._assign(sequence, link_id)
        elif session.window_len:
            return  # it has just moved
        sequence.allow(self._policy.grant(sequence.lookahead))
        if not session.max_draft_ahead:  # with this draft
            self._detach_sequence(sequence, None)
            return
        sequence.open_deadline_us = now_us + int(self._config.open_timeout_s * _US)
        message = session.reopen(link.hello.max_model_len)
        salt, context = sequence.request.cache_salt, sequence.open_context
        message = replace(message, cache_salt=salt, trace_context=context)
        self.pool.send(sequence.draft_id, message, grants=True)
        self.counts["reopened" if session.epoch > 1 else "opened"] += 1

    def may_open(self, sequence: Sequence, now_us: int) -> bool:
        """Whether any draft may be asked to serve the sequence now."""
        session = sequence.session
        if not self._policy.ceiling(sequence.lookahead) or session.epoch > self._config.max_reopens:
            return False
        if now_us < sequence.next_open_us or session.committed_len + 1 >= session.end_len:
            return False
        # What is too long to travel goes on without a draft.
        return session.committed_len <= max_open_len(self._config, session.sampling)

    def _choose(self, sequence: Sequence, now_us: int) -> int | None:
        session = sequence.session
        return self.pool.choose(
            session.mode,
            now_us,
            avoid=sequence.last_draft_id,
            length=session.committed_len,
            barred=sequence.barred_drafts,
        )

    def _assign(self, sequence: Sequence, link_id: int) -> None:
        sequence.draft_id = sequence.last_draft_id = link_id
        link, session = self.pool.links()[link_id], sequence.session
        traits = (session.mode, session.sampling.temperature, sequence.request.adapter)
        sequence.lookahead.key = AcceptanceClass.of(link.hello.model_id, *traits)
        if self.pool.assign(link_id, sequence.session.session_id):
            self.counts["probed"] += 1

    def close(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence.session.is_attached:
            finished = sequence.session.is_finished
            self._part(sequence, CloseReason.FINISHED if finished else CloseReason.ABORTED)
        self.pool.release(sequence.draft_id, sequence.session.session_id)
        sequence.session.close()

    def suspend(self, sequence: Sequence) -> None:
        """The sequence has lost its KV and waits: its draft is free for others meanwhile.

        Any draft may take it later, this one best of all, as it may still hold the prefix.
        """
        if sequence.session.is_attached:
            self._part(sequence, CloseReason.REPLACED)
        self._lose(sequence, LinkEvent.PEER_LOST)
        sequence.last_draft_id = None

    def bar(self, sequence: Sequence) -> None:
        """A pass over this sequence alone failed with its draft's proposals in it."""
        link = self.pool.get(sequence.draft_id)
        if link is not None:
            sequence.barred_drafts.add(link.hello.replica_id)

    def send_verdict(self, sequence: Sequence, verdict: Verdict | None) -> None:
        """Tell the draft (None: it rests and owes us nothing), unless the text has outgrown its
        context: then it has nothing more to give, and its place and KV blocks are for others."""
        if sequence.session.num_adopted:
            self.counts["adopted"] += 1
        if verdict is None or sequence.session.has_draft_room:
            if verdict is not None:
                self.pool.send(sequence.draft_id, verdict, grants=True)
            sequence.patience.grant(sequence.ready_us, _has_credit(sequence))
            return
        self.counts["outgrown"] += 1
        self._part(sequence, CloseReason.REPLACED)
        self._lose(sequence, LinkEvent.PEER_LOST)

    # -- messages ---------------------------------------------------------------------------

    def receive(
        self, link_id: int, message: DraftMessage, now_us: int, offset_us: int | None = None
    ) -> None:
        """Act on one message of a draft, whose clock is `offset_us` before ours (None: unknown).
        Never raises for what a peer may send."""
        self._now_us = now_us
        match message:
            case DraftTokens() | Opened() | Nack() | CloseSession():
                self._receive_for_sequence(link_id, message, now_us, offset_us)
            case Drain():
                link = self.pool.get(link_id)
                if link is not None and not link.is_draining:
                    link.is_draining = True
                    self.counts["drained"] += 1
            case _:
                pass  # Ping, Pong and Bye are the stream's own affair

    def _receive_for_sequence(
        self, link_id: int, message: SequenceMessage, now_us: int, offset_us: int | None
    ) -> None:
        link = self.pool.get(link_id)
        if link is None or not self.pool.spend(link_id):
            self.counts["flood"] += 1
            return
        sequence = self._sequences.get(message.session_id)
        if sequence is None or sequence.draft_id != link_id:
            self.counts["unknown_session"] += 1
            if isinstance(message, DraftTokens):
                close = CloseSession(message.session_id, message.epoch, CloseReason.UNKNOWN)
                self.pool.send(link_id, close)
            return
        try:
            match message:
                case DraftTokens():
                    sequence.clock.arrive(message, now_us, offset_us)
                    self._draft(link, sequence, message, now_us)
                case Opened():
                    self._opened(link, sequence, message, now_us)
                case Nack():
                    self._nack(sequence, message, now_us)
                case CloseSession():
                    self._given_up(link, sequence, message, now_us)
        except RemoteProtocolError:
            self.counts["remote_error"] += 1
            self.pool.strike(link_id)
            sequence.barred_drafts.add(link.hello.replica_id)  # it would do it again
            self._part(sequence, CloseReason.PROTOCOL)
            self._lose(sequence, LinkEvent.PEER_LOST, now_us)

    def _draft(self, link: DraftLink, sequence: Sequence, draft: DraftTokens, now_us: int) -> None:
        session = sequence.session
        # Two arrivals in one window under one verdict: no flush and no lack of credit between.
        goes_on = session.window_len > 0 and sequence.last_arrival_us > sequence.ready_us
        since_last_us = now_us - sequence.last_arrival_us
        disposition = session.receive_draft(draft)
        self.counts[disposition] += 1
        if disposition is Disposition.KEPT:
            sequence.last_arrival_us = now_us
            sequence.open_pause_us = 0  # this draft is worth coming back to
            sequence.patience.reward(now_us, _has_credit(sequence))
            if link.breaker.keep(now_us):
                self.counts["restored"] += 1
            if draft.draft_us:
                # A peer's word, so bounded: no draft step of use takes longer than this.
                draft_us = min(draft.draft_us, MAX_DRAFT_US)
                self._policy.learn_draft_step(draft_us, len(draft.token_ids))
            if goes_on:
                self._policy.learn_arrival(since_last_us, len(draft.token_ids))
        elif disposition in (Disposition.STALE, Disposition.DIVERGED):
            self.counts["dropped_tokens"] += len(draft.token_ids)
        elif disposition is Disposition.GAP:
            have_len = len(session.log)
            self.pool.send(sequence.draft_id, Nack(session.session_id, session.epoch, have_len))

    def _opened(self, link: DraftLink, sequence: Sequence, opened: Opened, now_us: int) -> None:
        if not sequence.session.receive_opened(opened):
            self.counts[Disposition.STALE_EPOCH] += 1
            return
        if opened.status is OpenStatus.OK:
            sequence.patience.start(now_us, _has_credit(sequence))
            return
        self.counts[opened.status] += 1
        if opened.status is OpenStatus.BUSY:
            link.busy_until_us = now_us + int(self._config.redial_min_s * _US)
        self._detach_sequence(sequence, now_us)

    def _nack(self, sequence: Sequence, nack: Nack, now_us: int) -> None:
        if nack.epoch != sequence.session.epoch:
            self.counts[Disposition.STALE_EPOCH] += 1
            return
        self.counts["nack"] += 1
        verdict = sequence.session.receive_nack(nack.have_len)
        if sequence.nacked_round == sequence.session.round:
            # One per verdict, which may be as long as the text; the next verdict brings the next.
            self.counts["nack_repeated"] += 1
        elif verdict is not None:
            sequence.nacked_round = sequence.session.round
            self.pool.send(sequence.draft_id, sequence.stamped(verdict, now_us))

    def _given_up(self, link: DraftLink, sequence: Sequence, close: CloseSession, now: int) -> None:
        if close.epoch == sequence.session.epoch and sequence.session.is_attached:
            self.counts["given_up"] += 1
            if is_outgrown := close.reason is CloseReason.FINISHED:
                sequence.barred_drafts.add(link.hello.replica_id)
            rests = not sequence.session.max_draft_ahead  # then it may have been silent for long
            self._lose(sequence, LinkEvent.PEER_LOST, None if rests or is_outgrown else now)

    # -- losing a draft ---------------------------------------------------------------------

    def _part(self, sequence: Sequence, reason: CloseReason) -> None:
        session = sequence.session
        self.pool.send(sequence.draft_id, CloseSession(session.session_id, session.epoch, reason))

    def _lose(self, sequence: Sequence, event: LinkEvent, now_us: int | None = None) -> None:
        """`now_us` given: the draft itself failed us, so pause before the next open."""
        link = self.pool.get(sequence.draft_id)
        if link is not None and now_us is not None:
            self._fail(link, sequence.session.session_id, now_us)
        if sequence.session.is_attached:
            sequence.session.lose_draft(event)
        self._detach_sequence(sequence, now_us)

    def _fail(self, link: DraftLink, session_id: int | None, now_us: int) -> None:
        if link.breaker.fail(session_id, now_us):
            self.counts["dark"] += 1

    def _detach_sequence(self, sequence: Sequence, now_us: int | None) -> None:
        if sequence.draft_id is None:
            return
        self.pool.release(sequence.draft_id, sequence.session.session_id)
        sequence.draft_id = None
        if sequence.session.epoch > self._config.max_reopens:
            self.counts["gave_up"] += 1
        if now_us is not None:
            first = int(self._config.redial_min_s * _US)
            last = int(self._config.redial_max_s * _US)
            sequence.open_pause_us = min(last, max(first, sequence.open_pause_us * 2))
            sequence.next_open_us = now_us + sequence.open_pause_us


def _has_credit(sequence: Sequence) -> bool:
    """Whether a draft that knows what we know could propose something more."""
    return len(sequence.session.log) < sequence.session.limit_position
