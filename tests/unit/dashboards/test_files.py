"""The dashboards and rules as files: those committed are those generated, in Grafana's shape."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.dashboards.alerts import ALERTS, RECORDED
from paceline.dashboards.files import DASHBOARDS, RULES_PATH, generated
from paceline.dashboards.panels import COLUMNS

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


@pytest.mark.parametrize("name", sorted(generated()))
def test_the_committed_file_is_the_generated_one(name: str) -> None:
    """After a change: `paceline dashboards`."""
    assert (DEPLOY / name).read_text(encoding="utf-8") == generated()[name]


def test_nothing_else_is_in_the_folders() -> None:
    found = {
        path.relative_to(DEPLOY).as_posix()
        for folder in ("grafana", "prometheus")
        for path in (DEPLOY / folder).iterdir()
    }
    assert found == set(generated())


@pytest.fixture(params=sorted(DASHBOARDS))
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    text: dict[str, Any] = json.loads(generated()[f"grafana/{request.param}.json"])
    return text


def test_panels_are_whole(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = [panel["title"] for panel in panels]
    assert panels[0]["type"] == "row"
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
    assert len(titles) > 5


def test_panels_do_not_overlap(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= COLUMNS
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_thresholds_go_up(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        if panel["type"] != "row":
            steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]
            values = [step["value"] for step in steps]
            assert values == sorted(values), panel["title"]


def test_every_variable_is_used_and_every_used_one_is_there(board: dict[str, Any]) -> None:
    queries = " ".join(t["expr"] for p in board["panels"] for t in p.get("targets", ()))
    names = {each["name"] for each in board["templating"]["list"]}
    for name in ("model_name", "replica", "draft"):
        assert (f"${name}" in queries) == (name in names), name
    assert "datasource" in names


def test_uids_tell_dashboards_apart() -> None:
    boards = DASHBOARDS.values()
    assert len({board.uid for board in boards}) == len({board.title for board in boards}) == 4


def test_alerts_say_what_to_do() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    assert {alert.severity for alert in ALERTS} == {"critical", "warning", "info"}
    for alert in ALERTS:
        assert alert.summary
        assert alert.what.endswith(".")
        assert "$model_name" not in alert.query, "rules have no variables"
    groups = yaml.safe_load(generated()[RULES_PATH])["groups"]
    names = [rule.get("alert") or rule["record"] for group in groups for rule in group["rules"]]
    assert len(names) == len(set(names)) == len(ALERTS) + len(RECORDED)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus has it")
def test_prometheus_takes_the_rules() -> None:
    command = ["promtool", "check", "rules", str(DEPLOY / RULES_PATH)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
