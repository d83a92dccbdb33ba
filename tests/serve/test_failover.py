"""Targets are killed, stopped and restarted under a client that notices nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from paceline.cli import cluster, servefile
from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

NUM_CPUS = 0.1
BODY: dict[str, Any] = {
    "model": "toy",
    "prompt": "a long story",
    "max_tokens": 300,
    "ignore_eos": True,
}
# Fields that the openai package does not know.
OWN_FIELDS = ("ignore_eos", "speculation")


def fleet_file(folder: Path, num_cpus: float) -> servefile.ServeFile:
    """The fleet with slower targets, and a gateway that hears of a silent one within 3 seconds."""
    data = yaml.safe_load(Path(__file__).with_name("fleet.yaml").read_text())
    (application,) = data["applications"]
    application["args"]["gateway"].update(target_silence_s=3.0, max_retries=2)
    application["args"]["target"]["alive_interval_s"] = 0.3
    application["args"]["target"]["model"]["toy_step_ms"] = 12.0
    target = next(d for d in application["deployments"] if d["name"] == "TargetReplica")
    target |= {"health_check_period_s": 1, "graceful_shutdown_timeout_s": 1}
    target["graceful_shutdown_wait_loop_s"] = 0.2
    target["ray_actor_options"] = {"num_cpus": num_cpus}
    path = folder / "failover.yaml"
    path.write_text(yaml.safe_dump(data))
    return servefile.load(path)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    file = fleet_file(tmp_path_factory.mktemp("fleet"), NUM_CPUS)
    port = cluster.free_port("127.0.0.1")
    with cluster.local_service(file, "127.0.0.1", port, lambda status: None) as url:
        running = Service(url)
        running.wait_for_draft()
        yield running


@pytest.fixture(autouse=True)
def two_targets(service: Service) -> None:
    """Whatever the test before has killed is back."""
    poll(lambda: num_ready_targets(service) == 2)
    service.wait_for_draft()


def answering(service: Service) -> list[dict[str, Any]]:
    """What the targets say; empty while one that has just ended is still among them."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        return service.target_stats()
    except (RayError, RayServeException):
        return []


def num_ready_targets(service: Service) -> int:
    return len(answering(service))


def busy_target(service: Service) -> int:
    """The pid of the one target that runs a request."""
    (busy,) = poll(lambda: [s["pid"] for s in answering(service) if s["num_running"]])
    assert isinstance(busy, int)
    return busy


def rounds_by_pid(service: Service) -> dict[int, int]:
    stats = poll(lambda: answering(service))
    return {target["pid"]: target["scheduler"]["num_rounds"] for target in stats}


def is_empty(service: Service) -> bool:
    """Both targets and the draft are there and hold nothing."""
    keys = ("num_running", "num_waiting", "num_reserved_blocks", "num_engine_blocks_used")
    targets = answering(service)
    draft = service.draft_stats()
    sizes = [target[key] for target in targets for key in keys]
    sizes += [draft["num_sessions"], draft["num_engine_blocks_used"]]
    return len(targets) == 2 and not any(sizes)


class Reader:
    """The openai package's stream, chunk by chunk: no retry of its own."""

    def __init__(self, service: Service, **fields: Any) -> None:
        client = openai.OpenAI(
            base_url=f"{service.url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S
        )
        body = BODY | fields
        own = {name: body.pop(name) for name in OWN_FIELDS if name in body}
        usage: Any = {"include_usage": True}
        self._chunks = iter(
            client.completions.create(**body, stream=True, stream_options=usage, extra_body=own)
        )
        self.texts = [""] * fields.get("n", 1)
        self.ends = 0
        self.num_tokens = 0

    def read(self, num_chunks: int | None = None) -> None:
        """So many chunks, or all that are left."""
        while num_chunks is None or num_chunks > 0:
            chunk = next(self._chunks, None)
            if chunk is None:
                assert num_chunks is None, "the stream has ended"
                return
            for choice in chunk.choices:
                self.texts[choice.index] += choice.text
                self.ends += choice.finish_reason is not None
            if chunk.usage:
                self.num_tokens = chunk.usage.completion_tokens
            if num_chunks is not None:
                num_chunks -= 1


def whole_texts(service: Service, **fields: Any) -> list[str]:
    choices = service.complete(**BODY, **fields)["choices"]
    return [choice["text"] for choice in choices]


def check_whole(reader: Reader, undisturbed: list[str]) -> None:
    assert reader.texts == undisturbed
    assert reader.ends == len(undisturbed)
    assert reader.num_tokens == BODY["max_tokens"] * len(undisturbed)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


SAMPLINGS = [
    {"temperature": 0.0, "seed": 1},
    {"temperature": 0.8, "seed": 2},
    {"temperature": 0.8, "seed": 3, "n": 2},
    {"temperature": 0.0, "seed": 4, "n": 2, "speculation": {"method": "off"}},
]


@pytest.mark.parametrize("fields", SAMPLINGS)
def test_kill_9_of_the_target_mid_stream(service: Service, fields: dict[str, Any]) -> None:
    undisturbed = whole_texts(service, **fields)
    reader = Reader(service, **fields)
    reader.read(3)
    before = rounds_by_pid(service)
    killed = busy_target(service)
    os.kill(killed, signal.SIGKILL)
    reader.read()
    check_whole(reader, undisturbed)
    (survivor,) = before.keys() - {killed}
    assert rounds_by_pid(service)[survivor] > before[survivor]
    poll(lambda: is_empty(service))


@pytest.mark.parametrize("fields", SAMPLINGS[1:3])
def test_a_target_that_stops_mid_stream(service: Service, fields: dict[str, Any]) -> None:
    undisturbed = whole_texts(service, **fields)
    reader = Reader(service, **fields)
    reader.read(3)
    before = rounds_by_pid(service)
    hung = busy_target(service)
    with stopped(hung):
        reader.read()
    # The stopped one goes on and finds that nobody wants its request any more.
    check_whole(reader, undisturbed)
    poll(lambda: is_empty(service))
    after = rounds_by_pid(service)
    assert after.keys() == before.keys()
    (survivor,) = before.keys() - {hung}
    assert after[survivor] > before[survivor]
    assert whole_texts(service, **fields) == undisturbed


def events_of(service: Service, body: dict[str, Any], events: list[str]) -> Iterator[str]:
    """The `data:` payloads of a stream, also kept in `events`."""
    with httpx.stream(
        "POST", f"{service.url}/v1/completions", json={**body, "stream": True}, timeout=WAIT_S
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                yield line[6:]


def test_all_targets_stop(service: Service) -> None:
    """A clean error when there is nobody to go on; answers again as soon as there is."""
    fields = {"temperature": 0.8, "seed": 5}
    undisturbed = whole_texts(service, **fields)
    events: list[str] = []
    stream = events_of(service, {**BODY, **fields}, events)
    for _ in range(3):
        next(stream)
    with stopped(*rounds_by_pid(service)), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{service.url}/v1/completions", json=BODY, timeout=WAIT_S)
        for _ in stream:
            pass
        whole = asked.result()
    assert "[DONE]" not in events
    assert '"code":"target_lost"' in events[-1].replace(" ", "")
    assert (whole.status_code, whole.headers["retry-after"]) == (503, "1")
    assert whole.json()["error"]["code"] == "target_lost"
    poll(lambda: is_empty(service))
    assert whole_texts(service, **fields) == undisturbed


def test_kill_9_of_all_targets(service: Service) -> None:
    """Either new ones are there in time, or the error is clean."""
    fields = {"temperature": 0.8, "seed": 6}
    undisturbed = whole_texts(service, **fields)
    reader = Reader(service, **fields)
    reader.read(3)
    for pid in rounds_by_pid(service):
        os.kill(pid, signal.SIGKILL)
    code: str | None = None
    try:
        reader.read()
    except openai.APIError as error:
        code = error.code
    if code is None:
        check_whole(reader, undisturbed)
    else:
        assert code in ("target_lost", "target_died")
        assert undisturbed[0].startswith(reader.texts[0])
        assert reader.ends == 0
    poll(lambda: num_ready_targets(service) == 2)
    assert whole_texts(service, **fields) == undisturbed


def is_replaced(service: Service, old: set[int]) -> bool:
    pids = {target["pid"] for target in answering(service)}
    return len(pids) == 2 and not pids & old


def test_rolling_restart_of_targets_under_load(service: Service, tmp_path: Path) -> None:
    """Serve replaces one replica after the other, and gives their requests a second to end."""
    from ray.serve.context import _get_global_client

    seeds = range(4)
    with ThreadPoolExecutor(len(seeds)) as pool:
        texts = pool.map(lambda seed: whole_texts(service, temperature=0.8, seed=seed), seeds)
        undisturbed = list(texts)
    old = set(rounds_by_pid(service))
    is_over = threading.Event()

    def ask(seed: int) -> int:
        num_answers = 0
        while not is_over.is_set():
            reader = Reader(service, temperature=0.8, seed=seed)
            reader.read()
            check_whole(reader, undisturbed[seed])
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(len(seeds)) as pool:
        answers = [pool.submit(ask, seed) for seed in seeds]
        try:
            schema = fleet_file(tmp_path, NUM_CPUS / 2).schema
            schema.http_options.host, _, port = service.url.removeprefix("http://").partition(":")
            schema.http_options.port = int(port)
            _get_global_client().deploy_apps(schema)
            poll(lambda: is_replaced(service, old), 2 * WAIT_S)
        finally:
            is_over.set()
        assert all(answer.result() > 0 for answer in answers)
    poll(lambda: is_empty(service))
