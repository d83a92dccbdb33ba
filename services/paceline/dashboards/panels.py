"""Grafana's dashboard JSON from rows of panels. Knows no metric and no PromQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Shape = Literal["timeseries", "stat", "gauge", "bargauge", "heatmap", "state-timeline"]
SCHEMA_VERSION = 39
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, RED = "green", "#EAB839", "red"
# Grafana's names of units.
SECONDS, RATIO, SHORT, BOOL, BYTES = "s", "percentunit", "short", "bool_on_off", "bytes"
REQUESTS_S, OPS_S, TOKENS_S = "reqps", "ops", "suffix: tok/s"


@dataclass(frozen=True, slots=True)
class Line:
    """One query of a panel. `legend` as Grafana's `{{label}}` templates."""

    query: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`warn` and `bad` are thresholds: above them, or below where `is_low_bad`."""

    title: str
    what: str
    lines: tuple[Line, ...]
    unit: str
    shape: Shape = "timeseries"
    width: int = 8
    warn: float | None = None
    bad: float | None = None
    is_low_bad: bool = False
    low: float | None = 0.0
    high: float | None = None
    is_stacked: bool = False

    @property
    def height(self) -> int:
        return 4 if self.shape in ("stat", "gauge") else 8


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down. `query`: label_values(...)."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    what: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]

    def json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.what,
            "tags": ["paceline"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,  # one cross-hair for all panels
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "",
            "links": [_links()],
            "annotations": {"list": []},
            "templating": {"list": [_datasource(), *map(_variable, self.variables)]},
            "panels": _place(self.rows),
        }


def _links() -> Json:
    return {
        "type": "dashboards",
        "tags": ["paceline"],
        "title": "Paceline",
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
    }


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _place(rows: Sequence[Row]) -> list[Json]:
    """Left to right, a new line where the next panel does not fit."""
    placed: list[Json] = []
    top = 0
    for row in rows:
        placed.append(_row(row.title, len(placed) + 1, top))
        top += 1
        left = line_height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, line_height = 0, top + line_height, 0
            grid = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            placed.append(_panel(panel, len(placed) + 1, grid))
            left, line_height = left + panel.width, max(line_height, panel.height)
        top += line_height
    return placed


def _row(title: str, number: int, top: int) -> Json:
    grid = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": grid,
        "panels": [],
    }


def _panel(panel: Panel, number: int, grid: dict[str, int]) -> Json:
    return {
        "id": number,
        "type": panel.shape,
        "title": panel.title,
        "description": panel.what,
        "datasource": DATASOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": _field_config(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            _target(panel, line, chr(ord("A") + index)) for index, line in enumerate(panel.lines)
        ],
    }


def _target(panel: Panel, line: Line, ref: str) -> Json:
    target = {
        "refId": ref,
        "datasource": DATASOURCE,
        "expr": line.query,
        "legendFormat": line.legend or "__auto",
        "editorMode": "code",
        "range": True,
    }
    if panel.shape == "heatmap":
        target["format"] = "heatmap"
    if panel.shape == "bargauge":
        target |= {"instant": True, "range": False}
    return target


def _field_config(panel: Panel) -> Json:
    config: Json = {"unit": panel.unit, "thresholds": _thresholds(panel)}
    if panel.low is not None:
        config["min"] = panel.low
    if panel.high is not None:
        config["max"] = panel.high
    if panel.shape == "timeseries":
        mode = "normal" if panel.is_stacked else "none"
        config["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 25 if panel.is_stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": mode, "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.warn is None else "dashed"},
        }
    return config


def _thresholds(panel: Panel) -> Json:
    """Without a `warn`, or without a `bad`, there is nothing between good and the other."""
    if panel.is_low_bad:
        first = RED if panel.bad is not None else YELLOW
        bounds = ((panel.bad, GREEN if panel.warn is None else YELLOW), (panel.warn, GREEN))
    else:
        first = GREEN
        bounds = ((panel.warn, YELLOW), (panel.bad, RED))
    steps: list[Json] = [{"color": first, "value": None}]
    steps += [{"color": color, "value": bound} for bound, color in bounds if bound is not None]
    return {"mode": "absolute", "steps": steps}


def _options(panel: Panel) -> Json:
    match panel.shape:
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            return {
                "colorMode": "value",
                "graphMode": "area",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            }
        case "heatmap":
            return {"calculate": False, "yAxis": {"unit": panel.unit}, "legend": {"show": True}}
        case "state-timeline":
            return {"mergeValues": True, "showValue": "never", "rowHeight": 0.9}
        case _:
            return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
