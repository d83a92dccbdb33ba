"""What must hold in a simulated cluster after every event, stated once.

The checker sees both ends and every message, which no process can. It changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.errors import RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.draft_session import DraftSession
from paceline.protocol.link import LinkState
from paceline.protocol.messages import DraftTokens, OpenSession, Verdict
from paceline.protocol.target_session import TargetSession
from paceline.sampling.params import SamplingParams
from paceline.testing.network import Envelope

SessionEpoch = tuple[int, int, int]  # (target's life, session_id, epoch)


class InvariantError(AssertionError):
    """The cluster broke a promise."""


def require(is_true: bool, what: str, *details: object) -> None:
    if not is_true:
        raise InvariantError(": ".join([what, *map(str, details)]))


@dataclass(slots=True)
class Ticket:
    """A client's view of one choice: what it should get, what it got so far.

    `expected` None: the text depends on the drafts (rejection modes), and only its end is known.
    `error`: why it ended without being whole. Only `SimulatedGateway` knows which are allowed.
    """

    request: GenerateRequest
    choice: int
    expected: tuple[int, ...] | None
    received: list[int] = field(default_factory=list)
    is_begun: bool = False
    is_done: bool = False
    is_aborted: bool = False
    error: RequestError | None = None
    num_rounds: int = 0

    @property
    def text(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.received)

    def receive(self, delta: RoundDelta) -> None:
        """Lossless and monotone: at any time a prefix of the target-only run, at the end all."""
        where = f"{self.request.request_id}[{self.choice}]"
        require(not self.is_done, "tokens after the end", where)
        require(delta.choice == self.choice, "another choice's tokens", where, delta.choice)
        self.num_rounds += 1
        require(delta.round == self.num_rounds, "rounds do not follow", where, delta.round)
        self._check_extras(delta, where)
        self.received += delta.token_ids
        self.is_begun, self.is_done = True, delta.finish_reason is not None
        got, expected = tuple(self.received), self.expected
        if expected is None:
            is_full = len(got) == self.request.max_tokens
            require(len(got) <= self.request.max_tokens, "too many tokens", where, got)
            require(is_full <= self.is_done, "goes on at max_tokens", where, got)
            return
        require(got == expected[: len(got)], "tokens differ", where, got, expected)
        if self.is_done:
            require(got == expected, "ended early", where, got, expected)

    def fail(self, error: RequestError) -> None:
        self.is_done, self.error = True, error

    def _check_extras(self, delta: RoundDelta, where: str) -> None:
        """Log-probabilities for each token, exactly once; the prompt's with the first delta."""
        request, prompt = self.request, self.request.prompt_token_ids
        scored = tuple(entry.token_id for entry in delta.logprobs)
        wanted = () if request.num_logprobs is None else delta.token_ids
        require(scored == wanted, "logprobs of other tokens", where, scored, wanted)
        scored = tuple(entry.token_id for entry in delta.prompt_logprobs)
        is_due = not (self.is_begun or self.choice) and request.num_prompt_logprobs is not None
        wanted = prompt[1:] if is_due else ()
        require(scored == wanted, "prompt logprobs of other tokens", where, scored, wanted)
        most = 0 if self.is_begun else len(prompt) - 1
        require(delta.num_cached_tokens <= most, "too many cached tokens", where, delta)


@dataclass(frozen=True, slots=True)
class TargetView:
    """A target session's state before a message."""

    epoch: int
    length: int
    content: int
    committed_len: int
    link: LinkState

    @staticmethod
    def of(session: TargetSession) -> TargetView:
        length = len(session.log)
        content = session.log.hash_at(length)
        return TargetView(session.epoch, length, content, session.committed_len, session.link)


@dataclass(frozen=True, slots=True)
class DraftView:
    """A draft session's state before a message."""

    epoch: int
    content: int
    length: int
    committed_len: int
    limit_position: int
    sent_len: int
    num_computed: int

    @staticmethod
    def of(session: DraftSession) -> DraftView:
        length = len(session.log)
        return DraftView(
            session.epoch,
            session.log.hash_at(length),
            length,
            session.committed_len,
            session.limit_position,
            session.sent_len,
            session.num_computed,
        )


@dataclass
class Checker:
    """`counts` tells how often the interesting cases occurred, so that a test can demand them."""

    max_draft_ahead: int
    counts: Counter[str] = field(default_factory=Counter)
    granted: dict[SessionEpoch, int] = field(default_factory=dict)
    # (gateway, choice, sampling parameters): the attempt whose rejection rounds used that noise.
    noise: dict[tuple[int, int, SamplingParams], int] = field(default_factory=dict)
    # (gateway, its tokens so far): targets that died of the request since.
    deaths: Counter[tuple[int, int]] = field(default_factory=Counter)
    # Gateways that gave a target up for its silence: they do not know that it died.
    silenced: set[int] = field(default_factory=set)

    # -- what targets send and drafts obey ---------------------------------------------------

    def target_sends(self, target_id: int, message: OpenSession | Verdict) -> None:
        key = (target_id, message.session_id, message.epoch)
        self.granted[key] = max(self.granted.get(key, 0), message.limit_position)

    def draft_sends(self, target_id: int, message: DraftTokens) -> None:
        limit = self.granted[target_id, message.session_id, message.epoch]
        end = message.start + len(message.token_ids)
        require(end <= limit, "drafted at or beyond the limit", end, limit)

    # -- messages at a target -----------------------------------------------------------------

    def target_received(
        self, before: TargetView, session: TargetSession, envelope: Envelope
    ) -> None:
        """`DraftTokens` for a session that this stream's draft serves."""
        message = envelope.message
        assert isinstance(message, DraftTokens)
        after = TargetView.of(session)
        require(after.committed_len == before.committed_len, "a draft changed committed tokens")
        if message.epoch != before.epoch:
            self.counts["stale_draft"] += 1
            require(after == before, "a stale epoch changed the target", message)
            return
        require(session.window_len <= self.max_draft_ahead, "window too long", session.window_len)
        if after.length <= before.length:
            return
        self.counts["checked_context"] += 1
        if envelope.is_corrupt:
            return  # its place may be a lie, so there is no true context to compare with
        end = message.start + len(message.token_ids)
        require(after.length == end, "the window ends elsewhere than the message", message)
        context = session.log.slice(0, message.start)
        require(context == envelope.context, "kept a proposal of another context", message)
        held = session.log.slice(message.start, end)
        require(held == message.token_ids, "the window is not what was sent", held, message)

    # -- messages at a draft ------------------------------------------------------------------

    def draft_received(self, before: DraftView, session: DraftSession, message: Verdict) -> None:
        after = DraftView.of(session)
        if message.epoch != before.epoch:
            self.counts["stale_verdict"] += 1
            require(after == before, "a stale epoch changed the draft", message)
            return
        require(after.committed_len >= before.committed_len, "the draft lost committed tokens")
        end = message.start + len(message.token_ids)
        if after.committed_len == end:
            committed = session.log.slice(message.start, end)
            require(committed == message.token_ids, "the draft holds other tokens", message)

    def draft_holds(self, target_id: int, session: DraftSession) -> None:
        limit = self.granted[target_id, session.session_id, session.epoch]
        bound = max(limit, session.committed_len)
        require(len(session.log) <= bound, "draft at or beyond its limit", len(session.log), bound)

    # -- caches -------------------------------------------------------------------------------

    def cache_is(self, what: str, cached: list[int], log: tuple[int, ...]) -> None:
        """The engine computed these rows from exactly the tokens of the session."""
        require(tuple(cached) == log, f"{what} cache differs from its log", cached, log)
