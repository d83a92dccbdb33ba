"""PromQL, built from the catalog's metrics so that no query can name one that is not there.

Selectors are limited by the dashboard's variables where the metric has the label: `$model_name`,
`$replica` (of targets) and, where a dashboard has it, `$draft`. Rules have no variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.metrics.metric import Kind, Metric, Role

RATE_WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """Builds expressions over `window`."""

    window: str = RATE_WINDOW
    has_variables: bool = True
    has_draft: bool = False

    def select(self, metric: Metric, part: str = "", **labels: str) -> str:
        """`part`: of a histogram, bucket, sum or count. `labels`: value, or `~regex`."""
        known = metric.all_labels
        matchers = dict(self._variables(metric)) if self.has_variables else {}
        for name, value in labels.items():
            if name not in known:
                raise ValueError(f"{metric.name} has no label {name}")
            is_pattern = value.startswith("~")
            matchers[name] = f'=~"{value[1:]}"' if is_pattern else f'="{value}"'
        if (metric.kind is Kind.HISTOGRAM) != bool(part):
            raise ValueError(f"{metric.name} is a {metric.kind}")
        name = f"{metric.name}_{part}" if part else metric.name
        shown = ",".join(f"{label}{matcher}" for label, matcher in matchers.items())
        return f"{name}{{{shown}}}" if shown else name

    def rate(self, metric: Metric, part: str = "", **labels: str) -> str:
        return f"rate({self.select(metric, part, **labels)}[{self.window}])"

    def per_s(self, metric: Metric, by: str = "", part: str = "", **labels: str) -> str:
        """Events per second, summed up over all labels but those of `by`."""
        return total(self.rate(metric, part, **labels), by)

    def gauge(self, metric: Metric, by: str = "", how: str = "sum", **labels: str) -> str:
        return total(self.select(metric, **labels), by, how)

    def quantile(self, share: float, metric: Metric, by: str = "") -> str:
        labels = f"le, {by}" if by else "le"
        return f"histogram_quantile({share}, {total(self.rate(metric, 'bucket'), labels)})"

    def mean(self, metric: Metric, by: str = "") -> str:
        return ratio(self.per_s(metric, by, "sum"), self.per_s(metric, by, "count"))

    def share_up_to(self, bound: float, metric: Metric, by: str = "") -> str:
        """Of a histogram's observations, those at or below one of its bounds."""
        if bound not in metric.buckets:
            raise ValueError(f"{metric.name} has no bucket up to {bound}")
        below = self.select(metric, "bucket")
        matcher = f'le="{float(bound)!r}"'
        below = f"{below[:-1]},{matcher}}}" if below.endswith("}") else f"{below}{{{matcher}}}"
        return ratio(total(f"rate({below}[{self.window}])", by), self.per_s(metric, by, "count"))

    def _variables(self, metric: Metric) -> Mapping[str, str]:
        found = {}
        if "model_name" in metric.all_labels:
            found["model_name"] = '=~"$model_name"'
        if "replica" in metric.all_labels and metric.role in (Role.TARGET, Role.CONTROLLER):
            found["replica"] = '=~"$replica"'
        if "replica" in metric.all_labels and metric.role is Role.DRAFT and self.has_draft:
            found["replica"] = '=~"$draft"'
        return found


def total(expression: str, by: str = "", how: str = "sum") -> str:
    return f"{how} by ({by}) ({expression})" if by else f"{how}({expression})"


def ratio(above: str, below: str) -> str:
    """Nothing, rather than a division by 0, where nothing happened."""
    return f"{above} / ({below} > 0)"
