"""The demo against services that refuse: a key is sent from the environment and never shown."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from paceline.cli import demo
from paceline.cli.demo_stream import is_refused
from paceline.cli.main import app
from paceline.config import Offer
from paceline.config.offered import NO_DRAFTS, NO_HEADS, SWITCHED_OFF
from tests.unit.cli.toy_service import gateway, serving

ROOT = Path(__file__).parents[3]
REFUSAL = "This API key is not known here."


class Refuser(BaseHTTPRequestHandler):
    """Lets nobody in and remembers what they showed."""

    seen: list[str | None]

    def do_GET(self) -> None:
        self.seen.append(self.headers["Authorization"])
        body = json.dumps({"error": {"message": REFUSAL}}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr: the test looks at it."""


@pytest.fixture
def url() -> Iterator[str]:
    Refuser.seen = []
    with HTTPServer(("127.0.0.1", 0), Refuser) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("key", "sent"), [("sk-1", "Bearer sk-1"), (" sk-1\n", "Bearer sk-1"), ("", None)]
)
def test_the_key_is_sent(key: str, sent: str | None, url: str) -> None:
    result = CliRunner().invoke(app, ["demo", "--url", url], env={"PACELINE_API_KEY": key})
    assert (result.exit_code, result.stderr) == (1, f"error: {REFUSAL}\n")
    assert Refuser.seen == [sent]


@pytest.mark.parametrize("key", ["sk-schl\u00fcssel", "sk-1\r\nX-Other: 1"])
def test_what_is_no_key_is_not_sent_and_not_shown(key: str, url: str) -> None:
    result = CliRunner().invoke(app, ["demo", "--url", url], env={"PACELINE_API_KEY": key})
    assert result.exit_code == 1
    assert result.stderr.startswith("error: PACELINE_API_KEY is no API key")
    assert "sk-" not in result.output + result.stderr
    assert Refuser.seen == []


@pytest.mark.parametrize(
    ("offer", "is_waited_for"), [(Offer("ngram", has_drafts=False), False), (Offer(), True)]
)
def test_a_draft_is_waited_for_where_there_may_be_one(
    offer: Offer, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here for no time at all: then it has not joined."""
    monkeypatch.setattr(demo, "DRAFT_WAIT_S", 0.0)
    with serving(gateway(None, offer=offer)) as url:
        result = CliRunner().invoke(app, ["demo", "--url", url, "--max-tokens", "8"])
    assert result.exit_code == 0, result.output
    assert ("no draft has joined" in result.stderr) is is_waited_for


@pytest.mark.parametrize(
    ("offer", "method", "reason"),
    [
        (Offer("ngram", has_drafts=False), "model", NO_DRAFTS),
        (Offer("ngram", has_drafts=False), "hybrid", NO_DRAFTS),
        (Offer(), "medusa", NO_HEADS),
        (Offer("off", has_drafts=False), "auto", SWITCHED_OFF),
    ],
)
def test_what_the_service_does_not_offer_is_one_sentence(
    offer: Offer, method: str, reason: str
) -> None:
    with serving(gateway(None, offer=offer)) as url:
        for arguments in (["demo"], ["chat", "hello"]):
            result = CliRunner().invoke(app, [*arguments, "--url", url, "--method", method])
            assert (result.exit_code, result.stdout) == (1, "")
            said = f"error: 'speculation.method' cannot be '{method}': {reason}.\n"
            assert result.stderr == said


def test_what_the_file_does_not_offer_is_said_before_it_is_started() -> None:
    file = ROOT / "deploy/serve/ngram.yaml"
    result = CliRunner().invoke(app, ["demo", "--config", str(file), "--method", "medusa"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: --method cannot be medusa with {file}: {NO_HEADS}\n"


@pytest.mark.parametrize(
    ("status", "answer", "refused"),
    [
        (400, '{"error": {"param": "speculation.method"}}', True),
        (400, '{"error": {"param": "messages"}}', False),
        (400, '{"error": null}', False),
        (400, "no JSON", False),
        (401, '{"error": {"param": "speculation.method"}}', False),
        (200, "data: [DONE]", False),
    ],
)
def test_what_counts_as_a_refusal(status: int, answer: str, refused: bool) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=answer))
    with httpx.Client(base_url="http://test", transport=transport) as http:
        assert is_refused(http, {}) is refused


def test_help_does_not_show_the_key() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"PACELINE_API_KEY": "sk-1"})
    assert "PACELINE_API_KEY" in result.output
    assert "sk-1" not in result.output
