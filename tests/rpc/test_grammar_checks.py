"""A grammar that takes long to check holds up nobody but its own request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from paceline.config import AppConfig
from paceline.engine.base import EngineInfo
from paceline.errors import RequestError
from paceline.generation import GenerateRequest
from paceline.grammars import TokenGrammars, load_grammars
from paceline.sampling.params import SamplingParams
from paceline.target.driver import TargetDriver
from tests.rpc import fleet

pytestmark = pytest.mark.timeout(60)

WAIT_S = 50.0
SLOW = LLMatcher.grammar_from_regex("slow[ab]{3}")
QUICK = LLMatcher.grammar_from_regex("quick[ab]{3}")


class Gated(TokenGrammars):
    """`SLOW` compiles no sooner than `gate` is open."""

    def __init__(self) -> None:
        toy = load_grammars("toy")
        super().__init__(toy._tokenizer, toy.vocab_size)
        self.gate, self.has_begun = threading.Event(), threading.Event()

    def _compile(self, grammar: str) -> LLMatcher:
        if grammar == SLOW:
            self.has_begun.set()
            assert self.gate.wait(WAIT_S)
        return super()._compile(grammar)


@asynccontextmanager
async def gated() -> AsyncIterator[tuple[TargetDriver, Gated]]:
    grammars = Gated()
    grammars.start(QUICK)
    info = EngineInfo("toy", 257, 512, 16, 512, "toy", (256,), grammars)
    settings = AppConfig.model_validate({"target": {"alive_interval_s": 0.01}})
    try:
        async with fleet.target(settings, info=info) as driver:
            yield driver, grammars
    finally:
        grammars.gate.set()


def request(name: str, grammar: str) -> GenerateRequest:
    law = SamplingParams(0.0, grammar=grammar)
    return replace(fleet.request(name, max_tokens=16), sampling=law)


def text(token_ids: Sequence[int]) -> str:
    return bytes(i for i in token_ids if i < 256).decode()


async def test_others_go_on_and_it_says_that_it_lives() -> None:
    async with gated() as (target, grammars):
        items = target.generate(request("slow", SLOW))
        assert await anext(items) is None
        assert grammars.has_begun.is_set()
        plain = fleet.request("plain", max_tokens=8)
        assert len(fleet.tokens(await fleet.collect(target, plain))) == 8
        quick = await fleet.collect(target, request("quick", QUICK))  # is compiled already
        assert text(fleet.tokens(quick)).startswith("quick")
        assert [await anext(items) for _ in range(3)] == [None] * 3
        grammars.gate.set()
        deltas = [delta async for delta in items if delta is not None]
        assert text(fleet.tokens(deltas)).startswith("slow")
        await fleet.until_free(target)


async def test_its_id_is_taken_meanwhile() -> None:
    async with gated() as (target, _), aclosing(target.generate(request("r", SLOW))) as items:
        assert await anext(items) is None
        with pytest.raises(RequestError, match="in progress"):
            await anext(target.generate(request("r", QUICK)))


async def test_an_abort_does_not_wait_for_it() -> None:
    async with gated() as (target, grammars):
        items = target.generate(request("r", SLOW))
        assert await anext(items) is None
        assert not target.abort("r", 0), "it has no choices yet"
        assert target.abort("r")
        assert not target.abort("r")
        with pytest.raises(RequestError) as caught:
            await anext(items)
        assert caught.value.code == "aborted"
        assert not grammars.gate.is_set()
        # its id is free again
        again = await fleet.collect(target, request("r", QUICK))
        assert text(fleet.tokens(again)).startswith("quick")


async def test_an_abort_just_when_it_is_done() -> None:
    async with gated() as (target, grammars):
        items = target.generate(request("r", SLOW))
        assert await anext(items) is None
        grammars.gate.set()
        (check,) = target._checks.values()
        await asyncio.wait((check,))
        assert target.abort("r")
        with pytest.raises(RequestError, match="aborted"):
            await anext(items)
        await fleet.until_free(target)


async def test_who_leaves_leaves_nothing() -> None:
    async with gated() as (target, _):
        async with aclosing(target.generate(request("r", SLOW))) as items:
            assert await anext(items) is None
        assert target._checks == {}
        await fleet.until_free(target)


async def test_a_bad_grammar_is_refused_as_before() -> None:
    async with gated() as (target, _):
        with pytest.raises(RequestError, match="cannot be used") as caught:
            await fleet.collect(target, request("r", "no grammar ("))
        assert (caught.value.status, caught.value.param) == (400, "response_format")
        assert target._checks == {}
