"""Pictures of a live benchmark's result, as PNG bytes: the timeline and the latencies.

Needs matplotlib (the extra `plots`), drawn without a display. Reads only the result's dict, so a
JSON file of an earlier run can be drawn, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from paceline.errors import ConfigError

DPI = 110
COLORS = {"with": "#1f77b4", "off": "#d62728"}
TIMELINE = (
    ("tokens_per_s", "tokens/s"),
    ("running", "requests in flight"),
    ("num_speculative_tokens", "mean K"),
    ("acceptance_rate", "acceptance rate"),
)
LATENCIES = (
    ("ttft_ms", "time to first token, ms"),
    ("itl_ms", "gap between chunks, ms"),
    ("e2e_ms", "whole answer, ms"),
)


def pictures(result: Mapping[str, Any]) -> dict[str, bytes]:
    """ "timeline" and "latency". Raises ConfigError, which names the extra, without matplotlib."""
    figure_class = _figure_class()
    sides = _sides(result)
    return {
        "timeline": _timeline(figure_class, sides),
        "latency": _latency(figure_class, sides),
    }


def check() -> None:
    """Raises ConfigError, which names the extra, without matplotlib."""
    _figure_class()


def _figure_class() -> Any:
    """matplotlib's Figure without pyplot: no global state, no window, always Agg."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib: pip install 'paceline[plots]' (the JSON needs nothing)"
        ) from error
    return Figure


def _sides(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    sides: dict[str, Mapping[str, Any]] = {"with": result}
    if compared := result.get("compare"):
        sides["off"] = compared["off"]
    return sides


def _timeline(figure_class: Any, sides: Mapping[str, Mapping[str, Any]]) -> bytes:
    figure = figure_class(figsize=(9, 8), layout="constrained")
    axes = figure.subplots(len(TIMELINE), 1, sharex=True)
    for axis, (name, label) in zip(axes, TIMELINE, strict=True):
        for side, report in sides.items():
            rows = [row for row in report["timeline"] if row[name] is not None]
            seconds, values = [row["second"] for row in rows], [row[name] for row in rows]
            if rows:  # a step needs its end, too
                seconds, values = [*seconds, seconds[-1] + 1], [*values, values[-1]]
            axis.step(seconds, values, where="post", color=COLORS[side], label=side)
        _finish(axis, label, has_legend=len(sides) > 1)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds")
    return _png(figure)


def _latency(figure_class: Any, sides: Mapping[str, Mapping[str, Any]]) -> bytes:
    figure = figure_class(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(LATENCIES))
    for axis, (name, label) in zip(axes, LATENCIES, strict=True):
        for side, report in sides.items():
            values: Sequence[float] = report["quantiles"][name]
            shares = [percent / 100 for percent in range(len(values))]
            axis.plot(values, shares, color=COLORS[side], label=side)
        _finish(axis, "share", has_legend=len(sides) > 1)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.02)
    return _png(figure)


def _finish(axis: Any, label: str, has_legend: bool) -> None:
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if has_legend:
        axis.legend(frameon=False)


def _png(figure: Any) -> bytes:
    file = BytesIO()
    # No software and no date in it: the same result gives the same bytes.
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()
