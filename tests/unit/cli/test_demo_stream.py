"""The demo's client against httpx's own fake transport: exact bodies in, exact answers out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from paceline.cli.demo_stream import Answer, DemoRequest, Piece, Round, model_name, stream_chat
from paceline.errors import PacelineError

REQUEST = DemoRequest("hello", max_tokens=8, temperature=0.5, seed=3)
ROUND = {
    "round": 1,
    "num_speculative_tokens": 4,
    "proposed": 4,
    "accepted": 3,
    "draft_ms": 1.0,
    "wire_ms": 0.2,
    "queue_ms": 0.1,
    "verify_ms": 9.0,
    "a_field_of_a_later_release": 1,
}


def chunk(text: str, **extra: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], **extra}


def sse(*events: object) -> str:
    return "".join(
        f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events
    )


def client(body: str, status: int = 200, seen: list[Any] | None = None) -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append((request.url.path, json.loads(request.content or b"null")))
        return httpx.Response(status, text=body)

    return httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer))


def ask(body: str, status: int = 200) -> tuple[Answer, list[Piece]]:
    pieces: list[Piece] = []
    with client(body, status) as http:
        answer = stream_chat(http, REQUEST.body("m", {}), pieces.append)
    return answer, pieces


def test_the_request_is_a_plain_chat_completion() -> None:
    seen: list[Any] = []
    with client(sse("[DONE]"), seen=seen) as http:
        stream_chat(http, REQUEST.body("m", {"method": "off"}), lambda piece: None)
    assert seen == [
        (
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 8,
                "temperature": 0.5,
                "seed": 3,
                "stream": True,
                "stream_options": {"include_usage": True},
                "speculation": {"method": "off"},
            },
        )
    ]


def test_pieces_rounds_and_usage_are_collected() -> None:
    spoken = [{"text": "Hi", "origin": "accepted"}, {"text": "!", "origin": "bonus"}]
    answer, pieces = ask(
        ": keep-alive\n\n"
        + sse(
            chunk(""),
            chunk("Hi!", speculation={"rounds": [ROUND], "pieces": spoken}),
            {"choices": [], "usage": {"completion_tokens": 4}},
            "[DONE]",
        )
    )
    assert pieces == [Piece("Hi", "accepted"), Piece("!", "bonus")]
    assert (answer.text, answer.num_tokens) == ("Hi!", 4)
    assert answer.rounds == [Round(1, 4, 4, 3, 1.0, 0.2, 0.1, 9.0)]


def test_text_without_pieces_is_plain() -> None:
    _, pieces = ask(sse(chunk("a"), chunk("b"), "[DONE]"))
    assert pieces == [Piece("a", "plain"), Piece("b", "plain")]


def test_rates_follow_the_definitions() -> None:
    rounds = [
        Round(1, 4, 4, 3, 0, 0, 0, 0),
        Round(2, 4, 2, 0, 0, 0, 0, 0),
        Round(3, 4, 0, 0, 0, 0, 0, 0),
    ]
    answer = Answer(num_tokens=6, seconds=2.0, rounds=rounds)
    assert answer.tokens_per_s == 3.0
    assert answer.acceptance_rate == 0.5
    assert answer.mean_acceptance_length == 2.0
    nothing = Answer()
    assert (nothing.tokens_per_s, nothing.acceptance_rate) == (0.0, None)
    assert nothing.mean_acceptance_length is None


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ('{"error": {"message": "too long"}}', 400, "^too long$"),
        ("{}", 503, "chat/completions: 503"),
        ("<html>", 502, "answered 502 without JSON"),
        (sse(chunk("a"), {"error": {"message": "target lost"}}), 200, "^target lost$"),
        (sse(chunk("a")), 200, "the stream ended without"),
    ],
)
def test_failures_become_one_sentence(body: str, status: int, message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        ask(body, status)


def test_model_name_is_the_first_served() -> None:
    with client('{"data": [{"id": "m"}]}') as http:
        assert model_name(http) == "m"
