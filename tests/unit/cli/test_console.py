"""What a terminal gets of somebody else's words: none of them steers it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from paceline.cli import console
from paceline.cli.console import MAX_TOLD_CHARS, print_error, status_display, told
from paceline.cli.main import app
from paceline.engine.rejection_texts import gather_rejections
from paceline.errors import ConfigError
from tests.unit.engine.rejection_lines import line, write_lines

HOSTILE = "a[red]\x1b[2J\ud800\u202e\rb"
HARMLESS = "a[red]\ufffd[2J\ufffd\ufffd b"


def test_somebody_elses_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(HOSTILE)
    print_error("first\nerror: second")
    assert capsys.readouterr().err == f"error: {HARMLESS}\nerror: first error: second\n"
    assert told("x" * MAX_TOLD_CHARS) == "x" * MAX_TOLD_CHARS
    assert told("x" * (MAX_TOLD_CHARS + 1)) == "x" * (MAX_TOLD_CHARS - 3) + "..."


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_status_with_such_words(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(stderr=True, force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr(console, "err", terminal)
    with status_display() as status:
        status(HOSTILE)
    said = capsys.readouterr().err
    assert HARMLESS in said
    assert "\x1b[2J" not in said


def test_a_model_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line(range(20), 5, 3, model=name) for name in ("tiny", HOSTILE)]
    with pytest.raises(ConfigError) as caught:
        gather_rejections([write_lines(tmp_path / "log", rows)], 9, 9)
    print_error(str(caught.value))
    said = f"error: the rejections are of several models ({HARMLESS}, tiny): name one's files\n"
    assert capsys.readouterr().err == said


class Service(ThreadingHTTPServer):
    """Refuses every request in words of its own."""

    models: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self._answer(200, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["speculation"].get("method", "off") != "off":
            self._answer(400, {"error": {"message": HOSTILE}})
            return
        chunk = {"choices": [{"text": "x", "delta": {"content": "x"}}]}
        self._send(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def _answer(self, status: int, data: Any) -> None:
        self._send(status, json.dumps(data).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "120"})


def bench(service: Service, *arguments: str) -> Result:
    few = ("--sets", "repeat", "--limit", "1", "--rounds", "1")
    return run("bench", "methods", "--url", service.url, *few, *arguments)


def test_a_service_that_says_such_words(service: Service) -> None:
    name = HOSTILE.replace("\ud800", "\0")
    service.models = {"data": [{"id": name, "refused_speculation_methods": {"ngram": HOSTILE}}]}
    measured = bench(service)
    assert measured.exit_code == 0, measured.output
    assert f"{HARMLESS}, medians of 1 rounds" in measured.stdout
    assert f"ngram was refused: {HARMLESS}" in measured.stderr
    assert f"suffix was refused: 400: {HARMLESS}" in measured.stderr
    refused = bench(service, "--methods", "ngram")
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"error: {HARMLESS} has no ngram: {HARMLESS}; it offers ")
    shown = run("demo", "--url", service.url, "--method", "suffix")
    assert (shown.exit_code, shown.stderr) == (1, f"error: {HARMLESS}\n")
    for result in (measured, refused, shown):
        assert "\x1b" not in result.output


@pytest.mark.parametrize(
    "models", [{}, [], None, {"data": [{}]}, {"data": [7]}, {"data": [{"id": "\ud800"}]}]
)
def test_a_service_that_names_no_model(service: Service, models: Any) -> None:
    service.models = models
    assert bench(service).stderr.endswith("names no model; use --model\n")
    shown = run("demo", "--url", service.url)
    assert shown.stderr == f"error: {service.url} names no model: is it the service?\n"
    named = bench(service, "--model", "q")
    assert named.exit_code == 0, named.output
    assert "q, medians of 1 rounds" in named.stdout
