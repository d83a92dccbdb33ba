"""Drafts and targets come and go with the load, by themselves, and no client notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from paceline.cli import cluster, servefile
from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

YAML = Path(__file__).parents[2] / "deploy" / "serve" / "autoscale.yaml"
NUM_CLIENTS = 12
# Those that go on when the load falls: one with a draft, and two that want none.
NUM_AFTERWARDS = 3
WITHOUT_DRAFT = (1, 2)
NUM_TOKENS = 150
DELAYS = {"upscale_delay_s": 1, "downscale_delay_s": 3, "downscale_to_zero_delay_s": 3}


def quick_file(folder: Path) -> servefile.ServeFile:
    """The file for trying, with no draft at first and shorter delays; a target that is to go gets a
    second to end its answers, which is not enough: others go on with them."""
    data = yaml.safe_load(YAML.read_text())
    (application,) = data["applications"]
    application["args"]["controller"] = {"heartbeat_interval_s": 0.25, "heartbeat_timeout_s": 2.0}
    application["args"]["draft"]["drain_timeout_s"] = 2
    application["args"]["target"]["alive_interval_s"] = 0.3
    scaled = {d["name"]: d for d in application["deployments"] if "autoscaling_config" in d}
    for deployment in scaled.values():
        deployment["graceful_shutdown_wait_loop_s"] = 0.2
        deployment["autoscaling_config"].update(DELAYS, look_back_period_s=1.5)
        deployment["autoscaling_config"]["metrics_interval_s"] = 0.25
    scaled["DraftReplica"]["autoscaling_config"]["initial_replicas"] = 0
    scaled["TargetReplica"]["graceful_shutdown_timeout_s"] = 1
    scaled["TargetReplica"]["autoscaling_config"]["target_ongoing_requests"] = 6
    path = folder / "autoscale.yaml"
    path.write_text(yaml.safe_dump(data))
    return servefile.load(path)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    file = quick_file(tmp_path_factory.mktemp("autoscale"))
    port = cluster.free_port("127.0.0.1")
    with cluster.local_service(file, "127.0.0.1", port, lambda status: None) as url:
        yield Service(url)


def num_running(deployment: str) -> int:
    """Replicas as Serve counts them; one that drains is none of them any more."""
    from ray import serve

    states = serve.status().applications["paceline"].deployments[deployment].replica_states
    return int(states.get("RUNNING", 0))


def num_drafts() -> int:
    return num_running("DraftReplica")


def num_at_work(service: Service) -> int:
    """Drafts that serve sequences."""
    return sum(draft["num_sessions"] > 0 for draft in service.fleet()["drafts"])


def text_of(service: Service, seed: int, method: str) -> str:
    answer = service.complete(
        prompt=f"story {seed}",
        seed=seed,
        temperature=0.8 if seed % 2 else 0.0,
        ignore_eos=True,
        max_tokens=NUM_TOKENS,
        speculation={"method": method},
    )
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    text: str = answer["choices"][0]["text"]
    return text


class Clients:
    """Each asks for the same text again and again and compares it with the target's own."""

    def __init__(self, service: Service, alone: dict[int, str]) -> None:
        self._service, self._alone = service, alone
        self._ends = {seed: threading.Event() for seed in alone}
        self._pool = ThreadPoolExecutor(len(alone))
        self._answers: dict[int, Future[int]] = {}

    def start(self) -> None:
        self._answers = {seed: self._pool.submit(self._ask, seed) for seed in self._alone}

    def _ask(self, seed: int) -> int:
        num_answers = 0
        method = "off" if seed in WITHOUT_DRAFT else "model"
        while not self._ends[seed].is_set():
            assert text_of(self._service, seed, method) == self._alone[seed]
            num_answers += 1
        return num_answers

    def stop(self, seeds: list[int]) -> None:
        """Raises what one of them has run into."""
        for seed in seeds:
            self._ends[seed].set()
        for seed in seeds:
            assert self._answers.pop(seed).result(timeout=WAIT_S) > 0

    def check(self) -> None:
        for answer in self._answers.values():
            assert not answer.done(), answer.result()

    def close(self) -> None:
        for end in self._ends.values():
            end.set()
        self._pool.shutdown()


@contextmanager
def clients(service: Service, alone: dict[int, str]) -> Iterator[Clients]:
    group = Clients(service, alone)
    try:
        group.start()
        yield group
    finally:
        group.close()


def test_load_rises_and_falls(service: Service) -> None:
    """No draft before one is wanted; more drafts and a second target under load; one of each when
    little is left, and no draft when nothing is. Every text is the target's own all the time."""
    seeds = list(range(NUM_CLIENTS))
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        texts = pool.map(lambda seed: text_of(service, seed, "off"), seeds)
        alone = dict(zip(seeds, texts, strict=True))
    assert len(set(alone.values())) == NUM_CLIENTS
    assert num_drafts() == 0
    with clients(service, alone) as asking:
        poll(lambda: num_at_work(service) == 1)
        poll(lambda: num_drafts() >= 2 and num_running("TargetReplica") == 2)
        poll(lambda: num_at_work(service) >= 2)
        asking.check()
        asking.stop(seeds[NUM_AFTERWARDS:])
        poll(lambda: num_running("TargetReplica") == 1)
        poll(lambda: len(service.fleet()["drafts"]) == num_drafts() == 1)
        asking.check()
        asking.stop(seeds[:NUM_AFTERWARDS])
    poll(lambda: len(service.fleet()["drafts"]) == num_drafts() == 0)
