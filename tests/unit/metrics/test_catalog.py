"""The catalog by itself: names, help, units and labels as Prometheus wants them."""

from __future__ import annotations

import re

import pytest

from paceline.gateway.audit_samples import Skip
from paceline.metrics import audit_catalog, draft_catalog, target_catalog
from paceline.metrics.catalog import METRICS, OF_ROLE
from paceline.metrics.metric import BASE_LABELS, Kind, Metric
from paceline.protocol.messages import OpenStatus
from paceline.protocol.profit import DealState
from paceline.protocol.rounds import Disposition
from paceline.target.breaker import BreakerState

NAME = re.compile(r"paceline_[a-z][a-z0-9]*(_[a-z0-9]+)*")
LABEL = re.compile(r"[a-z][a-z_]*")
# What Prometheus, or a histogram, means something else by.
RESERVED = {"le", "quantile", "job", "instance"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.role}-{metric.name}")
def test_every_metric_says_what_it_is(metric: Metric) -> None:
    assert NAME.fullmatch(metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not metric.name.endswith(("_bucket", "_sum", "_count"))
    assert metric.help.endswith(".")
    assert metric.unit in metric.help_text or metric.unit in metric.name
    assert metric.source
    labels = metric.all_labels
    assert len(set(labels)) == len(labels)
    assert all(LABEL.fullmatch(label) for label in labels)
    assert not RESERVED & set(labels)
    assert labels[: len(BASE_LABELS[metric.role])] == BASE_LABELS[metric.role]
    assert metric.values is None or (metric.labels and len(set(metric.values)) > 0)
    assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_a_name_is_one_thing_whoever_counts_it() -> None:
    for name in {metric.name for metric in METRICS}:
        same = [of_role[name] for of_role in OF_ROLE.values() if name in of_role]
        assert len({(each.kind, each.help_text, each.labels, each.buckets) for each in same}) == 1
    assert len(METRICS) == sum(len(of_role) for of_role in OF_ROLE.values())


def test_the_states_and_outcomes_are_all_of_the_codes() -> None:
    """A new one in the code must not be without a series."""
    assert set(target_catalog.BREAKER_STATES) == set(BreakerState)
    assert set(target_catalog.SPECULATION_STATES) == set(DealState)
    assert set(target_catalog.DISPOSITIONS) >= set(Disposition)
    assert set(draft_catalog.OPEN_STATUSES) == {status.value for status in OpenStatus}
    assert set(audit_catalog.SKIPS) == {skip.value for skip in Skip}
    refusals = {status.value for status in OpenStatus} - {"ok"}
    assert set(target_catalog.SESSION_EVENTS) >= refusals
