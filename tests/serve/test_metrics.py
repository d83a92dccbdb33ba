"""What a live service says in /metrics and in Ray's own metrics endpoint."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.metrics.catalog import METRICS
from paceline.metrics.metric import PREFIX
from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]

RAY = "ray_"
SPEC = "paceline_spec_decode_num"
# What does not move any more when the last answer is given and reported.
SETTLED = (
    "paceline_generation_tokens_total",
    "paceline_target_generation_tokens_total",
    f"{SPEC}_draft_tokens_total",
    f"{SPEC}_accepted_tokens_total",
    "paceline_target_pass_rows_count",
)
Totals = dict[str, float]


def totals(text: str, prefix: str = "") -> Totals:
    """Sums over all series, of those that are ours."""
    sums: Totals = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(prefix + PREFIX):
                sums[sample.name.removeprefix(prefix)] += sample.value
    return sums


def scrape(service: Service) -> Totals:
    return totals(httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text)


def ray_endpoint() -> str:
    import ray

    (node,) = ray.nodes()
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"


def known_run(service: Service) -> dict[str, float]:
    """The sums of the answers' own counts."""
    usages: list[dict[str, Any]] = [
        service.complete(seed=seed, max_tokens=40, temperature=0.7 * (seed % 2))["usage"]
        for seed in range(6)
    ]
    told = [usage["speculation"] for usage in usages]
    return {
        "paceline_generation_tokens_total": sum(u["completion_tokens"] for u in usages),
        "paceline_target_generation_tokens_total": sum(u["completion_tokens"] for u in usages),
        "paceline_rounds_total": sum(each["rounds"] for each in told),
        f"{SPEC}_draft_tokens_total": sum(each["proposed"] for each in told),
        f"{SPEC}_accepted_tokens_total": sum(each["accepted"] for each in told),
    }


def test_the_page_counts_what_clients_saw(service: Service) -> None:
    poll(lambda: scrape(service).get("paceline_fleet_targets") == 2)
    before = scrape(service)
    expected = known_run(service)
    assert expected[f"{SPEC}_accepted_tokens_total"] > 0

    def gained() -> bool:
        now = scrape(service)  # replicas report every quarter of a second
        return {name: now[name] - before[name] for name in expected} == expected

    poll(gained)
    now = scrape(service)
    declared = {name for metric in METRICS for name in metric.sample_names}
    assert set(now) <= declared, "undeclared"
    # Nothing was refused in this service, and nobody has left it.
    assert declared - set(now) <= {"paceline_refused_total"}
    accepted = now[f"{SPEC}_accepted_tokens_total"]
    assert accepted == now[f"{SPEC}_accepted_tokens_per_pos_total"]
    assert accepted <= now[f"{SPEC}_draft_tokens_total"]


def test_rays_endpoint_has_the_same(service: Service) -> None:
    """Its agents are asked every few seconds, so it is a little behind."""
    known_run(service)

    def caught_up() -> bool:
        page = scrape(service)  # replicas report every quarter of a second: not at once either
        theirs = totals(httpx.get(ray_endpoint(), timeout=WAIT_S).text, RAY)
        names = set(theirs) | {name.rpartition("_")[0] for name in theirs}
        counted = {metric.name for metric in METRICS if page.get(metric.sample_names[-1])}
        # The questions of this test go on, and those who answer them count them.
        counted -= {"paceline_http_requests_total", "paceline_controller_up"}
        return counted <= names and all(theirs[name] == page[name] for name in SETTLED)

    poll(caught_up)
    theirs = totals(httpx.get(ray_endpoint(), timeout=WAIT_S).text, RAY)
    assert theirs["paceline_target_pass_rows_count"] == theirs["paceline_target_passes_total"]
