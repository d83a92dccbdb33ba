"""Orders to the proxy process: one JSON line there, one back. Blocking; loopback only."""

from __future__ import annotations

import json
import socket
from typing import Any

TIMEOUT_S = 10.0


def order(control: str, **command: Any) -> dict[str, Any]:
    """The proxy's answer. Raises OSError when there is no proxy."""
    host, _, port = control.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(json.dumps(command).encode() + b"\n")
        with connection.makefile("r", encoding="utf-8") as answers:
            answer: dict[str, Any] = json.loads(answers.readline())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def map_upstream(control: str, upstream: str) -> str:
    """The proxy's address for `upstream`; the same one whenever it is asked again."""
    return str(order(control, do="map", upstream=upstream)["address"])
