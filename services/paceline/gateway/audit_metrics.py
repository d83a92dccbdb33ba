"""The audit's counts as Prometheus reads them. Knows no registry and no audit under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.gateway.audit import AuditCounts, Skip

_COUNTERS = (
    ("requests", "Requests that were run again without a draft.", "num_requests"),
    ("tokens", "Output tokens that were compared.", "num_tokens"),
    ("ties", "Tokens that differ, with logits too close to tell.", "num_ties"),
    (
        "mismatches",
        "Choices (greedy, coupled) whose text is not the plain target's. Must be 0.",
        "num_mismatches",
    ),
    (
        "law_alarms",
        "1 once texts (rejection, block) were seen not to follow the target's law. Must be 0.",
        "num_alarms",
    ),
)


class AuditCollector(Collector):
    """`counts` by served model; they go on growing."""

    def __init__(self, counts: Mapping[str, AuditCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for name, what, attribute in _COUNTERS:
            family = CounterMetricFamily(f"paceline_audit_{name}", what, labels=["model_name"])
            for model, counts in self._counts.items():
                family.add_metric([model], getattr(counts, attribute))
            yield family
        skipped = CounterMetricFamily(
            "paceline_audit_skipped",
            "Sampled requests that were not audited, by why.",
            labels=["model_name", "reason"],
        )
        evidence = GaugeMetricFamily(
            "paceline_audit_e_value",
            "Evidence against the target's law (rejection, block); the alarm is at models / alpha.",
            labels=["model_name"],
        )
        for model, counts in self._counts.items():
            for reason in Skip:
                skipped.add_metric([model, reason.value], counts.skipped[reason])
            evidence.add_metric([model], counts.e_value)
        yield skipped
        yield evidence
