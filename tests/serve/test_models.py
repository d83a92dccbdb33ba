"""Three toy models in one application, on Ray Serve: each request gets its own model's text, and
drafts serve only the targets of their own model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cli import cluster, servefile
from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

MODELS = ("toy", "org/second", "plain")


def fleet_of(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/fleet", timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    fleet: dict[str, Any] = answer.json()
    return fleet


def are_linked(url: str) -> bool:
    """Whether the target of each model with drafts has a stream from one."""
    pools = [fleet_of(url)["models"][name] for name in MODELS[:2]]
    return all(
        pool["targets"] and any(draft["connected"] for draft in pool["drafts"]) for pool in pools
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    file = servefile.load(Path(__file__).with_name("models.yaml"))
    port = cluster.free_port("127.0.0.1")
    with cluster.local_service(file, "127.0.0.1", port, lambda status: None) as url:
        poll(lambda: are_linked(url))
        yield url


def test_each_model_writes_its_own_text_with_its_own_drafts(url: str) -> None:
    texts = {}
    for name in MODELS:
        service = Service(url, name)
        off = service.complete(speculation={"method": "off"}, temperature=0)
        on = service.complete(temperature=0)
        assert on["model"] == name
        assert on["choices"] == off["choices"]
        assert (on["usage"]["speculation"]["proposed"] > 0) is (name != "plain")
        texts[name] = on["choices"][0]["text"]
    assert texts["toy"] == texts["plain"], "the same weights"
    assert texts["toy"] != texts["org/second"], "others"


def test_drafts_serve_the_targets_of_their_own_model(url: str) -> None:
    fleet = fleet_of(url)
    assert list(fleet["models"]) == list(MODELS)
    seen = []
    for name, pool in fleet["models"].items():
        (target,) = pool["targets"]
        seen.append(target["address"])
        connected = [address for draft in pool["drafts"] for address in draft["connected"]]
        assert connected == ([] if name == "plain" else [target["address"]])
    assert len(set(seen)) == len(MODELS)
    assert fleet["targets"][0]["address"] == seen[0], "on top is the first"


def test_they_are_listed_and_have_limits_of_their_own(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in listed] == [
        ("toy", 512), ("org/second", 128), ("plain", 64),
    ]  # fmt: skip
    assert httpx.get(f"{url}/v1/models/org/second").json() == listed[1]
    long = "x" * 100
    assert Service(url, "org/second").complete(prompt=long, max_tokens=8)["model"] == "org/second"
    body = {"model": "plain", "prompt": long, "max_tokens": 8}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 400


def test_a_model_that_nobody_serves(url: str) -> None:
    body = {"model": "second", "prompt": "x"}
    answer = httpx.post(f"{url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_knobs_reach_only_the_pool_that_they_are_for(url: str) -> None:
    """`user_config` of the file: a ceiling for the second model."""
    shown = fleet_of(url)["models"]
    ceilings = {n: shown[n]["targets"][0]["max_num_speculative_tokens"] for n in MODELS[:2]}
    assert ceilings == {"toy": 16, "org/second": 5}
