"""Four toy models in one application, on Ray Serve: each request gets its own model's text, drafts
serve only the targets of their own model, and no method of any request changes a text.

Everything is told over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.cli import cluster, servefile
from paceline.methods import METHODS
from tests.method_sources import SOURCES
from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

MODELS = ("toy", "org/second", "plain", "alone")
DRAFTED = MODELS[:2]

PROMPT = "the cat sat on the mat, the cat sat on the hat, the cat sat on the mat, "
GREEDY = {"temperature": 0.0}
SEEDED = [{"temperature": t, "seed": s} for t in (0.7, 1.0) for s in (3, 11)]
METRIC = "paceline_spec_decode_num_draft_tokens_per_source_total"


def fleet_of(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/fleet", timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    fleet: dict[str, Any] = answer.json()
    return fleet


def are_linked(url: str) -> bool:
    """Whether the target of each model with drafts has a stream from one."""
    pools = [fleet_of(url)["models"][name] for name in DRAFTED]
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
    assert texts["toy"] == texts["plain"] == texts["alone"], "the same weights"
    assert texts["toy"] != texts["org/second"], "others"


def test_drafts_serve_the_targets_of_their_own_model(url: str) -> None:
    fleet = fleet_of(url)
    assert list(fleet["models"]) == list(MODELS)
    seen = []
    for name, pool in fleet["models"].items():
        (target,) = pool["targets"]
        seen.append(target["address"])
        connected = [address for draft in pool["drafts"] for address in draft["connected"]]
        assert connected == ([target["address"]] if name in DRAFTED else [])
    assert len(set(seen)) == len(MODELS)
    assert fleet["targets"][0]["address"] == seen[0], "on top is the first"


def test_they_are_listed_and_have_limits_of_their_own(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in listed] == [
        ("toy", 512), ("org/second", 128), ("plain", 64), ("alone", 512),
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
    ceilings = {n: shown[n]["targets"][0]["max_num_speculative_tokens"] for n in DRAFTED}
    assert ceilings == {"toy": 16, "org/second": 5}


# -- methods ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(url: str) -> Service:
    return Service(url)


def asked(service: Service, method: str, **fields: Any) -> dict[str, Any]:
    speculation = {"method": method, "include_rounds": True}
    body = {"prompt": PROMPT, "max_tokens": 40, "speculation": speculation, **fields}
    return service.complete(**body)


def sources_of(answer: dict[str, Any]) -> set[str]:
    rounds = answer["speculation"]["rounds"]
    assert all(bool(r["source"]) == (r["proposed"] > 0) for r in rounds)
    return {r["source"] for r in rounds if r["source"]}


@pytest.mark.parametrize("sampling", [GREEDY, *SEEDED], ids=str)
def test_the_text_does_not_depend_on_the_method(service: Service, sampling: dict[str, Any]) -> None:
    off = asked(service, "off", **sampling)["choices"]
    assert {m: asked(service, m, **sampling)["choices"] for m in METHODS} == dict.fromkeys(
        METHODS, off
    )


@pytest.mark.parametrize("method", METHODS)
def test_proposals_come_from_where_the_method_says(service: Service, method: str) -> None:
    found = sources_of(asked(service, method, **GREEDY))
    assert found <= SOURCES[method]
    assert bool(found) is (method != "off")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED[0]], ids=str)
def test_requests_of_all_methods_share_passes(service: Service, sampling: dict[str, Any]) -> None:
    with ThreadPoolExecutor(3 * len(METHODS)) as threads:
        answers = list(threads.map(lambda m: asked(service, m, **sampling), METHODS * 3))
    texts = {answer["choices"][0]["text"] for answer in answers}
    assert texts == {asked(service, "off", **sampling)["choices"][0]["text"]}


def test_a_model_without_drafts_proposes_by_itself(service: Service) -> None:
    alone = Service(service.url, "alone")
    answer = alone.complete(prompt=PROMPT, speculation={"include_rounds": True}, **GREEDY)
    assert sources_of(answer) == {"ngram"}
    off = asked(alone, "off", max_tokens=32, **GREEDY)
    assert answer["choices"] == off["choices"]
    fleet = httpx.get(f"{service.url}/fleet", timeout=WAIT_S).json()
    assert fleet["models"]["alone"]["drafts"] == []


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("model", "this model has no draft replicas"),
        ("hybrid", "this model has no draft replicas"),
        ("medusa", "this model has no Medusa heads"),
    ],
)
def test_what_a_model_does_not_have_is_refused(service: Service, method: str, reason: str) -> None:
    body = {"model": "alone", "prompt": "x", "speculation": {"method": method}}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == f"'speculation.method' cannot be '{method}': {reason}."
    assert error["param"] == "speculation.method"


def test_every_source_is_counted(service: Service) -> None:
    for method in ("model", "ngram", "suffix", "medusa"):
        asked(service, method, **GREEDY)

    def counted() -> set[str]:
        page = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        return {
            sample.labels["source"]
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == METRIC and sample.labels["model_name"] == "toy" and sample.value > 0
        }

    assert poll(lambda: counted() >= {"model", "ngram", "suffix", "medusa"})
