"""One toy service for the whole folder: Ray, Serve, two targets and a draft on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cli import cluster, servefile

WAIT_S = 60.0
# These share one service, so they are the last, and in this order: log files first, while nobody
# has broken anything; who changes the configuration last.
SHARING = ("test_logs", "test_metrics", "test_service", "test_controller")


@dataclass(frozen=True)
class Service:
    """A running application and what its replicas say about themselves."""

    url: str
    model: str = "toy"

    def fleet(self) -> dict[str, list[dict[str, Any]]]:
        return self._ask("Controller", "status")

    def draft_stats(self) -> dict[str, Any]:
        return self._ask("DraftReplica", "stats", True)

    def target_stats(self) -> list[dict[str, Any]]:
        from ray import serve

        handle = serve.get_deployment_handle("TargetReplica", "paceline")
        return list(handle.broadcast("stats", True).results(timeout_s=WAIT_S))

    def _ask(self, deployment: str, method: str, *args: Any) -> Any:
        from ray import serve

        handle = serve.get_deployment_handle(deployment, "paceline")
        return getattr(handle, method).remote(*args).result(timeout_s=WAIT_S)

    def complete(self, **body: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": "hello there", "max_tokens": 32, **body}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_S)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def wait_for_draft(self) -> dict[str, Any]:
        """The draft's report once it has a stream to every target that Serve runs."""
        from ray import serve

        def connected() -> dict[str, Any] | None:
            running = serve.status().applications["paceline"].deployments["TargetReplica"]
            wanted = running.replica_states.get("RUNNING", 0)
            drafts = self.fleet()["drafts"]
            return next((d for d in drafts if len(d["connected"]) == wanted > 0), None)

        return poll(connected)


def poll(probe: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """The first true value of `probe`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = probe()
        if value:
            return value
        time.sleep(0.05)  # the pace of asking, not a wait for something to have happened
    raise AssertionError(f"not within {timeout_s} s")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other modules have a service of their own, which must have ended before the next begins."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        is_sharing = item.path.parent == here and item.path.stem in SHARING
        return SHARING.index(item.path.stem) if is_sharing else -1

    items.sort(key=place)


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    file = servefile.load(Path(__file__).with_name("fleet.yaml"))
    port = cluster.free_port("127.0.0.1")
    with cluster.local_service(file, "127.0.0.1", port, lambda status: None) as url:
        running = Service(url)
        running.wait_for_draft()
        yield running
