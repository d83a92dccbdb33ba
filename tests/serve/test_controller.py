"""A real Controller: what GET /fleet and `paceline explain` say of it, and knobs that change while
requests run. Deploys by config, as `serve deploy` does."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cli import servefile
from paceline.cli.explain import fetch_fleet
from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

BODY: dict[str, Any] = {
    "model": "toy",
    "prompt": "a long story",
    "max_tokens": 450,
    "temperature": 0.8,
    "seed": 11,
}


def deploy(user_config: Any) -> None:
    """The same file again, with another `user_config` of the targets. Returns at once."""
    from ray.serve.context import _get_global_client

    file = servefile.load(Path(__file__).with_name("fleet.yaml"))
    (application,) = file.schema.applications
    for deployment in application.deployments:
        if deployment.name == "TargetReplica" and user_config is not None:
            deployment.user_config = user_config
    _get_global_client().deploy_apps(file.schema)


def pids(service: Service) -> list[int]:
    fleet = service.fleet()
    return sorted(replica["pid"] for kind in ("targets", "drafts") for replica in fleet[kind])


def wait_for(service: Service, name: str, value: object) -> None:
    """Until every target reports it."""
    poll(lambda: [t[name] for t in service.fleet()["targets"]] == [value, value])


class Traffic:
    """Requests one after the other on two threads, until it is stopped: one is always running."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.answers: list[dict[str, Any]] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def _run(self) -> None:
        while not self._is_over.is_set():
            body = {**BODY, "speculation": {"include_rounds": True}}
            self.answers.append(self._service.complete(**body))

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        poll(lambda: len(self.answers) > 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def ks_of(answer: dict[str, Any]) -> list[int]:
    """K of its rounds in order, equal neighbors once."""
    ks = [each["num_speculative_tokens"] for each in answer["speculation"]["rounds"]]
    return [k for k, _ in itertools.groupby(ks)]


def test_the_gateway_says_what_the_controller_knows(service: Service) -> None:
    fleet = poll(lambda: full(fetch_fleet(service.url, "")))
    (draft,) = fleet["drafts"]
    addresses = sorted(target["address"] for target in fleet["targets"])
    assert fleet["assignment"] == {draft["replica_id"]: addresses}
    assert draft["targets"] == draft["connected"] == addresses
    for target in fleet["targets"]:
        assert target["drafts"] == [draft["replica_id"]]
        assert target["config_error"] == ""


def full(fleet: dict[str, Any]) -> dict[str, Any] | None:
    is_full = (fleet["num_targets"], fleet["num_drafts"]) == (2, 1)
    return fleet if is_full and all(target["drafts"] for target in fleet["targets"]) else None


def test_knobs_change_while_requests_run(service: Service) -> None:
    off = service.complete(**BODY, speculation={"method": "off"})
    before = pids(service)
    deploy({"lookahead": "fixed", "num_speculative_tokens": 2})
    wait_for(service, "num_speculative_tokens", 2)
    with Traffic(service) as traffic:
        deploy({"lookahead": "fixed", "num_speculative_tokens": 5})
        wait_for(service, "num_speculative_tokens", 5)
    assert pids(service) == before, "no replica was started anew"
    texts = {answer["choices"][0]["text"] for answer in traffic.answers}
    assert texts == {off["choices"][0]["text"]}
    ks = [ks_of(answer) for answer in traffic.answers]
    assert all(each in ([2], [5], [2, 5]) for each in ks), ks
    assert [2, 5] in ks, "a request that was in progress"
    last = service.complete(**BODY, speculation={"include_rounds": True})
    assert ks_of(last) == [5]


def test_a_knob_that_does_not_exist_changes_nothing(service: Service) -> None:
    deploy({"lookahead": "fixed", "num_speculative_tokens": 3, "max_draft_ahead": 20})
    wait_for(service, "max_draft_ahead", 20)
    before = pids(service)
    deploy({"lookahead": "fixed", "num_speculative_tokens": 4, "k": 4})
    wait_for(service, "config_error", "user_config of TargetReplica: unknown key k")
    assert {t["num_speculative_tokens"] for t in service.fleet()["targets"]} == {3}
    assert pids(service) == before
    assert httpx.get(f"{service.url}/ready", timeout=WAIT_S).status_code == 200
    # Taken out of the file again: what `args` say.
    deploy(None)
    wait_for(service, "config_error", "")
    wait_for(service, "max_draft_ahead", 16)
    assert pids(service) == before
