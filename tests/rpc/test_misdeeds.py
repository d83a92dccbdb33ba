"""A peer that shakes hands like a draft and then misbehaves costs itself, never a request."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import pytest

from paceline.protocol.draft_session import DraftSession
from paceline.protocol.draft_table import SUPPORTED_MODES, DraftTable
from paceline.protocol.messages import (
    PROTOCOL_VERSION,
    CloseReason,
    CloseSession,
    DraftMessage,
    DraftTokens,
    Hello,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
)
from paceline.rpc.client import dial
from paceline.rpc.codec import encode_draft
from paceline.rpc.errors import HandshakeRefused, StreamLost
from paceline.target.driver import TargetDriver
from tests.rpc import fleet, wire

HELLO = Hello(
    protocol_version=PROTOCOL_VERSION,
    boot_id="rogue-boot",
    replica_id="rogue",
    model_id="toy",
    vocab_size=fleet.INFO.vocab_size,
    tokenizer_hash=fleet.INFO.tokenizer_hash,
    max_model_len=512,
    max_sessions=100,
    modes=SUPPORTED_MODES,
)

Misdeed = Callable[[OpenSession], Sequence[DraftMessage]]


async def misbehave(target: TargetDriver, misdeed: Misdeed) -> None:
    """Answer every Open with `misdeed`, until the target hangs up."""
    settings = fleet.config()
    async with dial(target.server.address, settings.rpc, HELLO) as (_, stream):
        try:
            while True:
                for message in await stream.receive():
                    if isinstance(message, OpenSession):
                        for answer in misdeed(message):
                            stream.send(answer)
        except StreamLost:
            return


def proposal(opened: OpenSession, token_ids: tuple[int, ...]) -> DraftTokens:
    """A well-formed one for the first positions."""
    session = DraftSession(opened, max_len=512)
    session.log.extend(token_ids)
    draft = session.take_draft()
    assert draft is not None
    return draft


def ok(opened: OpenSession) -> Opened:
    return Opened(opened.session_id, opened.epoch, OpenStatus.OK)


def lies(opened: OpenSession) -> Sequence[DraftMessage]:
    return [ok(opened), proposal(opened, (63, 62, 61, 60))]


def other_context(opened: OpenSession) -> Sequence[DraftMessage]:
    draft = proposal(opened, (1, 2))
    return [ok(opened), dataclasses.replace(draft, context_hash=draft.context_hash ^ 1)]


def old_epoch(opened: OpenSession) -> Sequence[DraftMessage]:
    return [ok(opened), dataclasses.replace(proposal(opened, (1, 2)), epoch=opened.epoch + 7)]


def beyond_the_credit(opened: OpenSession) -> Sequence[DraftMessage]:
    return [ok(opened), proposal(opened, (1,) * 40)]


def into_the_prompt(opened: OpenSession) -> Sequence[DraftMessage]:
    return [ok(opened), dataclasses.replace(proposal(opened, (1, 2)), start=3)]


def a_gap(opened: OpenSession) -> Sequence[DraftMessage]:
    draft = proposal(opened, (1, 2))
    return [ok(opened), dataclasses.replace(draft, start=draft.start + 3, last_round=10**6)]


def never_answers(opened: OpenSession) -> Sequence[DraftMessage]:
    return []


def speaks_before_opened(opened: OpenSession) -> Sequence[DraftMessage]:
    return [proposal(opened, (9, 9)), ok(opened), ok(opened)]


def gives_up(opened: OpenSession) -> Sequence[DraftMessage]:
    return [ok(opened), CloseSession(opened.session_id, opened.epoch, CloseReason.ABORTED)]


def nonsense_nacks(opened: OpenSession) -> Sequence[DraftMessage]:
    return [
        ok(opened),
        Nack(opened.session_id, opened.epoch, 1),
        Nack(opened.session_id, opened.epoch + 1, 10**6),
    ]


def other_sessions(opened: OpenSession) -> Sequence[DraftMessage]:
    draft = proposal(opened, (1, 2))
    return [
        ok(opened),
        dataclasses.replace(draft, session_id=10**9),
        Opened(10**9, 1, OpenStatus.OK),
        CloseSession(10**9, 1, CloseReason.ABORTED),
    ]


@pytest.mark.parametrize(
    ("misdeed", "count"),
    [
        (lies, "kept diverged"),  # diverged: the target was past it already
        (other_context, "diverged"),
        (old_epoch, "stale_epoch"),
        (beyond_the_credit, "remote_error"),
        (into_the_prompt, "remote_error"),
        (a_gap, "gap"),
        (never_answers, "opened"),
        (speaks_before_opened, "kept diverged"),
        (gives_up, "given_up"),
        (nonsense_nacks, "remote_error"),
        (other_sessions, "unknown_session"),
    ],
)
async def test_requests_are_as_without_it(misdeed: Misdeed, count: str) -> None:
    settings = fleet.config()
    async with fleet.target(settings) as target:
        rogue = asyncio.create_task(misbehave(target, misdeed))
        await fleet.until(lambda: target.num_links == 1)
        wanted = [fleet.request(f"r{i}", temperature=0.8, seed=i) for i in range(4)]
        got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
        assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
        assert sum(target.scheduler.drafts.counts[name] for name in count.split()) > 0
        await fleet.until(lambda: target.scheduler.num_free_blocks == fleet.INFO.num_blocks)
        rogue.cancel()
        await asyncio.gather(rogue, return_exceptions=True)


async def test_a_rule_breaker_loses_its_stream_and_an_honest_draft_serves_on() -> None:
    settings = fleet.with_rpc(fleet.config(), breaker_failures=100)
    async with fleet.target(settings) as target:
        rogue = asyncio.create_task(misbehave(target, beyond_the_credit))
        await fleet.until(lambda: target.num_links == 1)
        async with asyncio.timeout(60):
            while not rogue.done():  # until the target says Bye
                await fleet.collect(target, fleet.request("r"))
        assert target.scheduler.drafts.counts["remote_error"] == settings.rpc.max_remote_errors
        async with fleet.draft(settings, target):
            wanted = fleet.request("after", temperature=0.8, seed=9)
            deltas = await fleet.collect(target, wanted)
            assert fleet.tokens(deltas) == fleet.alone(wanted)
            assert fleet.accepted(deltas) > 0


async def test_an_outlaw_comes_back_dark_and_is_not_asked() -> None:
    settings = fleet.with_rpc(
        fleet.config(), max_remote_errors=2, breaker_failures=100, breaker_min_s=600
    )
    async with fleet.target(settings) as target:
        counts = target.scheduler.drafts.counts
        rogue = asyncio.create_task(misbehave(target, into_the_prompt))
        await fleet.until(lambda: target.num_links == 1)
        async with asyncio.timeout(60):
            while not rogue.done():
                await fleet.collect(target, fleet.request("r"))
        opened = counts["opened"]
        again = asyncio.create_task(misbehave(target, lies))
        await fleet.until(lambda: target.num_links == 1)
        assert target.scheduler.drafts.pool.breaker_states() == {"rogue": "dark"}
        deltas = await fleet.collect(target, fleet.request("after"))
        assert (fleet.proposed(deltas), counts["opened"], counts["outlawed"]) == (0, opened, 1)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


async def test_so_does_one_that_sends_garbage() -> None:
    settings = fleet.with_rpc(fleet.config(), breaker_failures=100, breaker_min_s=600)
    async with fleet.target(settings) as target:
        async with wire.raw_call(target.server.address) as raw:
            await raw.say(encode_draft([HELLO], wire.LIMITS)[0])
            await raw.say(*[b"garbage"] * settings.rpc.max_remote_errors)
            assert "too many malformed messages" in (await raw.status())[1]
        await fleet.until(lambda: target.num_links == 0)
        rogue = asyncio.create_task(misbehave(target, lies))
        await fleet.until(lambda: target.num_links == 1)
        assert target.scheduler.drafts.pool.breaker_states() == {"rogue": "dark"}
        rogue.cancel()
        await asyncio.gather(rogue, return_exceptions=True)


async def test_a_draft_that_fails_again_and_again_is_dark_and_the_honest_one_gets_all() -> None:
    settings = fleet.with_rpc(fleet.config(), breaker_failures=3, breaker_min_s=600)
    async with fleet.target(settings) as target:
        counts = target.scheduler.drafts.counts
        rogue = asyncio.create_task(misbehave(target, gives_up))
        await fleet.until(lambda: target.num_links == 1)
        while not counts["dark"]:
            await fleet.collect(target, fleet.request("r"))
        assert counts["given_up"] == counts["opened"] + counts["reopened"] == 3
        async with fleet.draft(settings, target) as honest:
            await fleet.until(lambda: target.num_links == 2)
            wanted = [fleet.request(f"r{i}", temperature=0.8, seed=i) for i in range(4)]
            got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
            assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
            assert all(fleet.accepted(deltas) > 0 for deltas in got)
            assert (honest.table.stats.num_opened, counts["given_up"]) == (4, 3)
        rogue.cancel()
        await asyncio.gather(rogue, return_exceptions=True)


class PoisonsOne(DraftTable):
    """Honest, but for sequence 2: there it speaks about the prompt."""

    def take_drafts(self, now_us: int) -> dict[int, list[DraftTokens]]:
        return {
            link_id: [dataclasses.replace(d, start=0) if d.session_id == 2 else d for d in drafts]
            for link_id, drafts in super().take_drafts(now_us).items()
        }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_one_poisoned_sequence_costs_only_itself_its_draft(temperature: float) -> None:
    settings = fleet.with_rpc(fleet.config(), max_remote_errors=2)
    async with (
        fleet.target(settings, step_ms=10) as target,  # time for the draft on a busy machine
        fleet.draft(settings, target) as draft,
    ):
        draft.table.__class__ = PoisonsOne
        counts = target.scheduler.drafts.counts
        wanted = [
            fleet.request(f"r{i}", temperature=temperature, seed=i, max_tokens=300)
            for i in range(5)
        ]
        got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
        assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
        assert [fleet.proposed(deltas) > 0 for deltas in got] == [True, False, True, True, True]
        assert all(fleet.accepted(got[i][-20:]) > 0 for i in (0, 2, 3, 4))
        assert (counts["remote_error"], counts["opened"], counts["reopened"]) == (1, 5, 0)
        assert target.num_links == 1
        await fleet.until(lambda: len(draft.table) == 0)
        await fleet.until_free(draft)


async def test_a_draft_with_another_tokenizer_is_refused_and_requests_go_on() -> None:
    settings = fleet.config()
    other = dataclasses.replace(HELLO, tokenizer_hash="another")
    async with fleet.target(settings) as target:
        with pytest.raises(HandshakeRefused, match="tokenizers differ"):
            async with dial(target.server.address, settings.rpc, other):
                pass
        assert target.num_links == 0
        wanted = fleet.request("on", temperature=0.8, seed=2)
        assert fleet.tokens(await fleet.collect(target, wanted)) == fleet.alone(wanted)
