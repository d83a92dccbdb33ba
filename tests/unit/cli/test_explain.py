"""`paceline explain`: what it shows of a fleet, and a sentence for whatever is none."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from paceline.cli.explain_view import show_fleet
from paceline.cli.main import app
from paceline.config import ControllerConfig
from paceline.controller.fleet import Fleet
from paceline.fleet_reports import Ceilings, DraftReport, TargetReport
from paceline.protocol.lookahead import AcceptanceClass, Choice, ClassCounts, Explanation
from paceline.sampling.params import VerificationMode

WHY = Explanation(
    {"rtt_us": 512.25, "draft_step_us": 3000.0, "num_sequences": 4.0},
    (Choice(0, 4, 4.0, 25e3), Choice(2, 12, 9.5, 26e3), Choice(4, 20, 12.0, 31e3)),
    2,
    "4 proposals are predicted to bring 242 % of the tokens of none.",
)


def fleet(**figures: Any) -> dict[str, Any]:
    """What a real controller says of one target and one draft."""
    controller = Fleet(ControllerConfig())
    kind = AcceptanceClass("smol", VerificationMode.COUPLED, 0.75)
    report = TargetReport(
        "t#1", "boot", "host:1", 1, 4, 1,
        **{"num_speculative_tokens": 4.0, "explanation": WHY,
           "class_counts": {kind: ClassCounts((100.0, 60.0), (60.0, 40.0))}, **figures},
    )  # fmt: skip
    controller.hear_target(report, 0.0)
    draft = DraftReport("d#1", "boot", 2, 128, 4, busy_share=0.655, step_ms=3.0, batch=3.9)
    controller.hear_draft(draft, 0.0)
    controller.hear_target(report, 1.0)
    told: dict[str, Any] = json.loads(json.dumps(controller.status()))
    return told


def shown(data: dict[str, Any]) -> str:
    console = Console(width=120, file=io.StringIO())
    show_fleet(console, data)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_decision_its_inputs_and_its_candidates() -> None:
    text = shown(fleet())
    lines = text.splitlines()
    assert "target t#1" in lines[0]
    assert "4 running, 1 waiting; K in force 4; drafts: d#1" in lines[1]
    assert "accepted 62 % of 160 proposals (coupled, temperature 0.75, draft smol)" in lines[2]
    assert any("rtt_us" in line and "512.2" in line for line in lines)
    rows = {line.split("│")[2].strip(): line for line in lines if line.count("│") == 7}
    assert list(rows)[:3] == ["0", "2", "4"]
    cells = [cell.strip() for cell in rows["4"].split("│")]
    assert cells[1:7] == ["=>", "4", "20", "12.00", "31.00", "387.1"]
    assert "=>" not in rows["0"] + rows["2"]
    assert WHY.reason in text
    assert "draft-ahead" not in text
    assert any("d#1" in line and "4 / 128" in line and "66 %" in line for line in lines)


def test_ceilings_and_a_refused_user_config() -> None:
    text = shown(fleet(ceilings=Ceilings(5, None, 3), config_error="user_config: unknown key x"))
    assert "drafts are scarce (busy 66 %): draft-ahead at most 5, K at most 3" in text
    assert "user_config: unknown key x; the values before stay in force" in text


def test_before_the_first_decision() -> None:
    assert "It has not decided anything yet." in shown(fleet(explanation=None))


def test_nobody_there_and_more_than_are_shown() -> None:
    assert "No target has reported" in shown({"targets": []})
    assert "and 7 more targets" in shown({**fleet(), "num_targets": 8})


def test_each_model_by_name_and_one_whose_controller_is_silent() -> None:
    silent = {"targets": [], "drafts": [], "problem": "The controller did not answer within 2 s."}
    text = shown({**silent, "models": {"one": silent, "two": fleet()}})
    lines = [line for line in text.splitlines() if line]
    assert lines[:4] == ["model one", silent["problem"], "model two", "target t#1"]
    assert "No target has reported" not in text


def test_names_do_not_steer_the_terminal() -> None:
    text = shown({"targets": [{"replica_id": "[red]x\x1b[2J", "drafts": ["[b]d"]}]})
    assert "\x1b" not in text
    assert "[red]x" in text


@pytest.mark.parametrize("value", [None, 7, "x", [], [3], {}, {"a": 1}, float("nan")])
def test_whatever_a_service_says_is_shown(value: Any) -> None:
    """One field after the other replaced by something else."""
    whole = fleet()
    for name in whole:
        shown({**whole, name: value})
    target = whole["targets"][0]
    for name in target:
        shown({**whole, "targets": [{**target, name: value}]})
    for name in target["explanation"]:
        odd = {**target["explanation"], name: value}
        shown({**whole, "targets": [{**target, "explanation": odd}]})


# -- over HTTP ----------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """The next answer is the server's; it remembers who asked."""

    def do_GET(self) -> None:
        request = (self.path, self.headers.get("authorization"))
        self.server.seen.append(request)  # type: ignore[attr-defined]
        status, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        http.seen, http.answer = [], (200, b"{}")  # type: ignore[attr-defined]
        thread = Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def run(server: Any, *arguments: str, **env: str) -> Result:
    url = f"http://127.0.0.1:{server.server_port}"
    return CliRunner().invoke(app, ["explain", "--url", url, *arguments], env=env)


def test_it_asks_with_the_key(server: Any) -> None:
    server.answer = (200, json.dumps(fleet()).encode())
    result = run(server, PACELINE_API_KEY="secret")
    assert result.exit_code == 0, result.stderr
    assert "target t#1" in result.stdout
    assert server.seen == [("/fleet", "Bearer secret")]


def test_json_is_the_answer_as_it_is(server: Any) -> None:
    server.answer = (200, json.dumps(fleet()).encode())
    assert json.loads(run(server, "--json").stdout) == fleet()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, '{"error": {"message": "An API key is needed."}}', "An API key is needed."),
        (503, '{"error": {"message": "The controller did not answer."}}', "did not answer."),
        (404, '{"error": {"message": "There is no such path."}}', "has no /fleet"),
        (500, "{}", "answered 500"),
        (200, "<html>", "without JSON"),
        (200, "[]", "does not say what targets there are"),
        (200, "{}", "does not say what targets there are"),
        (500, '{"error": "text"}', "answered 500"),
    ],
)
def test_errors_are_one_line(server: Any, status: int, body: str, said: str) -> None:
    server.answer = (status, body.encode())
    result = run(server)
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[::1"])
def test_no_service_there(url: str) -> None:
    result = CliRunner().invoke(app, ["explain", "--url", url])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: no answer from {url}")
