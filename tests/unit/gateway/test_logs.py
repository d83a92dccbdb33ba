"""What a gateway logs: no prompt, no text, no key, and never much of what a client chose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.generation import RoundDelta
from tests.log_lines import Lines, recorded

RoundOf = Callable[..., RoundDelta]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def lines() -> Iterator[Lines]:
    with recorded() as recording:
        yield recording


async def test_nothing_of_a_client_is_logged(
    make_harness: Any, round_of: RoundOf, lines: Lines
) -> None:
    """Requests of every kind, good and bad, at the lowest level."""
    harness = make_harness(max_retries=1, request_timeout_s=0.2)
    marker = "ZQXMARKER"
    token_ids = ", ".join(str(byte) for byte in marker.encode())
    prompt_only = {"model": "toy", "prompt": marker, "max_tokens": 20}
    lost = RequestError(f"lost {marker}", None, "target_lost", 503, 1)
    for script in (
        [round_of(marker, "length")],
        [round_of(marker), lost],
        [lost],
        [round_of(marker), ValueError(marker)],
        [round_of(marker, "length"), ValueError(marker)],
        [round_of(marker, "length"), round_of(marker)],
        [round_of(marker), asyncio.Event()],
        [],
    ):
        harness.targets.script = script
        for stream in (False, True):
            for fields in ({}, {"stop": marker[3:]}, {"echo": True, "user": marker}):
                await harness.post(TEXT, prompt_only | {"stream": stream} | fields)
    harness.targets.script = [round_of(marker, "length")]
    messages = [{"role": "user", "content": marker}]
    for body in (
        {"model": "toy", "messages": messages},
        {"model": marker, "messages": messages},
        {"model": "toy", "messages": messages, marker: marker},
        {"model": "toy", "messages": [{"role": marker, "content": marker}]},
        {"model": "toy", "messages": messages, "logit_bias": {marker: 1}},
        f'{{"model":"toy","{marker}":"{marker}'.encode(),
        f'{{"{marker}":1,"{marker}":2}}'.encode(),
    ):
        await harness.post(CHAT, body, headers={"x-request-id": f"{marker} {marker}"})
    for path in (f"/{marker}", f"/v1/models/{marker}", f"/v1/models?key={marker}"):
        await harness.get(path)
    assert await harness.is_idle()
    assert len(lines.raw) > 100
    assert any("exception" in line for line in lines.parsed("error"))
    assert marker not in lines.everything
    assert token_ids not in lines.everything


async def test_log_lines_are_short(harness: Any, lines: Lines) -> None:
    for request_id in ("a" * 128, "a" * 129, "a" * 9000):
        async with harness.client() as client:
            await client.get(f"/{'b' * 9000}", headers={"x-request-id": request_id})
    assert [line["message"] for line in lines.parsed()] == ["GET other"] * 3
    assert max(map(len, lines.raw + lines.text)) < 500
