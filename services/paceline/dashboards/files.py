"""The generated files under deploy/, by path."""

from __future__ import annotations

import json

import yaml

from paceline.dashboards.alerts import rules
from paceline.dashboards.drafts import DRAFTS
from paceline.dashboards.overview import OVERVIEW
from paceline.dashboards.panels import Dashboard
from paceline.dashboards.slo import SLO
from paceline.dashboards.speculation import SPECULATION

DASHBOARDS: dict[str, Dashboard] = {
    "overview": OVERVIEW,
    "speculation": SPECULATION,
    "drafts": DRAFTS,
    "slo": SLO,
}
RULES_PATH = "prometheus/rules.yaml"
_HEAD = "# Made by `paceline dashboards`; change services/paceline/dashboards/alerts.py instead.\n"


def generated() -> dict[str, str]:
    """Path below deploy/ and text."""
    files = {
        f"grafana/{name}.json": json.dumps(dashboard.json(), indent=1, sort_keys=True) + "\n"
        for name, dashboard in DASHBOARDS.items()
    }
    text = yaml.safe_dump(rules(), sort_keys=False, width=100, allow_unicode=True)
    return {**files, RULES_PATH: _HEAD + text}
