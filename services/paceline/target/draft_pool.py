"""The drafts attached to one target: who may take a sequence, what each is to be sent. Pure.

Knows links by number only; a stream driver owns the bytes. Messages are queued per link in the
order in which they must arrive.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.config import RpcConfig
from paceline.protocol.messages import (
    MAX_BRANCH_TOKENS,
    Hello,
    OpenSession,
    TargetMessage,
    Verdict,
)
from paceline.sampling.params import VerificationMode
from paceline.target.breaker import Breaker, Breakers

# What one of our messages may bring back: the proposals of the whole credit that it states and of
# the branches that it allows, one by one, twice over, and a Nack. An honest draft stays far below;
# a flood runs dry and earns strikes. Answers grant nothing, so this bounds every loop of messages,
# too: of Nacks, gaps and late proposals.
ANSWERS_PER_POSITION = 2
ANSWERS_EXTRA = 8
ALLOWANCE_FLOOR = 1024


def max_answers(message: TargetMessage) -> int:
    """Most messages about its sequence that an honest draft may send because of this one."""
    match message:
        case OpenSession() | Verdict():
            end = len(message.token_ids) + (message.start if isinstance(message, Verdict) else 0)
            num_positions = max(0, message.limit_position - end)
            # Each runner-up of each position may be a branch, with up to so many tokens.
            num_of_branches = message.fan_out * num_positions**2
            num_tokens = num_positions + min(num_of_branches, MAX_BRANCH_TOKENS)
            return ANSWERS_PER_POSITION * num_tokens + ANSWERS_EXTRA
        case _:
            return ANSWERS_EXTRA


@dataclass(slots=True)
class DraftLink:
    """One attached draft. `strikes` counts broken rules; `sessions` are sequence ids.

    `allowance`: messages about sequences that it may still send. Invariant: <= `max_allowance`.
    `most_answers`: the most that one of our messages has allowed. It does not fall with a smaller
    credit: what was sent under a larger one may still be on its way.
    """

    hello: Hello
    breaker: Breaker
    sessions: set[int] = field(default_factory=set)
    outbox: list[TargetMessage] = field(default_factory=list)
    strikes: int = 0
    is_draining: bool = False
    busy_until_us: int = 0
    allowance: int = ALLOWANCE_FLOOR
    max_allowance: int = ALLOWANCE_FLOOR
    most_answers: int = ANSWERS_EXTRA


class DraftPool:
    """Links by id. `rpc.max_remote_errors` broken rules cost a draft its stream."""

    def __init__(self, config: RpcConfig) -> None:
        self.max_strikes = config.max_remote_errors
        self._breakers = Breakers(config)
        self._links: dict[int, DraftLink] = {}

    def __len__(self) -> int:
        return len(self._links)

    def attach(self, link_id: int, hello: Hello) -> None:
        self._links[link_id] = DraftLink(hello, self._breakers.get(hello.replica_id))

    def detach(self, link_id: int) -> set[int]:
        """Forget a link, but not its draft's breaker; returns the sequences that it served."""
        link = self._links.pop(link_id, None)
        if link is None:
            return set()
        for session_id in link.sessions:
            link.breaker.release(session_id)
        return link.sessions

    def get(self, link_id: int | None) -> DraftLink | None:
        return None if link_id is None else self._links.get(link_id)

    def links(self) -> dict[int, DraftLink]:
        return self._links

    @property
    def has_draining(self) -> bool:
        return any(link.is_draining for link in self._links.values())

    def breaker_states(self) -> dict[str, str]:
        """By replica id, of the drafts that are attached."""
        links = self._links.values()
        return {link.hello.replica_id: link.breaker.state.value for link in links}

    def can_open(self, now_us: int) -> bool:
        """Whether any draft at all may be given a sequence; asked once for all of them."""
        return any(
            not link.is_draining and link.breaker.may_open(now_us) for link in self._links.values()
        )

    def choose(
        self,
        mode: VerificationMode,
        now_us: int,
        avoid: int | None = None,
        length: int = 0,
        barred: Collection[str] = (),
    ) -> int | None:
        """The least loaded draft that may take one more sequence; `avoid` only as a last resort.

        A draft whose own context ends at or before `length` tokens could not propose anything.
        `barred` are replicas that must not have it. None is chosen that is dark, but for a probe.
        """
        candidates = [
            (link_id == avoid, len(link.sessions), link_id)
            for link_id, link in self._links.items()
            if mode in link.hello.modes
            and not link.is_draining
            and link.busy_until_us <= now_us
            and link.hello.max_model_len > length
            and len(link.sessions) < link.hello.max_sessions
            and link.strikes < self.max_strikes
            and link.hello.replica_id not in barred
            and link.breaker.may_open(now_us)
        ]
        return min(candidates)[2] if candidates else None

    def assign(self, link_id: int, session_id: int) -> bool:
        """A chosen draft is to serve this sequence; True when it is the one that probes it."""
        link = self._links[link_id]
        link.sessions.add(session_id)
        return link.breaker.open(session_id)

    def send(self, link_id: int | None, message: TargetMessage, *, grants: bool = False) -> None:
        """Queue a message; a link that is gone swallows it.

        `grants`: news of our own, which the draft may answer. An answer to the draft grants
        nothing, else a flood would feed itself.
        """
        link = None if link_id is None else self._links.get(link_id)
        if link is None:
            return
        link.outbox.append(message)
        if grants:
            num_answers = max_answers(message)
            link.most_answers = max(link.most_answers, num_answers)
            link.max_allowance = max(ALLOWANCE_FLOOR, link.most_answers * 2 * len(link.sessions))
            link.allowance = min(link.max_allowance, link.allowance + num_answers)

    def spend(self, link_id: int) -> bool:
        """One message about a sequence has come in; False when the draft floods us."""
        link = self._links.get(link_id)
        if link is None:
            return False
        if link.allowance <= 0:
            link.strikes += 1
            return False
        link.allowance -= 1
        return True

    def release(self, link_id: int | None, session_id: int) -> None:
        link = None if link_id is None else self._links.get(link_id)
        if link is not None:
            link.sessions.discard(session_id)
            link.breaker.release(session_id)

    def strike(self, link_id: int) -> None:
        link = self._links.get(link_id)
        if link is not None:
            link.strikes += 1

    def take_outbox(self) -> dict[int, list[TargetMessage]]:
        out: dict[int, list[TargetMessage]] = {}
        for link_id, link in self._links.items():
            if link.outbox:
                out[link_id], link.outbox = link.outbox, []
        return out

    def take_outlaws(self) -> list[int]:
        """Links whose stream must be closed for breaking rules too often."""
        return [i for i, link in self._links.items() if link.strikes >= self.max_strikes]
