"""What the gateway needs of the targets, however many there are, and how it listens to one.

Knows no request body, no text and no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from paceline.config import Offer, SpeculationConfig
from paceline.gateway.failover import target_lost
from paceline.gateway.tokenizer import Tokenizer
from paceline.generation import GenerateRequest, RoundDelta

ABORT_TIMEOUT_S = 5.0


class TargetStream(Protocol):
    """The rounds of one request, and None as a sign of life. RequestErrors of the target come out
    of the iteration as they are; a target that cannot be reached is a RequestError too (503)."""

    def __aiter__(self) -> AsyncIterator[RoundDelta | None]: ...

    def cancel(self) -> None:
        """Stop listening, at once and without waiting."""


class TargetClient(Protocol):
    """The targets, however many there are."""

    def generate(self, request: GenerateRequest) -> TargetStream: ...

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """Free the request, or only one of its choices, wherever it runs; what is unknown there
        is ignored. Never raises."""

    async def ready(self) -> bool:
        """Whether a target would answer a request. May take long; never raises."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests with `model: name` get: a pool of targets and how to talk to it.

    `adapter` names a LoRA adapter of the pool's targets, and `parent` the served model that it
    adapts; empty: the model itself. Several served models may share a pool, and then its
    `targets` and `tokenizer`. `speculation` and `offer` are the pool's.
    """

    name: str
    tokenizer: Tokenizer
    targets: TargetClient
    max_model_len: int
    adapter: str = ""
    parent: str = ""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    offer: Offer = field(default_factory=Offer)


async def next_delta(
    deltas: AsyncIterator[RoundDelta | None], silence_s: float
) -> RoundDelta | None:
    """The next news, or None at the stream's end. Raises RequestError (503) for a target that
    gives no sign of life for `silence_s`; the iterator is of no use afterwards."""
    while True:
        timeout = asyncio.timeout(silence_s)
        try:
            async with timeout:
                delta = await anext(deltas)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            if not timeout.expired():
                raise
            raise target_lost() from None
        if delta is not None:
            return delta
