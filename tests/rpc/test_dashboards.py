"""No dead panels: every name, label and value that a dashboard or rule asks for is in the page of a
running service."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.dashboards.alerts import ALERTS, RECORDED
from paceline.dashboards.files import DASHBOARDS
from paceline.dashboards.names import Selector, mentioned
from paceline.metrics.catalog import METRICS
from tests.rpc import observed
from tests.rpc.fleet import until

Series = dict[str, list[dict[str, str]]]
VARIABLE = re.compile(r"\$\w+")


async def live_series() -> Series:
    """Labels of every series, by name; recorded ones have those that their rule leaves."""
    async with asyncio.timeout(60), observed.serving() as service:
        service.beat(100.0)
        answers = await asyncio.gather(*(service.complete(seed=seed) for seed in range(6)))
        assert {answer.status_code for answer in answers} == {200}
        assert (await service.complete(max_tokens=100_000)).status_code == 400
        await until(lambda: all(target.rtt_us for target in service.targets))
        service.beat(102.0)
        text = await service.scrape()
    series: Series = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series[sample.name].append(dict(sample.labels))
    for name in RECORDED:
        series[name].append({"model_name": "toy"})
    return series


def fits(labels: dict[str, str], selector: Selector) -> bool:
    for label, (operator, wanted) in selector.matchers.items():
        if label not in labels:
            return False
        # Any value of a variable's: its drop-down offers those that there are.
        pattern = ".*" if VARIABLE.fullmatch(wanted) else wanted
        value = labels[label]
        is_same = bool(re.fullmatch(pattern, value)) if "~" in operator else value == wanted
        if is_same == operator.startswith("!"):
            return False
    return True


def queries() -> dict[str, str]:
    """By where it is."""
    found = {
        f"{board.title}: {row.title}: {panel.title} #{number}": line.query
        for board in DASHBOARDS.values()
        for row in board.rows
        for panel in row.panels
        for number, line in enumerate(panel.lines)
    }
    assert sum(len(p.lines) for b in DASHBOARDS.values() for p in b.panels) == len(found)
    found |= {f"alert {alert.name}": alert.query for alert in ALERTS}
    return found | {f"record {name}": query for name, query in RECORDED.items()}


def problems(query: str, series: Series) -> list[str]:
    found = mentioned(query.replace("$__rate_interval", "1m"))
    bad = []
    known: set[str] = set()
    for selector in found.selectors:
        of_name = [labels for labels in series.get(selector.name, ()) if fits(labels, selector)]
        if not of_name:
            bad.append(f"nothing is {selector}")
        known |= {label for labels in of_name for label in labels}
    return bad + [f"nothing has the label {label}" for label in found.grouped_by - known]


async def test_every_query_finds_something() -> None:
    series = await live_series()
    dead = {where: bad for where, query in queries().items() if (bad := problems(query, series))}
    assert dead == {}
    drop_downs = {v.query for board in DASHBOARDS.values() for v in board.variables}
    for query in drop_downs:
        inner = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert inner
        (selector,) = mentioned(inner[1]).selectors
        assert any(inner[2] in labels for labels in series[selector.name]), query


def test_every_metric_is_in_a_panel_or_an_alert() -> None:
    asked = {s.name for query in queries().values() for s in mentioned(query).selectors}
    unseen = {metric.name for metric in METRICS if not asked & set(metric.sample_names)}
    # What is derived from others, or says how large something is.
    assert unseen == {
        "paceline_spec_decode_num_drafts_total",
        "paceline_sequences_ended_total",
        "paceline_kv_cache_blocks",
        "paceline_fleet_heartbeats_total",
        "paceline_audit_tokens_total",
        "paceline_audit_ties_total",
        "paceline_audit_e_value",
    }


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("sum(paceline_gone_total)", "nothing is"),
        ('paceline_rounds_total{draft="x"}', "nothing is"),
        ('sum(paceline_fleet_targets{state="dead"})', "nothing is"),
        ("sum by (nowhere) (paceline_rounds_total)", "nowhere"),
    ],
)
def test_a_dead_query_is_found(query: str, what: str) -> None:
    series = {
        "paceline_rounds_total": [{"model_name": "toy", "replica": "t"}],
        "paceline_fleet_targets": [{"model_name": "toy", "state": "live"}],
    }
    assert any(what in bad for bad in problems(query, series))
