"""The picture of an autoscaling demonstration: load, replicas and speed over the same seconds.

Needs matplotlib (the extra `plots`), drawn without a display. Reads only the result's dict, so a
JSON file of an earlier run can be drawn, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from paceline.errors import ConfigError

DPI = 110
# One picture below the other: label, and (name in a sample, legend) of each line.
PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("clients", (("clients", ""),)),
    ("drafts", (("drafts", "run"), ("drafts_at_work", "have sequences"))),
    ("targets", (("targets", ""),)),
    ("mean K in force", (("k", ""),)),
    ("acceptance rate", (("acceptance_rate", ""),)),
    ("tokens/s", (("tokens_per_s", ""),)),
    ("TTFT p50, ms", (("ttft_p50_ms", ""),)),
)
COLORS = ("#1f77b4", "#d62728")
WHOLE_NUMBERS = ("clients", "drafts", "targets")


def figure_class() -> Any:
    """matplotlib's Figure without pyplot: no window, no global state. Raises ConfigError, which
    names the extra, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib: pip install 'paceline[plots]' (the JSON needs nothing)"
        ) from error
    return Figure


def picture(result: Mapping[str, Any]) -> bytes:
    """PNG bytes. Raises ConfigError without matplotlib."""
    from matplotlib.ticker import MaxNLocator

    figure = figure_class()(figsize=(9, 11), layout="constrained")
    axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axis, (label, lines) in zip(axes, PANELS, strict=True):
        for (name, legend), color in zip(lines, COLORS, strict=False):
            _draw(axis, result["samples"], name, legend, color)
        if label in WHOLE_NUMBERS:
            axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        if any(legend for _, legend in lines):
            axis.legend(loc="upper right", fontsize=8)
        axis.set_ylabel(label, fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        for second in _changes(result["phases"]):
            axis.axvline(second, color="#888888", linewidth=0.8, linestyle=":")
    axes[-1].set_xlabel("seconds")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _draw(
    axis: Any, samples: Sequence[Mapping[str, Any]], name: str, legend: str, color: str
) -> None:
    """Gaps stay gaps: matplotlib draws no line to a nan."""
    seconds = [sample["second"] for sample in samples]
    values = [float("nan") if s[name] is None else s[name] for s in samples]
    axis.step(seconds, values, where="post", color=color, label=legend or None, linewidth=1.4)


def _changes(phases: Sequence[Mapping[str, Any]]) -> list[float]:
    """When the load changes."""
    seconds = [sum(phase["seconds"] for phase in phases[:index]) for index in range(len(phases))]
    return seconds[1:]
