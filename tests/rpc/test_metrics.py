"""GET /metrics of a running service: it shows the catalog, all of it and nothing else, and its
counts are those of the clients."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from paceline.metrics.catalog import METRICS, OF_ROLE
from paceline.metrics.metric import PREFIX, Kind, Role
from tests.rpc import observed
from tests.rpc.fleet import until
from tests.rpc.observed import Service

SPEC = "paceline_spec_decode_num"
REPLICAS = {"target-0", "target-1", "draft-0", "draft-1"}


@dataclass
class Page:
    """One scrape, parsed."""

    families: dict[str, Family] = field(default_factory=dict)

    @staticmethod
    def of(text: str) -> Page:
        return Page({f.name: f for f in text_string_to_metric_families(text)})

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series with these labels."""
        return sum(self.by(name, "", **labels).values())

    def by(self, name: str, label: str, **labels: str) -> Mapping[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for family in self.families.values():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    sums[sample.labels.get(label, "")] += sample.value
        assert sums, f"no series {name} {labels}"
        return sums


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with asyncio.timeout(60), observed.serving() as running:
        running.beat(100.0)
        yield running


async def known_run(service: Service) -> list[dict[str, Any]]:
    """Answers of every kind; their `usage` is what clients saw."""
    bodies: list[dict[str, Any]] = [
        {"max_tokens": 24 + 5 * number, "temperature": 0.8 * (number % 2), "seed": number}
        for number in range(6)
    ]
    bodies += [
        {"n": 2, "max_tokens": 20, "seed": 9, "temperature": 0.9},
        {"max_tokens": 16, "speculation": {"method": "off"}},
        {"max_tokens": 40, "speculation": {"max_tokens": 3}},
    ]
    answers = await asyncio.gather(*(service.complete(**body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    refused = await service.complete(max_tokens=100_000)
    assert refused.status_code == 400
    await until(lambda: all(target.rtt_us for target in service.targets))
    return [answer.json()["usage"] for answer in answers]


async def scrape(service: Service) -> Page:
    service.beat(102.0)
    return Page.of(await service.scrape())


async def test_the_page_shows_the_catalog_and_nothing_else(service: Service) -> None:
    await known_run(service)
    page = await scrape(service)
    ours = {name: f for name, f in page.families.items() if name.startswith(PREFIX)}
    declared = {m.name.removesuffix("_total"): m for m in METRICS}
    assert set(ours) - set(declared) == set(), "undeclared"
    assert set(declared) - set(ours) == set(), "dead"
    for name, family in ours.items():
        metric = declared[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help_text)
        assert metric.unit in family.documentation or metric.unit in name
        allowed = [set(of_role[metric.name].all_labels)
                   for of_role in OF_ROLE.values() if metric.name in of_role]  # fmt: skip
        for sample in family.samples:
            assert sample.name in metric.sample_names
            assert sample.labels.keys() - {"le"} in allowed
            if metric.values is not None:
                assert sample.labels[metric.labels[-1]] in metric.values


async def test_every_replica_shows_all_that_its_role_counts(service: Service) -> None:
    await known_run(service)
    page = await scrape(service)
    found = defaultdict(set)
    for family in page.families.values():
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                found[sample.labels.get("replica", "")].add(family.name)
    assert found.keys() == {*REPLICAS, "gateway-1", ""}
    for replica in REPLICAS:
        names = {name.removesuffix("_total") for name in OF_ROLE[Role(replica.split("-")[0])]}
        assert names <= found[replica]


async def test_counts_are_those_that_clients_saw(service: Service) -> None:
    usages = await known_run(service)
    page = await scrape(service)
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert page.total("paceline_generation_tokens_total") == generated
    assert page.total("vllm:generation_tokens_total") == generated
    assert page.total("paceline_target_generation_tokens_total") == generated
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert page.total("paceline_prompt_tokens_total") == prompts
    told = [usage["speculation"] for usage in usages]
    proposed = sum(each["proposed"] for each in told)
    accepted = sum(each["accepted"] for each in told)
    assert 0 < accepted < proposed
    assert page.total("paceline_rounds_total") == sum(each["rounds"] for each in told)
    for name in (f"{SPEC}_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"):
        assert page.total(name) == proposed
    for name in (f"{SPEC}_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"):
        assert page.total(name) == accepted
    drafts = page.total(f"{SPEC}_drafts_total")
    assert drafts == page.total("vllm:spec_decode_num_drafts_total")
    plain = page.total("paceline_plain_rounds_total")
    assert drafts + plain == page.total("paceline_rounds_total")
    num_choices = 10
    assert page.total("paceline_sequences_ended_total", reason="finished") == num_choices
    for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
        assert page.total(f"paceline_{name}_seconds_count") == num_choices
    assert page.total("paceline_refused_total", code="context_length_exceeded") == 1
    assert page.total("paceline_gateway_limits_hit_total", limit="model.max_model_len") == 1


async def test_sums_agree_with_each_other(service: Service) -> None:
    await known_run(service)
    page = await scrape(service)
    assert page.total(f"{SPEC}_accepted_tokens_total") > 0
    for target in ("target-0", "target-1"):
        accepted = page.total(f"{SPEC}_accepted_tokens_total", replica=target)
        per_pos = page.by(f"{SPEC}_accepted_tokens_per_pos_total", "position", replica=target)
        counts = [per_pos[position] for position in sorted(per_pos, key=int)]
        assert sum(counts) == accepted <= page.total(f"{SPEC}_draft_tokens_total", replica=target)
        assert counts == sorted(counts, reverse=True)
        for what in ("drafts", "draft_tokens", "accepted_tokens"):
            by_source = page.by(f"{SPEC}_{what}_per_source_total", "source", replica=target)
            assert by_source["model"] == page.total(f"{SPEC}_{what}_total", replica=target)
            assert set(by_source) == {"model", "ngram", "suffix", "medusa"}
            assert sum(by_source.values()) == by_source["model"]
        rounds = page.total("paceline_rounds_total", replica=target)
        chosen = "paceline_round_num_speculative_tokens"
        assert page.total(f"{chosen}_count", replica=target) == rounds
        passes = page.total("paceline_target_passes_total", replica=target)
        assert page.total("paceline_target_pass_rows_count", replica=target) == passes
        assert page.total("paceline_target_pass_seconds_count", replica=target) == passes
        busy = page.total("paceline_target_busy_seconds_total", replica=target)
        took = page.total("paceline_target_pass_seconds_sum", replica=target)
        assert took == pytest.approx(busy)
        assert rounds <= page.total("paceline_target_pass_rows_sum", replica=target)
    assert page.total("paceline_rejected_rounds_total") <= page.total(f"{SPEC}_drafts_total")
    assert page.total("paceline_draft_rewinds_total") > 0
    assert page.total("paceline_draft_dropped_tokens_total") > 0
    drafted = page.total("paceline_draft_tokens_total")
    used = page.total(f"{SPEC}_draft_tokens_total") + page.total(
        "paceline_wasted_draft_tokens_total"
    )
    assert page.total(f"{SPEC}_draft_tokens_total") < used <= drafted + 32
    opened = page.total("paceline_draft_session_events_total", event="opened")
    reopened = page.total("paceline_reopens_total")
    assert page.total("paceline_draft_opens_total", status="ok") == opened + reopened == 9


async def test_gauges_are_of_now(service: Service) -> None:
    wait = asyncio.ensure_future(service.complete(max_tokens=400))
    await until(lambda: any(target.scheduler.num_running for target in service.targets))
    page = await scrape(service)
    assert page.total("paceline_num_requests_running") == 1
    assert page.total("paceline_gateway_choices_running") == 1
    assert page.total("paceline_gateway_requests_in_progress") == 1
    await wait
    page = await scrape(service)
    for name in ("num_requests_running", "gateway_choices_running", "num_requests_waiting"):
        assert page.total(f"paceline_{name}") == 0
    assert page.by("paceline_fleet_targets", "state") == {"live": 2, "draining": 0}
    assert page.total("paceline_draft_links") == 4
    assert page.total("paceline_draft_assignment") == 4
    assert page.by("paceline_draft_breaker_state", "state") == {
        "closed": 4, "dark": 0, "probing": 0
    }  # fmt: skip
    rtt = page.by("paceline_draft_link_rtt_seconds", "draft", replica="target-0")
    assert rtt.keys() == {"draft-0", "draft-1"}
    assert all(0 < value < 1 for value in rtt.values())


async def test_who_is_forgotten_disappears(service: Service) -> None:
    await known_run(service)
    await scrape(service)
    service.fleet.leave("target-1", 103.0)
    text = await service.scrape()
    assert 'replica="target-0"' in text
    assert 'replica="target-1"' not in text
    assert 'target="target-1"' not in text
    assert Page.of(text).total("paceline_fleet_targets_lost_total") == 0, "it said goodbye"
    service.fleet.expire(1000.0)
    page = Page.of(await service.scrape())
    assert page.total("paceline_fleet_targets_lost_total") == 1
    assert page.total("paceline_fleet_drafts_lost_total") == 2
    assert page.total("paceline_fleet_targets") == 0


async def test_without_a_controller_the_gateways_own_are_left(service: Service) -> None:
    usages = await known_run(service)
    assert (await scrape(service)).total("paceline_controller_up") == 1
    service.is_controller_up = False
    page = Page.of(await service.scrape())
    assert page.by("paceline_controller_up", "model_name") == {"toy": 0}
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert page.total("paceline_generation_tokens_total") == generated
    assert "paceline_rounds" not in page.families


async def test_histograms_are_cumulative_and_whole(service: Service) -> None:
    await known_run(service)
    page = await scrape(service)
    for metric in METRICS:
        if metric.kind is not Kind.HISTOGRAM:
            continue
        of_series: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
        for sample in page.families[metric.name].samples:
            if sample.name.endswith("_bucket"):
                key = tuple(sample.labels[label] for label in metric.all_labels)
                of_series[key].append((float(sample.labels["le"]), sample.value))
        for buckets in of_series.values():
            bounds, counts = zip(*buckets, strict=True)
            assert bounds == (*metric.buckets, float("inf"))
            assert list(counts) == sorted(counts)
        whole = sum(buckets[-1][1] for buckets in of_series.values())
        assert whole == page.total(f"{metric.name}_count")
