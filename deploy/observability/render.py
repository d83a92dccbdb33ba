"""Pictures of the Grafana dashboards without Grafana: every query asked of a running Prometheus.

    python deploy/observability/render.py --prometheus http://127.0.0.1:9090 --out /tmp/pictures

For eyes, where there is no Grafana: the panels of deploy/grafana/*.json at their places, with their
titles, units and thresholds. A panel whose queries find nothing says so. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

GRAFANA = Path(__file__).resolve().parents[1] / "grafana"
SUFFIXES = {"s": "s", "percentunit": "%", "reqps": "req/s", "ops": "/s"}
COLORS = {"green": "#3fa34d", "#EAB839": "#d39b00", "red": "#d64545"}
MAX_LEGEND = 8
Series = list[dict[str, Any]]


class Prometheus:
    def __init__(self, url: str, start: float, end: float, step: float, window: str) -> None:
        self._url, self._start, self._end, self._step = url, start, end, step
        self._window = window

    def ask(self, query: str) -> Series:
        query = query.replace("$__rate_interval", self._window)
        query = re.sub(r"\$\w+", ".*", query)
        asked = {"query": query, "start": self._start, "end": self._end, "step": self._step}
        url = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            found: Series = json.load(response)["data"]["result"]
        return found


def legend(template: str, labels: dict[str, str]) -> str:
    if template == "__auto":
        return ", ".join(f"{k}={v}" for k, v in labels.items() if k != "__name__")
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), template)


def points(series: dict[str, Any], start: float) -> tuple[list[float], list[float]]:
    pairs = [(float(t) - start, float(v)) for t, v in series["values"]]
    return [t for t, _ in pairs], [v for _, v in pairs]


def shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "bool_on_off":
        return "on" if value else "off"
    if unit == "s" and value < 1:
        return f"{1000 * value:.3g} ms"
    text = unit.removeprefix("suffix:") if unit.startswith("suffix:") else SUFFIXES.get(unit, "")
    return f"{value:.4g} {text}".strip()


def color_of(panel: dict[str, Any], value: float) -> str:
    color = "green"
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    return COLORS.get(color, color)


def draw_stat(axes: Axes, panel: dict[str, Any], found: list[tuple[str, Any]], unit: str) -> None:
    axes.set_axis_off()
    for place, (name, series) in enumerate(found[:3]):
        times, values = points(series, 0.0)
        height = 1.0 - (place + 0.5) / min(3, len(found))
        text = shown(values[-1], unit) + (f"  {name}" if len(found) > 1 else "")
        size = 20 if len(found) == 1 else 11
        axes.text(0.5, height, text, ha="center", va="center", fontsize=size,
                  color=color_of(panel, values[-1]), transform=axes.transAxes)  # fmt: skip
        if len(found) == 1 and len(values) > 1:
            below = axes.inset_axes((0.0, 0.0, 1.0, 0.3))
            below.fill_between(times, values, color=color_of(panel, values[-1]), alpha=0.25)
            below.set_axis_off()


def draw_bars(axes: Axes, found: list[tuple[str, Any]], unit: str) -> None:
    pairs = [(name, points(series, 0.0)[1][-1]) for name, series in found]
    if all(name.isdigit() for name, _ in pairs):
        pairs.sort(key=lambda pair: int(pair[0]))
    axes.bar([name for name, _ in pairs], [value for _, value in pairs], color="#3fa34d")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: shown(v, unit)))


def draw_heatmap(axes: Axes, found: list[tuple[str, Any]], start: float) -> None:
    """Cumulative buckets become shares of each."""
    order = sorted(found, key=lambda pair: float(pair[0].replace("+Inf", "inf")))
    columns: dict[float, list[float]] = {}
    for index, (_, series) in enumerate(order):
        for at, value in zip(*points(series, start), strict=True):
            columns.setdefault(at, [0.0] * len(order))[index] = value
    times = sorted(columns)
    grid = [
        [max(0.0, columns[t][i] - (columns[t][i - 1] if i else 0.0)) for t in times]
        for i in range(len(order))
    ]
    axes.imshow(grid, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest",
                extent=(times[0], times[-1], -0.5, len(order) - 0.5))  # fmt: skip
    axes.set_yticks(range(len(order)), [name for name, _ in order], fontsize=6)


def draw_states(axes: Axes, found: list[tuple[str, Any]], start: float) -> None:
    names = []
    for index, (name, series) in enumerate(found[:24]):
        times, values = points(series, start)
        on = [t for t, v in zip(times, values, strict=True) if v]
        axes.scatter(on, [index] * len(on), marker="s", s=14, color="#3fa34d")
        names.append(name)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_ylim(-0.7, len(names) - 0.3)


def draw_lines(
    axes: Axes, panel: dict[str, Any], found: list[tuple[str, Any]], unit: str, start: float
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    if defaults["custom"]["stacking"]["mode"] == "normal":
        columns: dict[float, list[float]] = {}
        for index, (_, series) in enumerate(found):
            for at, value in zip(*points(series, start), strict=True):
                columns.setdefault(at, [0.0] * len(found))[index] = value
        times = sorted(columns)
        layers = [[columns[t][i] for t in times] for i in range(len(found))]
        axes.stackplot(times, layers, labels=[name for name, _ in found], alpha=0.7)
    else:
        for name, series in found:
            axes.plot(*points(series, start), label=name, linewidth=1.0)
    for step in defaults["thresholds"]["steps"][1:]:
        axes.axhline(step["value"], color=COLORS[step["color"]], linestyle="--", linewidth=0.7)
    low, high = axes.get_ylim()
    values = [v for _, series in found for v in points(series, start)[1] if not math.isnan(v)]
    most = max(values, default=1.0) or 1.0
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    axes.set_ylim(defaults.get("min", low), high if stacked else most * 1.15)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: shown(v, unit)))
    axes.grid(alpha=0.25, linewidth=0.5)
    if len(found) <= MAX_LEGEND * 2:
        axes.legend(fontsize=5.5, ncols=2, loc="upper left", framealpha=0.6)


def draw(axes: Axes, panel: dict[str, Any], prometheus: Prometheus, start: float) -> bool:
    """False: nothing was found."""
    found: list[tuple[str, Any]] = []
    for target in panel["targets"]:
        for series in prometheus.ask(target["expr"]):
            found.append((legend(target["legendFormat"], series["metric"]), series))
    axes.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
    axes.tick_params(labelsize=6)
    if not found:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", ha="center", color="#999999", transform=axes.transAxes)
        return False
    unit = panel["fieldConfig"]["defaults"]["unit"]
    match panel["type"]:
        case "stat" | "gauge":
            draw_stat(axes, panel, found, unit)
        case "bargauge":
            draw_bars(axes, found, unit)
        case "heatmap":
            draw_heatmap(axes, found, start)
        case "state-timeline":
            draw_states(axes, found, start)
        case _:
            draw_lines(axes, panel, found, unit, start)
    return True


def picture(board: dict[str, Any], prometheus: Prometheus, start: float, path: Path) -> list[str]:
    """The titles of the panels without data."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = plt.figure(figsize=(20, 0.42 * rows + 1), dpi=100)
    figure.suptitle(board["title"], fontsize=14, x=0.01, ha="left")
    empty = []
    left, width, top, height = 0.01, 0.98, 1 - 0.8 / (0.42 * rows + 1), 1 - 1 / (0.42 * rows + 1)
    for panel in board["panels"]:
        grid = panel["gridPos"]
        x = left + width * grid["x"] / 24
        y = top - height * (grid["y"] + grid["h"]) / rows
        w, h = width * grid["w"] / 24, height * grid["h"] / rows
        if panel["type"] == "row":
            figure.text(x, y + 0.3 * h, panel["title"], fontsize=11, color="#555555")
            continue
        has_names = panel["type"] == "state-timeline"
        pad = 0.14 if has_names and grid["w"] < 24 else 0.06 if has_names else 0.028
        axes = figure.add_axes((x + pad, y + 0.14 * h, max(0.02, w - pad - 0.008), 0.68 * h))
        if not draw(axes, panel, prometheus, start):
            empty.append(panel["title"])
    figure.savefig(path)
    plt.close(figure)
    return empty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1800.0, help="how far to look back")
    parser.add_argument("--until", type=float, default=time.time(), help="seconds since 1970")
    parser.add_argument("--step", type=float, default=5.0)
    parser.add_argument("--window", default="20s", help="$__rate_interval")
    given = parser.parse_args()
    end = given.until
    start = end - given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    prometheus = Prometheus(given.prometheus, start, end, given.step, given.window)
    for file in sorted(GRAFANA.glob("*.json")):
        path = given.out / f"{file.stem}.png"
        empty = picture(json.loads(file.read_text()), prometheus, start, path)
        sys.stdout.write(f"{path}: {'without data: ' + ', '.join(empty) if empty else 'all'}\n")


if __name__ == "__main__":
    main()
