"""Everything between a target's sequences and its drafts: open, receive, reopen, quarantine. Pure.

It decides which draft serves a sequence and what a message of a draft does; it does not know
passes, engines or sockets. A draft can cost time here, never a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.config import RpcConfig
from paceline.errors import RemoteProtocolError
from paceline.protocol.link import LinkEvent, LinkState
from paceline.protocol.lookahead import LonePolicy
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
from paceline.sampling.params import SamplingParams
from paceline.target.draft_pool import DraftPool
from paceline.target.sequence import Sequence

_US = 1_000_000
_OPEN_OVERHEAD_BYTES = 1024
_TOKEN_BYTES = 5
_BIAS_BYTES = 20
MAX_DRAFT_US = _US


class DraftDesk:
    """`counts` has one entry per `Disposition` and per event named below; all only rise."""

    def __init__(
        self,
        sequences: dict[int, Sequence],
        policy: LonePolicy,
        config: RpcConfig,
        max_draft_ahead: int,
    ) -> None:
        self._sequences = sequences
        self._policy = policy
        self._config = config
        self.pool = DraftPool(config.max_remote_errors, max_draft_ahead)
        self.counts: Counter[str] = Counter()

    # -- links ------------------------------------------------------------------------------

    def attach(self, link_id: int, hello: Hello) -> None:
        """A draft has dialled in and fits."""
        self.pool.attach(link_id, hello)
        self.counts["attached"] += 1

    def detach(self, link_id: int) -> None:
        """A draft is gone: its sequences go on alone and look for another."""
        for session_id in self.pool.detach(link_id):
            sequence = self._sequences.get(session_id)
            if sequence is not None and sequence.draft_id == link_id:
                self._lose(sequence, LinkEvent.PEER_LOST)

    def maintain(self, running: Iterable[int], now_us: int) -> None:
        """Open what has no draft, give up on opens that are not answered."""
        for session_id in running:
            sequence = self._sequences[session_id]
            opening = sequence.session.link is LinkState.OPENING
            if opening and now_us >= sequence.open_deadline_us:
                self.counts["open_timeout"] += 1
                self._part(sequence, CloseReason.REPLACED)
                self._lose(sequence, LinkEvent.OPEN_TIMEOUT, now_us)
            self.try_open(sequence, now_us)

    def try_open(self, sequence: Sequence, now_us: int) -> None:
        """Hand the sequence to the least loaded draft, if it wants one and one is there."""
        session = sequence.session
        if session.link is not LinkState.LOST or not sequence.max_draft:
            return
        if now_us < sequence.next_open_us or session.committed_len + 1 >= session.end_len:
            return
        if session.committed_len > self._max_open_len(session.sampling):
            return  # too long to travel: it goes on without a draft
        link_id = self.pool.choose(
            session.mode, now_us, avoid=sequence.last_draft_id, length=session.committed_len
        )
        link = None if link_id is None else self.pool.get(link_id)
        if link_id is None or link is None:
            return
        sequence.draft_id = sequence.last_draft_id = link_id
        sequence.open_deadline_us = now_us + int(self._config.open_timeout_s * _US)
        sequence.arrivals.clear()  # the window that they describe is emptied
        link.sessions.add(session.session_id)
        self.pool.send(link_id, session.reopen(link.hello.max_model_len), grants=True)
        self.counts["reopened" if session.epoch > 1 else "opened"] += 1

    def _max_open_len(self, sampling: SamplingParams) -> int:
        """An OpenSession carries every token (5 bytes each at most) and must fit one message."""
        overhead = _OPEN_OVERHEAD_BYTES + _BIAS_BYTES * len(sampling.logit_bias)
        overhead += _TOKEN_BYTES * len(sampling.stop_token_ids)
        room = (self._config.max_message_bytes - overhead) // _TOKEN_BYTES
        return min(self._config.max_tokens_per_item, room)

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

    def send_verdict(self, sequence: Sequence, verdict: Verdict) -> None:
        """Tell the draft, unless the text has outgrown its context: then it has nothing more to
        give, and its place and KV blocks are for others."""
        if sequence.session.has_draft_room:
            self.pool.send(sequence.draft_id, verdict, grants=True)
            return
        self.counts["outgrown"] += 1
        self._part(sequence, CloseReason.REPLACED)
        self._lose(sequence, LinkEvent.PEER_LOST)

    # -- messages ---------------------------------------------------------------------------

    def receive(self, link_id: int, message: DraftMessage, now_us: int, wire_us: int = 0) -> None:
        """Act on one message of a draft. Never raises for what a peer may send."""
        match message:
            case DraftTokens() | Opened() | Nack() | CloseSession():
                self._receive_for_sequence(link_id, message, now_us, wire_us)
            case Drain():
                link = self.pool.get(link_id)
                if link is not None:
                    link.is_draining = True
            case _:
                pass  # Ping, Pong and Bye are the stream's own affair

    def _receive_for_sequence(
        self,
        link_id: int,
        message: DraftTokens | Opened | Nack | CloseSession,
        now_us: int,
        wire_us: int,
    ) -> None:
        if not self.pool.spend(link_id):
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
                    self._draft(link_id, sequence, message, now_us, wire_us)
                case Opened():
                    self._opened(link_id, sequence, message, now_us)
                case Nack():
                    self._nack(sequence, message)
                case CloseSession():
                    self._given_up(sequence, message, now_us)
        except RemoteProtocolError:
            self.counts["remote_error"] += 1
            self.pool.strike(link_id)
            self._part(sequence, CloseReason.PROTOCOL)
            self._lose(sequence, LinkEvent.PEER_LOST, now_us)

    def _draft(
        self, link_id: int, sequence: Sequence, draft: DraftTokens, now_us: int, wire_us: int
    ) -> None:
        session = sequence.session
        # Two arrivals in one window under one verdict: no flush and no lack of credit between.
        goes_on = session.window_len > 0 and sequence.last_arrival_us > sequence.ready_us
        since_last_us = now_us - sequence.last_arrival_us
        disposition = session.receive_draft(draft)
        self.counts[disposition] += 1
        if disposition is Disposition.KEPT:
            sequence.keep(draft, now_us, wire_us)
            sequence.open_pause_us = 0  # this draft is worth coming back to
            if draft.draft_us:
                # A peer's word, so bounded: no draft step of use takes longer than this.
                draft_us = min(draft.draft_us, MAX_DRAFT_US)
                self._policy.draft_token_us.update(draft_us / len(draft.token_ids))
            if goes_on:
                self._policy.arrival_us.update(since_last_us / len(draft.token_ids))
        elif disposition is Disposition.GAP:
            nack = Nack(session.session_id, session.epoch, len(session.log))
            self.pool.send(link_id, nack)

    def _opened(self, link_id: int, sequence: Sequence, opened: Opened, now_us: int) -> None:
        if not sequence.session.receive_opened(opened):
            self.counts[Disposition.STALE_EPOCH] += 1
            return
        if opened.status is OpenStatus.OK:
            return
        self.counts[opened.status] += 1
        link = self.pool.get(link_id)
        if link is not None and opened.status is OpenStatus.BUSY:
            link.busy_until_us = now_us + int(self._config.redial_min_s * _US)
        self._detach_sequence(sequence, now_us)

    def _nack(self, sequence: Sequence, nack: Nack) -> None:
        if nack.epoch != sequence.session.epoch:
            self.counts[Disposition.STALE_EPOCH] += 1
            return
        self.counts["nack"] += 1
        verdict = sequence.session.receive_nack(nack.have_len)
        if verdict is not None:
            self.pool.send(sequence.draft_id, verdict)

    def _given_up(self, sequence: Sequence, close: CloseSession, now_us: int) -> None:
        if close.epoch == sequence.session.epoch and sequence.session.is_attached:
            self.counts["given_up"] += 1
            self._lose(sequence, LinkEvent.PEER_LOST, now_us)

    # -- losing a draft ---------------------------------------------------------------------

    def _part(self, sequence: Sequence, reason: CloseReason) -> None:
        session = sequence.session
        self.pool.send(sequence.draft_id, CloseSession(session.session_id, session.epoch, reason))

    def _lose(self, sequence: Sequence, event: LinkEvent, now_us: int | None = None) -> None:
        """`now_us` given: the draft itself failed us, so pause before the next open."""
        if sequence.session.is_attached:
            sequence.session.lose_draft(event)
        self._detach_sequence(sequence, now_us)

    def _detach_sequence(self, sequence: Sequence, now_us: int | None) -> None:
        self.pool.release(sequence.draft_id, sequence.session.session_id)
        sequence.draft_id = None
        if now_us is not None:
            first = int(self._config.redial_min_s * _US)
            last = int(self._config.redial_max_s * _US)
            sequence.open_pause_us = min(last, max(first, sequence.open_pause_us * 2))
            sequence.next_open_us = now_us + sequence.open_pause_us
