"""The share of `python -m tests.fuzz.http` that every run affords, and that it can fail."""

from __future__ import annotations

import json
import random

import pytest

from paceline.gateway import openai
from tests.fuzz.bodies import HttpCase
from tests.fuzz.http import Answer, Tally, check_answer, fuzz


def test_hostile_requests_get_clean_answers() -> None:
    tally = fuzz(random.SystemRandom().randrange(1 << 32), 1500)
    assert tally.num_bodies == 1500
    assert tally.num_streams > 10
    assert tally.num_tokenizations > 10
    assert {200, 400, 404, 405, 413, 415} <= tally.statuses.keys()
    assert {"invalid_json", "invalid_value", "unknown_parameter"} <= tally.codes.keys()


def test_requests_are_their_seed() -> None:
    assert fuzz(3, 200) == fuzz(3, 200)


def test_a_parser_that_fails_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if a part of parsing raised what it does not raise now: a 500."""
    monkeypatch.setattr(openai, "clip", lambda text, max_chars: text[max_chars].strip())
    with pytest.raises(AssertionError, match="status 500"):
        fuzz(1, 500)
    assert "replay: python -m tests.fuzz.http --seed 1 --batch 0" in capsys.readouterr().out


GOOD = {"message": "No.", "type": "invalid_request_error", "param": None, "code": "x"}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        pytest.param(500, GOOD, id="status"),
        pytest.param(422, GOOD, id="the framework's own status"),
        pytest.param(400, {**GOOD, "detail": 1}, id="another field"),
        pytest.param(400, {**GOOD, "message": "x" * 201}, id="an echo"),
        pytest.param(400, {**GOOD, "message": 'File "a.py", line 1'}, id="a traceback"),
        pytest.param(400, {**GOOD, "message": "[type=int_type]"}, id="pydantic's wording"),
        pytest.param(400, {**GOOD, "message": "a\nb"}, id="a forged line"),
        pytest.param(429, GOOD, id="no Retry-After"),
    ],
)
def test_answers_that_are_not_clean_are_found(status: int, error: dict[str, object]) -> None:
    headers = {b"content-type": b"application/json"}
    answer = Answer(status, headers, json.dumps({"error": error}).encode())
    with pytest.raises(AssertionError):
        check_answer(HttpCase(), answer, Tally())
