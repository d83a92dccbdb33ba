"""What others may do at the ports of a real service: who listens, who is let in, who is cut."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import cluster, processes, servefile
from tests.serve.conftest import WAIT_S, Service, poll
from tests.serve.test_service import is_empty, text_of

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

LISTENING = "0A"  # in /proc/net/tcp
WRITE_TIMEOUT_S = 3.0
# The echoed prompt alone is more than the kernel holds (about a kilobyte a token, 8 times), and
# the rest takes a minute.
GREEDY_BODY: dict[str, Any] = {
    "model": "toy",
    "prompt": "never read" * 300,
    "echo": True,
    "max_tokens": 5000,
    "n": 8,
    "logprobs": 20,
    "ignore_eos": True,
    "stream": True,
}

ASK_RAY = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=20))
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The fleet with a long context and little patience."""
    data = yaml.safe_load(Path(__file__).with_name("fleet.yaml").read_text())
    (application,) = data["applications"]
    arguments = application["args"]
    arguments["gateway"]["write_timeout_s"] = WRITE_TIMEOUT_S
    for role in ("target", "draft"):
        arguments[role]["model"] |= {"max_model_len": 8192, "num_kv_blocks": 8192}
    next(d for d in application["deployments"] if d["name"] == "TargetReplica")["num_replicas"] = 1
    path = tmp_path_factory.mktemp("slow") / "slow.yaml"
    path.write_text(yaml.safe_dump(data))
    port = cluster.free_port("127.0.0.1")
    file = servefile.load(path)
    with cluster.local_service(file, "127.0.0.1", port, lambda status: None) as url:
        running = Service(url)
        running.wait_for_draft()
        yield running


def test_every_port_is_on_loopback(service: Service) -> None:
    sockets = set()
    for process in processes.descendants() | {processes.Process(os.getpid(), 0)}:
        for descriptor in Path(f"/proc/{process.pid}/fd").glob("*"):
            with contextlib.suppress(OSError):  # closed just now
                sockets.add(os.readlink(descriptor))
    listening = [row for row in tcp_sockets() if row[2] in sockets]
    assert int(service.url.rpartition(":")[2]) in {port for _, port, _ in listening}
    assert {address for address, _, _ in listening} == {"127.0.0.1"}


def tcp_sockets() -> list[tuple[str, int, str]]:
    """(address, port, name) of all sockets of this machine that listen."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING:
                address, port = local.split(":")
                # The kernel writes each 32-bit word as a number.
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                raw = struct.pack(f"{len(words)}I", *words)
                ip = ipaddress.ip_address(raw)
                mapped = getattr(ip, "ipv4_mapped", None)
                found.append((str(mapped or ip), int(port, 16), f"socket:[{inode}]"))
    return found


def test_ray_wants_a_token_that_is_in_no_file(service: Service) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    token = os.environ["RAY_AUTH_TOKEN"]
    stored = Path.home() / ".ray" / "auth_token"
    assert not stored.is_file() or stored.read_text().strip() != token

    def ask(**env: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_")}
        command = [sys.executable, "-c", ASK_RAY, address]
        return subprocess.run(command, env=clean | env, capture_output=True, text=True)

    assert ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token).returncode == 0
    for answer in (
        ask(RAY_AUTH_MODE="disabled"),
        ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64),
    ):
        assert answer.returncode != 0
        assert "AuthenticationError" in answer.stderr


def test_a_client_that_stops_reading_is_dropped(service: Service) -> None:
    alone = text_of(service.complete(max_tokens=40, seed=1))
    content = json.dumps(GREEDY_BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(WAIT_S)
        client.connect(("127.0.0.1", int(service.url.rpartition(":")[2])))
        client.sendall(head.encode() + content)
        poll(lambda: service.target_stats()[0]["num_running"] == GREEDY_BODY["n"])
        poll(lambda: service.draft_stats()["num_sessions"])
        # Nobody else notices.
        assert text_of(service.complete(max_tokens=40, seed=1)) == alone
        poll(lambda: is_empty(service))
        got = read_to_end(client)
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"[DONE]" not in got
    assert b'"finish_reason":"length"' not in got  # it was stopped, not done
    assert text_of(service.complete(max_tokens=40, seed=1)) == alone


def read_to_end(client: socket.socket) -> bytes:
    """What the kernel still had for it."""
    parts = []
    try:
        while part := client.recv(1 << 20):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)
