"""Replicas' log files on Ray Serve, as JSON: every line parses, and a request's can be joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

TRACE = "0af7651916cd43dd8448eb211c80319c"
MARKER = "ZQXMARKER"
ALWAYS = {"ts", "level", "logger", "message", "request_id", "trace_id", "replica"}
Line = dict[str, Any]


def replica_files() -> dict[str, str]:
    from ray._private.worker import _global_node

    folder = Path(_global_node.get_logs_dir_path()) / "serve"
    return {path.name: path.read_text() for path in folder.glob("replica_*.log")}


def lines_of(kind: str) -> list[Line]:
    found = [text for name, text in replica_files().items() if f"_{kind}_" in name]
    return [line for text in found for x in text.splitlines() if "ts" in (line := json.loads(x))]


def of_requests(kind: str) -> list[Line]:
    return [line for line in lines_of(kind) if line["logger"].endswith(".request_log")]


def test_a_request_is_joined_over_gateway_and_target(service: Service) -> None:
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"}
    body = {"model": "toy", "prompt": MARKER, "max_tokens": 24}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    usage = answer.json()["usage"]

    def joined() -> tuple[Line, Line] | None:
        kinds = ("Gateway", "TargetReplica")
        found = [[x for x in of_requests(kind) if x["trace_id"] == TRACE] for kind in kinds]
        return (found[0][0], found[1][0]) if all(len(lines) == 1 for lines in found) else None

    gateway, target = poll(joined)
    for line in (gateway, target):
        assert set(line) >= ALWAYS
        assert (line["level"], line["outcome"], line["request_id"]) == ("info", "ok", "mine")
        assert line["completion_id"] == answer.json()["id"]
    assert gateway["replica"] != target["replica"]
    assert (gateway["deployment"], target["deployment"]) == ("Gateway", "TargetReplica")
    assert target["replica"] in {one["replica_id"] for one in service.target_stats()}
    assert gateway["completion_tokens"] == target["output_tokens"] == usage["completion_tokens"]
    assert gateway["rounds"] == target["rounds"] == usage["speculation"]["rounds"]


def test_one_line_per_request_however_it_ends(service: Service) -> None:
    def post(name: str, fields: Line, is_read: bool = True) -> None:
        body = {"model": "toy", "prompt": MARKER, "max_tokens": 24} | fields
        url, sent = f"{service.url}/v1/completions", {"x-request-id": name}
        with httpx.stream("POST", url, json=body, headers=sent, timeout=WAIT_S) as response:
            if is_read:
                response.read()
            else:
                next(response.iter_lines())

    post("stream", {"stream": True})
    post("whole", {"n": 2})
    post("unknown", {"model": MARKER})
    post("too long", {"prompt": MARKER * 100})
    post("toolong", {"prompt": MARKER * 100})
    slow = {"stream": True, "max_tokens": 400, "speculation": {"method": "off"}}
    post("left", slow, is_read=False)
    httpx.get(f"{service.url}/health")

    def all_there() -> dict[str, str] | None:
        lines = [line for line in of_requests("Gateway") if line["request_id"] != "mine"]
        return {x["request_id"]: x["outcome"] for x in lines} if len(lines) >= 6 else None

    found = poll(all_there)
    assert len(of_requests("Gateway")) == 7
    made_up = found.keys() - {"stream", "whole", "unknown", "toolong", "left"}
    assert len(made_up) == 1, "an id with a blank in it is not taken"
    assert {found[name] for name in ("stream", "whole")} == {"ok"}
    assert (found["unknown"], found["toolong"]) == ("model_not_found", "context_length_exceeded")
    assert found["left"] in ("client_left", "cancelled")
    (left,) = poll(lambda: [x for x in of_requests("TargetReplica") if x["request_id"] == "left"])
    assert left["outcome"] in ("cancelled", "aborted")


def test_every_line_of_every_replica(service: Service) -> None:
    files = replica_files()
    kinds = {name.split("_")[2] for name in files}
    assert kinds >= {"Gateway", "TargetReplica", "DraftReplica"}
    for name, text in files.items():
        before, *lines = map(json.loads, text.splitlines())
        assert before["message"] == "Started initializing replica."  # Serve's, in its own JSON
        assert [line for line in lines if not set(line) >= ALWAYS] == []
        assert len(lines) > 0
        assert [line for line in lines if line["message"].startswith("CALL ")] == []
        assert MARKER not in text, name
    loggers = {line["logger"] for kind in kinds for line in lines_of(kind)}
    assert {"paceline.draft.driver", "paceline.target.driver"} <= loggers
