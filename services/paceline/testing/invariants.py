"""What must hold in a simulated cluster after every event, stated once.

The checker sees both ends and every message, which no process can. It changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.errors import RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.draft_branches import MAX_BRANCHES
from paceline.protocol.draft_session import DraftSession
from paceline.protocol.link import LinkState
from paceline.protocol.messages import (
    MAX_BRANCH_TOKENS,
    REJECTION_MODES,
    DraftTokens,
    OpenSession,
    Verdict,
)
from paceline.protocol.target_session import MAX_UNTOLD, TargetSession
from paceline.sampling.params import SamplingParams
from paceline.testing.network import Envelope

SessionEpoch = tuple[int, int, int]  # (target's life, session_id, epoch)
Branch = tuple[tuple[int, ...], tuple[int, ...]]  # the text before it, its proposals


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
    num_evicted: int

    @staticmethod
    def of(session: TargetSession) -> TargetView:
        length = len(session.log)
        content = session.log.hash_at(length)
        num_evicted = session.alternates.num_evicted
        committed_len, link = session.committed_len, session.link
        return TargetView(session.epoch, length, content, committed_len, link, num_evicted)


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


@dataclass(slots=True)
class Grants:
    """What a target has told the draft of one epoch: the largest `limit` and `fan_out`, and the
    text up to `told_len`. `num_branch_tokens` came back since the draft heard a verdict; `branches`
    are those that have arrived and `lag` what the draft was not told at the last pass."""

    has_laws: bool
    told_len: int
    limit: int = 0
    fan_out: int = 0
    num_branch_tokens: int = 0
    branches: list[Branch] = field(default_factory=list)
    lag: int = 0


@dataclass
class Checker:
    """`counts` tells how often the interesting cases occurred, so that a test can demand them."""

    max_draft_ahead: int
    max_fan_out: int = 0
    max_untold: int = MAX_UNTOLD
    counts: Counter[str] = field(default_factory=Counter)
    granted: dict[SessionEpoch, Grants] = field(default_factory=dict)
    # (gateway, choice, sampling parameters): the attempt whose rejection rounds used that noise.
    noise: dict[tuple[int, int, SamplingParams], int] = field(default_factory=dict)
    # (gateway, its tokens so far): targets that died of the request since.
    deaths: Counter[tuple[int, int]] = field(default_factory=Counter)
    # Gateways that gave a target up for its silence: they do not know that it died.
    silenced: set[int] = field(default_factory=set)

    # -- what targets send and drafts obey ---------------------------------------------------

    def target_sends(self, target_id: int, message: OpenSession | Verdict) -> None:
        key = (target_id, message.session_id, message.epoch)
        if isinstance(message, OpenSession):
            has_laws = message.mode in REJECTION_MODES
            self.granted[key] = Grants(has_laws, len(message.token_ids))
        grants = self.granted[key]
        if isinstance(message, Verdict):
            require(message.start <= grants.told_len, "a verdict leaves a gap", message)
            grants.told_len = max(grants.told_len, message.start + len(message.token_ids))
        limit, fan_out = message.limit_position, message.fan_out
        require(limit >= grants.limit, "a credit was taken back", limit, grants.limit)
        most = 0 if grants.has_laws else self.max_fan_out
        require(fan_out <= most, "more branches than may be", fan_out, most)
        grants.limit, grants.fan_out = limit, max(grants.fan_out, fan_out)

    def draft_sends(self, target_id: int, message: DraftTokens) -> None:
        grants = self.granted[target_id, message.session_id, message.epoch]
        end = message.start + len(message.token_ids)
        require(end <= grants.limit, "drafted at or beyond the limit", end, grants.limit)
        if message.is_branch:
            require(grants.fan_out > 0, "a branch that nobody asked for", message)
            grants.num_branch_tokens += len(message.token_ids)
            num = grants.num_branch_tokens
            require(num <= MAX_BRANCH_TOKENS, "too many branches at a time", num)

    # -- a target between two passes ----------------------------------------------------------

    def passed(self, target_id: int, session: TargetSession) -> None:
        """A pass over the session is done, and its verdict is sent if one was due.

        A draft with credit knows every commit; one that rests lags a little, and not for ever.
        """
        if not session.is_attached:
            return
        grants = self.granted[target_id, session.session_id, session.epoch]
        lag = session.committed_len - grants.told_len
        is_resting = session.max_draft_ahead == 0
        most = self.max_untold - 1 if is_resting else 0
        require(lag <= most, "the draft was not told", lag, most)
        self.counts["rested"] += is_resting
        self.counts["caught_up"] += is_resting and lag == 0
        self.counts["woken"] += grants.lag > 0 and not is_resting
        grants.lag = lag
        num_held = len(session.alternates)
        num_heard = sum(len(token_ids) for _, token_ids in grants.branches)
        require(num_held <= num_heard, "alternates of another draft", num_held, num_heard)

    def adopted(self, target_id: int, session: TargetSession) -> None:
        """What became the window at the last commit came as a branch of exactly this text."""
        if not session.num_adopted:
            return
        has_laws = session.mode in REJECTION_MODES
        require(not has_laws, "a branch was adopted in a rejection mode")
        grants = self.granted[target_id, session.session_id, session.epoch]
        text = session.log.slice(0)
        num = len(text) - session.committed_len
        require(num == session.num_adopted, "more or less than a branch was adopted", num)
        for end in range(session.committed_len + 1, len(text) + 1):
            is_true = any(
                len(context) < end <= len(context) + len(token_ids)
                and (*context, *token_ids)[:end] == text[:end]
                for context, token_ids in grants.branches
            )
            require(is_true, "adopted a branch of another text", text, end)
        require(len(text) <= grants.limit, "adopted beyond the limit", len(text), grants.limit)

    # -- messages at a target -----------------------------------------------------------------

    def target_received(
        self, target_id: int, before: TargetView, session: TargetSession, envelope: Envelope
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
        self.counts["alternates_evicted"] += after.num_evicted - before.num_evicted
        if message.is_branch:
            branch = (envelope.context, message.token_ids)
            self.granted[target_id, message.session_id, message.epoch].branches.append(branch)
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

    def draft_received(
        self, target_id: int, before: DraftView, session: DraftSession, message: Verdict
    ) -> None:
        after = DraftView.of(session)
        if message.epoch != before.epoch:
            self.counts["stale_verdict"] += 1
            require(after == before, "a stale epoch changed the draft", message)
            return
        require(after.committed_len >= before.committed_len, "the draft lost committed tokens")
        end = message.start + len(message.token_ids)
        if after.committed_len > before.committed_len:
            self.granted[target_id, message.session_id, message.epoch].num_branch_tokens = 0
        if after.committed_len == end:
            committed = session.log.slice(message.start, end)
            require(committed == message.token_ids, "the draft holds other tokens", message)

    def draft_holds(self, target_id: int, session: DraftSession) -> None:
        grants = self.granted[target_id, session.session_id, session.epoch]
        bound = max(grants.limit, session.committed_len)
        require(len(session.log) <= bound, "draft at or beyond its limit", len(session.log), bound)
        branches = session.branches.live
        require(len(branches) <= MAX_BRANCHES, "too many branches", len(branches))
        positions = Counter(branch.position for branch in branches)
        most = max(positions.values(), default=0)
        require(most <= grants.fan_out, "more branches than asked for", most, grants.fan_out)
        for branch in branches:
            is_inside = session.committed_len <= branch.position and branch.end <= bound
            require(is_inside, "a branch outside the credit", branch.position, branch.end, bound)

    # -- caches -------------------------------------------------------------------------------

    def cache_is(self, what: str, cached: list[int], log: tuple[int, ...]) -> None:
        """The engine computed these rows from exactly the tokens of the session."""
        require(tuple(cached) == log, f"{what} cache differs from its log", cached, log)
