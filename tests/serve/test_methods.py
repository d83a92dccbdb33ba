"""One running service, asked for another method with every request: the same text each time.

Everything is told over HTTP. Two models: `toy` has drafts and heads, `alone` has neither.
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
from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

# What may make proposals under each method; all but `off` make some here.
SOURCES = {
    "model": {"model"},
    "ngram": {"ngram"},
    "suffix": {"suffix"},
    "medusa": {"medusa"},
    "hybrid": {"model", "suffix"},
    "auto": {"model", "suffix", "ngram", "medusa"},
    "off": set(),
}
PROMPT = "the cat sat on the mat, the cat sat on the hat, the cat sat on the mat, "
GREEDY = {"temperature": 0.0}
SEEDED = [{"temperature": t, "seed": s} for t in (0.7, 1.0) for s in (3, 11)]
METRIC = "paceline_spec_decode_num_draft_tokens_per_source_total"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    file = servefile.load(Path(__file__).with_name("methods.yaml"))
    port = cluster.free_port("127.0.0.1")
    with cluster.local_service(file, "127.0.0.1", port, lambda status: None) as url:
        running = Service(url)
        running.wait_for_draft()
        yield running


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
