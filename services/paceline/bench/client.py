"""The load client's requests: send one, note when its tokens come, say how it ended.

Every failure of a request becomes an `Outcome` with an error code: nothing of the service's can
raise here. Knows nothing of when requests are sent, and nothing of reports.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from paceline.bench.events import Chunk, EventReader, StreamError, error_code, error_message
from paceline.errors import ConfigError, PacelineError

Clock = Callable[[], float]
CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE_CHARS = 300
MAX_REFUSAL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `fields` is its body without what all requests share."""

    index: int
    path: str
    fields: Mapping[str, Any]
    prompt_id: str = ""
    category: str = ""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are the clock's, in seconds.

    `due_s`: when it should have been sent, which is where its latency begins; `first_s` and
    `last_s`: its first and last tokens. `num_tokens` is the service's own count where it gives one.
    `gaps`: (seconds, tokens) of each chunk behind the first. `error` is "" for a whole answer.
    """

    ask: Ask
    due_s: float
    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    end_s: float = 0.0
    num_tokens: int = 0
    num_chunks: int = 0
    num_prompt_tokens: int = 0
    num_rounds: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_rejections: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str | None = None
    text_digest: str = ""
    error: str = ""
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from when the request was due."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; None for fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    @property
    def latency_s(self) -> float:
        return self.end_s - self.due_s

    def meets(self, ttft_s: float | None, itl_s: float | None) -> bool:
        """Whole, and within each bound that is given; `itl_s` bounds the mean time per token."""
        if self.error or self.first_s is None:
            return False
        is_prompt = ttft_s is None or self.first_s - self.due_s <= ttft_s
        return is_prompt and (itl_s is None or (self.tpot_s or 0.0) <= itl_s)


class Watcher(Protocol):
    """Whoever wants to see requests begin, bring tokens and end, as it happens."""

    def begin(self, now_s: float) -> None: ...
    def chunk(self, chunk: Chunk, now_s: float) -> None: ...
    def end(self, outcome: Outcome) -> None: ...


MAX_PORT = 65535


class LoadClient:
    """Sends requests over one pool of at most `max_connections` connections."""

    def __init__(
        self,
        url: str,
        api_key: str,
        max_connections: int,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        if not api_key.isascii() or not api_key.isprintable():
            raise ConfigError("PACELINE_API_KEY is no API key: it has characters that no key has")
        self._clock = clock
        self._timeout_s = timeout_s
        # A pool that is too small would be the client's own queue, in everyone's latency.
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        )
        headers = {"accept-encoding": "identity"}
        if api_key.strip():
            headers["authorization"] = f"Bearer {api_key.strip()}"
        self._url = url
        try:
            self._http = httpx.AsyncClient(
                base_url=url,
                headers=headers,
                limits=limits,
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{url} is no URL: {error}") from error
        if (self._http.base_url.port or 0) > MAX_PORT:
            raise ConfigError(f"{url} is no URL: a port is at most {MAX_PORT}")

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The name of the first served model; raises what `served` does."""
        return str((await self.served())["id"])

    async def served(self, name: str = "") -> Mapping[str, Any]:
        """What the service says of this model, or of its first one; only the name where it says
        nothing. PacelineError in one sentence when there is none."""
        try:
            response = await self._http.get("/v1/models")
            body = response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PacelineError(f"no answer from {self._url}: {_sentence(error)}") from error
        except ValueError as error:
            raise PacelineError(
                f"{self._url}/v1/models is no JSON: is this the service?"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise PacelineError(
                f"{self._url} answered {response.status_code}: {error_message(body)}"
            )
        try:
            listed: dict[str, Mapping[str, Any]] = {str(one["id"]): one for one in body["data"]}
            "".join(listed).encode()  # half a character could not be asked for
            return listed.get(name, {"id": name}) if name else next(iter(listed.values()))
        except (LookupError, TypeError, StopIteration, UnicodeError) as error:
            if name:
                return {"id": name}
            raise PacelineError(f"{self._url}/v1/models names no model; use --model") from error

    async def send(self, ask: Ask, due_s: float, watcher: Watcher) -> Outcome:
        """One request to its end. `due_s` is the clock's time at which it should have begun."""
        outcome = Outcome(ask, due_s, self._clock())
        watcher.begin(outcome.sent_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(ask, outcome, watcher)
        except StreamError as error:
            outcome.error, outcome.message = error.code, str(error)[:MAX_MESSAGE_CHARS]
        except (TimeoutError, httpx.TimeoutException):
            outcome.error, outcome.message = "timeout", f"no end within {self._timeout_s:g} s"
        except httpx.HTTPError as error:
            outcome.error, outcome.message = "connection", _sentence(error)
        outcome.end_s = self._clock()
        watcher.end(outcome)
        return outcome

    async def _stream(self, ask: Ask, outcome: Outcome, watcher: Watcher) -> None:
        reader, digest = EventReader(), hashlib.sha256()
        async with self._http.stream("POST", ask.path, json=dict(ask.fields)) as response:
            if response.status_code != httpx.codes.OK:
                raise await _refusal(response)
            async for data in response.aiter_bytes():
                now_s = self._clock()
                for chunk in reader.feed(data):
                    digest.update(chunk.text.encode(errors="surrogatepass"))
                    _note(chunk, outcome, now_s)
                    watcher.chunk(chunk, now_s)
        if not reader.is_done:
            raise StreamError("incomplete", "the stream ended without [DONE]")
        outcome.text_digest = digest.hexdigest()


def _note(chunk: Chunk, outcome: Outcome, now_s: float) -> None:
    outcome.finish_reason = chunk.finish_reason or outcome.finish_reason
    outcome.num_rounds += len(chunk.round_ks)
    outcome.num_proposed += chunk.num_proposed
    outcome.num_accepted += chunk.num_accepted
    outcome.num_rejections += chunk.num_rejections
    if chunk.num_tokens:
        if outcome.last_s is None:
            outcome.first_s = now_s
        else:
            outcome.gaps.append((now_s - outcome.last_s, chunk.num_tokens))
        outcome.last_s = now_s
        outcome.num_tokens += chunk.num_tokens
        outcome.num_chunks += 1
    if chunk.usage:
        outcome.num_tokens = chunk.usage.completion_tokens
        outcome.num_prompt_tokens = chunk.usage.prompt_tokens
        if counts := chunk.usage.speculation:
            outcome.num_rounds, outcome.num_proposed, outcome.num_accepted = counts


async def _refusal(response: httpx.Response) -> StreamError:
    content = b""
    async for data in response.aiter_bytes():
        content += data
        if len(content) > MAX_REFUSAL_BYTES:
            break
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    status = response.status_code
    return StreamError(error_code(body, f"http_{status}"), f"{status}: {error_message(body)}")


def _sentence(error: Exception) -> str:
    """Some of httpx's errors have no words of their own."""
    return str(error)[:MAX_MESSAGE_CHARS] or type(error).__name__
