"""`paceline bench live` from the command line: files, exit codes, one sentence for each error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from paceline.bench import plots as plots_module
from paceline.cli.bench_live import speculation_field
from paceline.cli.main import app
from paceline.errors import ConfigError

ANSWER = (
    b'data: {"choices": [{"delta": {"content": "Hello"}}], "speculation": {"rounds": [{"accepted":'
    b' 1, "proposed": 2, "num_speculative_tokens": 2}]}}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 1, "speculation":'
    b' {"rounds": 1, "proposed": 2, "accepted": 1}}}\n\ndata: [DONE]\n\n'
)
MODELS = b'{"data": [{"id": "fake"}]}'


class FakeService(BaseHTTPRequestHandler):
    """Answers every POST alike; an asyncio loop of its own would meet the command's."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    status = 200

    def do_GET(self) -> None:
        self._answer(200, MODELS)

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer(type(self).status, ANSWER if type(self).status == 200 else b"{}")

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Not into the tests' output."""


@pytest.fixture
def url() -> Iterator[str]:
    FakeService.bodies.clear()
    FakeService.status = 200
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeService) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('Why?\n{"messages": [{"role": "user", "content": "How?"}]}\n')
    return str(file)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "live", *arguments], env={"COLUMNS": "120"})


def test_the_command_of_the_later_checks(url: str, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "new" / "out.json"
    arguments = ("--concurrency", "2", "--max-tokens", "5", "--json", str(file))
    result = run("--url", url, "--prompts", prompts, *arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert written["summary"]["num_ok"] == 2
    assert written["config"]["concurrency"] == 2
    assert {body["max_tokens"] for body in FakeService.bodies} == {5}
    assert "acceptance rate" in result.stdout
    assert "time to first token" in result.stdout


def test_options_reach_the_request(url: str, prompts: str) -> None:
    options = ("--k", "3", "--lookahead", "fixed", "--num-requests", "1", "--temperature", "0.7")
    assert run("--url", url, "--prompts", prompts, *options).exit_code == 0
    (body,) = FakeService.bodies
    assert body["temperature"] == 0.7
    assert body["speculation"] == {
        "max_tokens": 3,
        "lookahead": "fixed",
        "include_rounds": True,
    }


def test_pictures_and_the_page(url: str, prompts: str, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    files = ("--plots", str(tmp_path / "plots"), "--html", str(html))
    result = run("--url", url, "--prompts", prompts, "--compare", "off", "--blocks", "1", *files)
    assert result.exit_code == 0, result.output
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "timeline.png",
        "latency.png",
    }
    assert html.read_text().count("data:image/png;base64,") == 2
    assert "2 of 2 texts are equal" in result.stdout


def test_pictures_without_matplotlib_fail_before_the_load(
    url: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ConfigError("pictures need matplotlib")

    monkeypatch.setattr(plots_module, "check", missing)
    result = run("--url", url, "--prompts", prompts, "--plots", str(tmp_path))
    assert (result.exit_code, FakeService.bodies) == (1, [])


def test_a_service_that_is_not_there_is_one_sentence(prompts: str) -> None:
    result = run("--url", "http://127.0.0.1:1", "--prompts", prompts)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no answer from http://127.0.0.1:1")
    assert result.stderr.count("\n") == 1


def test_when_nothing_succeeds_the_errors_are_shown(url: str, prompts: str) -> None:
    FakeService.status = 503
    result = run("--url", url, "--prompts", prompts)
    assert result.exit_code == 1
    assert "http_503" in result.stdout
    assert "0 / 2" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rate", "2", "--concurrency", "2"), "exclude each other"),
        (("--speculation", "{"), "is no JSON"),
        (("--speculation", "[]"), "must be a JSON object"),
        (("--num-requests", "-1"), "--num-requests"),
        (("--json", "/proc/none/out.json"), "cannot write"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    url: str, prompts: str, options: tuple[str, ...], words: str
) -> None:
    result = run("--url", url, "--prompts", prompts, *options)
    assert (result.exit_code, FakeService.bodies) == (1, [])
    assert result.stderr.startswith("error: ")
    assert words in result.stderr


@pytest.mark.parametrize("url", ["nonsense", "http://[", "ftp://x"])
def test_a_url_that_is_none_is_one_sentence(url: str, prompts: str) -> None:
    result = run("--url", url, "--prompts", prompts)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_options_win_over_the_json() -> None:
    text = '{"max_tokens": 9, "mode": "greedy"}'
    assert speculation_field(text, "off", 2, None) == {
        **{"max_tokens": 2, "mode": "greedy", "method": "off"},
    }
    assert speculation_field("", None, None, None) == {}
