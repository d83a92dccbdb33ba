"""The demo's service, started as the README says; every module here asks the same one, and the last
test of the last module ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from paceline.cli import cluster

CONFIG = Path(__file__).parents[2] / "deploy/serve/smollm2.yaml"
START_S = 900.0  # the first run downloads 93 MB and converts it


@dataclass(frozen=True)
class Server:
    """A running `paceline serve`."""

    url: str
    process: subprocess.Popen[str]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = cluster.free_port("127.0.0.1")
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "paceline.cli.main", "serve", "--port", str(port)]
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, str(CONFIG)], stdout=sink, stderr=subprocess.STDOUT, text=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(url, process, log)
            yield Server(url, process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/ready", timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)  # the pace of asking
    raise AssertionError(log.read_text())
