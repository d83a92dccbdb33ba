"""No evidence is chosen by what it says: whoever ends a text, or an audit, early must not make a
right service look wrong. Targets here draw from a law of two tokens, exactly.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from paceline.config import AuditConfig, GatewayConfig, SpeculationConfig
from paceline.errors import OverloadedError
from paceline.gateway.audit_samples import AuditCounts
from paceline.gateway.openai import CompletionBody
from paceline.gateway.plan import Endpoint
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta, TokenLogprobs, TokenOrigin
from tests.unit.gateway.audit_tools import until_idle

COMMON, RARE = ord("X"), ord("S")
RARITY = 0.1
LAW = ((COMMON, math.log(1.0 - RARITY)), (RARE, math.log(RARITY)))
NUM_TOKENS = 16


@dataclass
class Coins:
    """`rare_ends`: the rare token ends a text. `interruption`: with this probability a request in
    the background is given up at a token."""

    rare_ends: bool = False
    interruption: float = 0.0
    num_interruptions: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    _clients: Random = field(default_factory=lambda: Random(7))

    def generate(self, request: GenerateRequest) -> Coins.Stream:
        self.requests.append(request)
        return Coins.Stream(self._rounds(request))

    @dataclass
    class Stream:
        rounds: AsyncIterator[RoundDelta]

        def __aiter__(self) -> AsyncIterator[RoundDelta]:
            return self.rounds

        def cancel(self) -> None:
            """Nothing runs."""

    async def _rounds(self, request: GenerateRequest) -> AsyncIterator[RoundDelta]:
        if request.num_prompt_logprobs is not None:
            yield scored(request)
            return
        output = () if request.resumption is None else request.resumption.outputs[0]
        assert output is not None
        random = Random(request.sampling.seed)
        for index in range(len(output), request.max_tokens):
            if request.is_background and self._clients.random() < self.interruption:
                self.num_interruptions += 1
                raise OverloadedError("x", None, "no_place")
            token_id = RARE if random.random() < RARITY else COMMON
            is_stopped = token_id == RARE and self.rare_ends
            end: Any = "stop" if is_stopped else "length"
            is_last = is_stopped or index == request.max_tokens - 1
            yield RoundDelta(
                index, (token_id,), (TokenOrigin.PLAIN,), finish_reason=end if is_last else None
            )
            if is_last:
                return

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """Nothing runs."""

    async def ready(self) -> bool:
        return True


def scored(request: GenerateRequest) -> RoundDelta:
    logprobs = dict(LAW)
    entries = tuple(
        TokenLogprobs(i, logprobs.get(i, -20.0), 1, LAW) for i in request.prompt_token_ids[1:]
    )
    return RoundDelta(
        0, (COMMON,), (TokenOrigin.PLAIN,), finish_reason="length", prompt_logprobs=entries
    )


async def audited(coins: Coins, num: int, *, leaves: bool = False, **fields: Any) -> AuditCounts:
    """The counts after `num` requests; `leaves`: each client does when it reads the rare token.
    Stops at an alarm."""
    random = Random(3)

    async def no_time(seconds: float) -> None:
        pass

    speculation = SpeculationConfig.model_validate({"mode": "rejection"})
    service = GatewayService(
        GatewayConfig(),
        [ServedModel("toy", ToyTokenizer(), coins, 64, speculation=speculation)],
        clock=lambda: 0.0,
        random_hex=lambda: f"{len(coins.requests)}",
        random_seed=lambda: random.getrandbits(64),
        sleep=no_time,
        audit=AuditConfig(sample_ratio=1.0, tie_tolerance=0.001),
    )
    given = {"model": "toy", "prompt": "hi", "max_tokens": NUM_TOKENS} | fields
    body = CompletionBody.model_validate(given)
    counts = service.audit.counts["toy"]
    for _ in range(num):
        with service.places(body):
            (plan,) = await service.plans(Endpoint.COMPLETIONS, body)
            async with aclosing(service.rounds(plan, service.answer(plan))) as rounds:
                async for item in rounds:
                    if leaves and RARE in item.delta.token_ids:
                        break
        await until_idle(service.audit)
        if counts.num_alarms:
            break
    await service.drain()
    return counts


@pytest.mark.parametrize("given", [{"stop": "S"}, {"leaves": True}], ids=["stop", "left"])
async def test_texts_that_were_ended_for_what_they_say(given: dict[str, Any]) -> None:
    """Each ends at its first rare token, a plain one does not."""
    counts = await audited(Coins(), 400, **given)
    assert (counts.num_alarms, counts.num_requests) == (0, 400)
    assert counts.e_value < 20.0


async def test_audits_that_clients_end() -> None:
    """The longer a plain text gets, the likelier they do."""
    coins = Coins(rare_ends=True, interruption=0.1)
    counts = await audited(coins, 400)
    assert coins.num_interruptions > 100
    assert counts.num_alarms == 0
    assert counts.e_value < 20.0
    assert counts.num_requests + counts.skipped.total() == 400


async def test_the_law_of_two_is_the_tests() -> None:
    """What these tests stand on: nobody interferes, and nothing is found."""
    counts = await audited(Coins(), 200)
    assert (counts.num_requests, counts.num_alarms) == (200, 0)
