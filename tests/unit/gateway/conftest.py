"""A gateway without Ray: real routes and service over hand-written targets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.config import AuditConfig, GatewayConfig, Offer, SpeculationConfig
from paceline.gateway.api import build_api
from paceline.gateway.plan import DEFAULT_OFFER
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import Tokenizer, ToyTokenizer
from paceline.generation import (
    FinishReason,
    GenerateRequest,
    RoundDelta,
    TokenLogprobs,
    TokenOrigin,
)

# What a target does next: a round, a sign of life, a failure, or a wait for the test.
Step = RoundDelta | Exception | asyncio.Event | None
NOW_S = 1_700_000_000
RANDOM_SEED = 77


class FakeStream:
    """Plays a script; a wait sets `is_waiting` so that a test can act exactly then."""

    def __init__(self, script: Sequence[Step]) -> None:
        self._script = script
        self.num_cancels = 0
        self.is_exhausted = False
        self.is_waiting = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[RoundDelta | None]:
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                self.is_waiting.set()
                await step.wait()
            else:
                yield step
        self.is_exhausted = True

    def cancel(self) -> None:
        self.num_cancels += 1


@dataclass
class FakeTargets:
    """A TargetClient that answers every request with the same script, or the first ones with
    those of `first_scripts`."""

    script: Sequence[Step] = ()
    first_scripts: list[Sequence[Step]] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    choice_aborts: list[tuple[str, int]] = field(default_factory=list)
    abort_gate: asyncio.Event | None = None
    begun: asyncio.Queue[FakeStream] = field(default_factory=asyncio.Queue)
    readiness: bool | asyncio.Event = True
    num_probes: int = 0

    def generate(self, request: GenerateRequest) -> FakeStream:
        self.requests.append(request)
        script = self.first_scripts.pop(0) if self.first_scripts else self.script
        self.streams.append(FakeStream(script))
        self.begun.put_nowait(self.streams[-1])
        return self.streams[-1]

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        if choice is None:
            self.aborts.append(request_id)
        else:
            self.choice_aborts.append((request_id, choice))
        if self.abort_gate is not None:
            await self.abort_gate.wait()

    async def ready(self) -> bool:
        self.num_probes += 1
        if isinstance(self.readiness, asyncio.Event):
            await self.readiness.wait()
            return True
        return self.readiness


class Harness:
    """One gateway, its fake targets and a client."""

    def __init__(
        self,
        max_model_len: int = 64,
        tokenizer: Tokenizer | None = None,
        more_models: Sequence[ServedModel] = (),
        audit: Mapping[str, Any] | None = None,
        mode: str = "coupled",
        offer: Offer = DEFAULT_OFFER,
        **limits: Any,
    ) -> None:
        self.targets = FakeTargets()
        self.pauses: list[float] = []
        config = GatewayConfig(**limits)
        model = ServedModel(
            config.served_model_name,
            tokenizer or ToyTokenizer(),
            self.targets,
            max_model_len,
            speculation=SpeculationConfig.model_validate({"mode": mode, "method": offer.method}),
            offer=offer,
        )
        self.service = GatewayService(
            config,
            [model, *more_models],
            clock=lambda: NOW_S,
            random_hex=lambda: f"{len(self.targets.requests)}",
            random_seed=lambda: RANDOM_SEED,
            sleep=self._sleep,
            audit=AuditConfig.model_validate(audit or {}),
        )
        self.monotonic_s = 1000.0
        self.app: FastAPI = build_api(self.service, monotonic=lambda: self.monotonic_s)

    async def _sleep(self, seconds: float) -> None:
        """No time passes, but others get their turn."""
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def get(self, path: str) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path)

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | kwargs.pop("headers", {})
        async with self.client() as client:
            return await client.post(path, content=content, headers=headers, **kwargs)

    async def complete(self, prompt: str = "hi", **fields: Any) -> httpx.Response:
        return await self.post(
            "/v1/completions", {"model": "toy", "prompt": prompt, "max_tokens": 20, **fields}
        )

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self.post(
            "/v1/chat/completions", {"model": "toy", "messages": messages, **fields}
        )

    async def is_idle(self) -> bool:
        """After the aborts under way, nothing may be in progress."""
        await self.service.drain()
        return self.service.num_in_progress == 0

    def begin(
        self, path: str, body: Any, is_whole: bool = True, headers: Mapping[str, str] | None = None
    ) -> RawExchange:
        return RawExchange(self.app, path, json.dumps(body).encode(), is_whole, headers or {})


class RawExchange:
    """A request driven message by message, so that its client can leave or stop reading.

    Without `is_whole` the body's last part waits for `finish_body`.
    """

    def __init__(
        self, app: FastAPI, path: str, body: bytes, is_whole: bool, headers: Mapping[str, str]
    ) -> None:
        sent = {"content-type": "application/json"} | dict(headers)
        self.sent: list[dict[str, Any]] = []
        self.leave = asyncio.Event()
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        # So many messages (the head is the first) and then no more: set it before they come.
        self.stops_after: int | None = None
        self.is_stuck = asyncio.Event()
        self._body: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._body.put_nowait({"type": "http.request", "body": body, "more_body": not is_whole})
        self._is_whole = is_whole
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._is_whole or not self._body.empty():
            return await self._body.get()
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if len(self.sent) == self.stops_after:
            self.is_reading.clear()
            self.stops_after = None
        if not self.is_reading.is_set():
            self.is_stuck.set()
        await self.is_reading.wait()
        await self.pace()
        self.sent.append(message)

    async def pace(self) -> None:
        """How long one message takes; none."""

    def finish_body(self) -> None:
        self._is_whole = True
        self._body.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


def one_round(
    text: str | bytes | Sequence[int],
    finish_reason: FinishReason | None = None,
    number: int = 0,
    origins: Sequence[TokenOrigin] | None = None,
    **fields: Any,
) -> RoundDelta:
    """A round of the toy model: every byte is a token."""
    token_ids = tuple(text.encode() if isinstance(text, str) else text)
    return RoundDelta(
        number,
        token_ids,
        tuple(origins) if origins else (TokenOrigin.PLAIN,) * len(token_ids),
        finish_reason=finish_reason,
        **fields,
    )


def read_events(raw: str) -> list[Any]:
    """The parsed events of a stream; `[DONE]` stays a string."""
    assert raw.endswith("\n\n")
    events = [event.removeprefix("data: ") for event in raw.removesuffix("\n\n").split("\n\n")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
def make_harness() -> Callable[..., Harness]:
    return Harness


@pytest.fixture
def round_of() -> Callable[..., RoundDelta]:
    return one_round


@pytest.fixture
def events_of() -> Callable[[str], list[Any]]:
    return read_events


def scored_token(token_id: int, num_top: int = 3) -> TokenLogprobs:
    """Made-up figures that tell tokens, and places in the list, apart."""
    top = tuple(((token_id + step) % 256, -0.25 * step - 0.125) for step in range(num_top))
    return TokenLogprobs(token_id, -token_id / 64, token_id % 7 + 1, top)


def scored_round(
    prompt: bytes,
    text: str | bytes | Sequence[int],
    finish_reason: FinishReason | None = None,
    number: int = 0,
    **fields: Any,
) -> RoundDelta:
    """A round whose tokens, and those of a prompt, come with log-probabilities."""
    delta = one_round(text, finish_reason, number, **fields)
    return replace(
        delta,
        logprobs=tuple(scored_token(token_id) for token_id in delta.token_ids),
        prompt_logprobs=tuple(scored_token(token_id) for token_id in prompt[1:]),
    )


@pytest.fixture
def score() -> Callable[..., RoundDelta]:
    return scored_round
