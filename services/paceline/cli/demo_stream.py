"""The demo's HTTP client: one streamed chat completion over SSE, as any OpenAI client gets it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.errors import PacelineError
from paceline.methods import SpeculationMethod

REQUEST_TIMEOUT_S = 600.0
EVENT_PREFIX = "data:"
LAST_EVENT = "[DONE]"
# Of a round, whatever release the service is of.
_ROUND_NAMES = (
    "round", "num_speculative_tokens", "proposed", "accepted", "draft_ms", "wire_ms", "queue_ms",
    "verify_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """What the demo asks, with and without speculation; `method`: None is the service's own."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    method: SpeculationMethod | None = None

    def body(self, model: str, speculation: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": speculation,
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text and where its tokens came from: accepted, recovered, bonus or plain."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the target over what had been proposed by then; by whom: `source`, empty where
    there was nothing."""

    round: int
    num_speculative_tokens: int
    proposed: int
    accepted: int
    draft_ms: float
    wire_ms: float
    queue_ms: float
    verify_ms: float
    source: str = ""


@dataclass(slots=True)
class Answer:
    """What one request brought. `seconds` run from sending it to the last byte.

    `text` is all that the model wrote, `content` what belongs into the conversation: a thinking
    model's reasoning is in the first only.
    """

    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    content: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    first_text_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def num_proposed(self) -> int:
        return sum(r.proposed for r in self.rounds)

    @property
    def num_accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def sources(self) -> dict[str, list[int]]:
        """Of each source of proposals: how many were accepted, and of how many."""
        found: dict[str, list[int]] = {}
        for item in self.rounds:
            if item.source:
                counts = found.setdefault(item.source, [0, 0])
                counts[0] += item.accepted
                counts[1] += item.proposed
        return found

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_proposed if self.num_proposed else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per pass of the target, its own token included."""
        return 1 + self.num_accepted / len(self.rounds) if self.rounds else None


def model_name(http: httpx.Client) -> str:
    name = str(_checked(http.get("/v1/models"))["data"][0]["id"])
    name.encode()  # half a character could not be asked for
    return name


def stream_chat(
    http: httpx.Client,
    body: dict[str, Any],
    show: Callable[[Piece], None],
    answer: Answer | None = None,
) -> Answer:
    """Send `body` and call `show` for each piece of text as it arrives.

    `answer` is filled as it comes: who interrupts this has what came until then.
    """
    answer = Answer() if answer is None else answer
    begun = time.perf_counter()
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            response.read()
            _checked(response)
        for chunk in _events(response.iter_lines()):
            for piece in _take(chunk, answer):
                if answer.first_text_s is None:
                    answer.first_text_s = time.perf_counter() - begun
                answer.text += piece.text
                show(piece)
    answer.seconds = time.perf_counter() - begun
    return answer


def is_refused(http: httpx.Client, body: dict[str, Any]) -> bool:
    """Whether the service has not what the `speculation` of `body` asks for. An answer that it
    begins is not waited for."""
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.BAD_REQUEST:
            return False
        try:
            error = json.loads(response.read())["error"]
            return str(error["param"]).startswith("speculation")
        except (ValueError, LookupError, TypeError):
            return False


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith(EVENT_PREFIX):
            continue  # a blank line or a keep-alive comment
        data = line.removeprefix(EVENT_PREFIX).strip()
        if data == LAST_EVENT:
            return
        yield json.loads(data)
    raise PacelineError(f"the stream ended without {LAST_EVENT}")


def _take(chunk: dict[str, Any], answer: Answer) -> list[Piece]:
    """Fold a chunk into `answer`; returns its text."""
    if "error" in chunk:
        raise PacelineError(chunk["error"]["message"])
    if usage := chunk.get("usage"):
        answer.num_tokens = usage["completion_tokens"]
        answer.num_prompt_tokens = usage.get("prompt_tokens", 0)
    choices = chunk.get("choices", [])
    deltas = [choice["delta"].get("content") for choice in choices]
    answer.content += "".join(text for text in deltas if text)
    for choice in choices:
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    speculation = chunk.get("speculation") or {}
    for item in speculation.get("rounds", []):
        known = {name: item[name] for name in _ROUND_NAMES}
        answer.rounds.append(Round(**known, source=str(item.get("source", ""))))
    if pieces := speculation.get("pieces"):
        return [Piece(item["text"], item["origin"]) for item in pieces]
    return [Piece(text, "plain") for text in deltas if text]


def _checked(response: httpx.Response) -> dict[str, Any]:
    """The JSON body; an OpenAI-shaped error becomes ours."""
    try:
        data: dict[str, Any] = response.json()
    except ValueError as error:
        raise PacelineError(
            f"{response.url} answered {response.status_code} without JSON"
        ) from error
    if response.status_code != httpx.codes.OK:
        detail = data.get("error") or {}
        raise PacelineError(detail.get("message") or f"{response.url}: {response.status_code}")
    return data
