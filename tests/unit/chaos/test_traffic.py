"""Requests come from the seed; answers are read as a client would read them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from chaos.traffic import TRANSPORT, Outcome, Request, draw_requests, send, without_drafts


def test_the_seed_decides_every_request() -> None:
    first = draw_requests(5, 60)
    assert first == draw_requests(5, 60)
    assert first != draw_requests(6, 60)


def test_every_kind_is_drawn() -> None:
    bodies = [request.body for request in draw_requests(1, 60)]
    assert {body["temperature"] == 0 for body in bodies} == {True, False}
    for field in ("n", "stop", "logprobs", "presence_penalty", "messages", "stream"):
        assert any(field in body for body in bodies), field
    assert any(request.leaves_after for request in draw_requests(1, 60))


def test_a_reference_stays_to_the_end_and_uses_no_draft() -> None:
    request = Request(3, "/v1/completions", {"stream": True, "seed": 4}, leaves_after=2)
    plain = without_drafts(request)
    assert plain.leaves_after is None
    assert plain.body["speculation"] == {"method": "off"}
    assert plain.body["seed"] == 4


STREAM = Request(0, "/v1/completions", {"stream": True})


def chunk(text: str, accepted: int = 0) -> str:
    body = {
        "choices": [{"index": 0, "text": text, "logprobs": None}],
        "speculation": {"rounds": [{"accepted": accepted}]},
    }
    return f"data: {json.dumps(body)}\n\n"


async def answer(text: str, request: Request = STREAM, **response: Any) -> Outcome:
    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(**{"status_code": 200, "text": text, **response})

    transport = httpx.MockTransport(handle)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        return await send(http, request)


async def test_a_whole_stream() -> None:
    outcome = await answer(chunk("ab", 1) + chunk("c") + "data: [DONE]\n\n")
    assert outcome.texts == ["abc"]
    assert outcome.is_done
    assert (outcome.num_tokens, outcome.num_accepted, len(outcome.gaps)) == (3, 1, 1)


async def test_a_stream_without_done_is_a_lost_connection() -> None:
    outcome = await answer(chunk("ab"))
    assert (outcome.error, outcome.has_failed, outcome.is_clean) == (TRANSPORT, True, False)


async def test_an_error_event_is_a_clean_failure() -> None:
    error = json.dumps({"error": {"code": "target_lost", "type": "server_error"}})
    outcome = await answer(chunk("ab") + f"data: {error}\n\n")
    assert (outcome.error, outcome.is_clean, outcome.texts) == ("target_lost", True, ["ab"])


async def test_a_refusal() -> None:
    body = {"error": {"code": "queue_full", "type": "overloaded_error"}}
    outcome = await answer(json.dumps(body), status_code=429, headers={"retry-after": "1"})
    assert (outcome.status, outcome.error, outcome.retry_after) == (429, "queue_full", "1")


async def test_leaving() -> None:
    request = Request(0, "/v1/completions", {"stream": True}, leaves_after=1)
    outcome = await answer(chunk("ab") + chunk("c") + "data: [DONE]\n\n", request)
    assert outcome.has_left
    assert outcome.texts == ["ab"]


@pytest.mark.parametrize("text", ["", "<html>"])
async def test_a_whole_answer_that_is_none(text: str) -> None:
    outcome = await answer(text, Request(0, "/v1/completions", {}))
    assert outcome.error == TRANSPORT
