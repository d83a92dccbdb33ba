"""A live benchmark's result as rows of words, and as one HTML page without any other file.

Pure. The terminal's table shows the same rows (cli/live_view.py).
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = tuple[str, ...]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem }
body { margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 }
img { max-width: 100% } pre { background: #f4f4f4; padding: .8rem; overflow-x: auto }
"""
_LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("itl_ms", "gap between chunks"),
    ("itl_token_ms", "inter-token latency"),
    ("tpot_ms", "time per output token, by request"),
    ("e2e_ms", "whole answer"),
    ("start_lag_ms", "sent later than due"),
)
LATENCY_HEADINGS: Row = ("milliseconds", "mean", "p50", "p90", "p99", "max")


def sides(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The summaries by name: "with" alone, or "with" and "off"."""
    found: dict[str, Mapping[str, Any]] = {"with": result["summary"]}
    if compared := result.get("compare"):
        found["off"] = compared["off"]["summary"]
    return found


def overview(result: Mapping[str, Any]) -> list[Row]:
    """A name, and a figure for each side."""
    names: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "requests ok / failed": lambda s: f"{s['num_ok']} / {s['num_failed']}",
        "skipped (too many in flight)": lambda s: str(s["num_skipped"]),
        "seconds": lambda s: show(s["duration_s"], 1),
        "output tokens": lambda s: str(s["output_tokens"]),
        "tokens/s": lambda s: show(s["tokens_per_s"], 1),
        "tokens/s while all clients were busy": lambda s: show(s["full_tokens_per_s"], 1),
        "requests/s": lambda s: show(s["requests_per_s"], 2),
        "acceptance rate": lambda s: show(s["speculation"]["acceptance_rate"], 3),
        "acceptance rate of a token": lambda s: show(s["speculation"]["token_acceptance_rate"], 3),
        "mean acceptance length": lambda s: show(s["speculation"]["mean_acceptance_length"], 2),
    }
    summaries = sides(result).values()
    rows = [(name, *(figure(summary) for summary in summaries)) for name, figure in names.items()]
    if all(not summary["num_skipped"] for summary in summaries):
        rows = [row for row in rows if not row[0].startswith("skipped")]
    if result["summary"]["goodput"]:
        rows += [
            (f"goodput: {name}", *(show(s["goodput"][key], 3) for s in summaries))
            for name, key in (("requests/s within the SLO", "requests_per_s"), ("share", "share"))
        ]
    return rows


def latencies(summary: Mapping[str, Any]) -> list[Row]:
    """Under LATENCY_HEADINGS."""
    return [
        (label, *(show(summary[name][figure], 1) for figure in LATENCY_HEADINGS[1:]))
        for name, label in _LATENCIES
    ]


def errors(result: Mapping[str, Any]) -> list[Row]:
    """Side, code, how many, and one example."""
    return [
        (side, code, str(count), summary["example_errors"].get(code, ""))
        for side, summary in sides(result).items()
        for code, count in summary["errors"].items()
    ]


def comparison(result: Mapping[str, Any]) -> str:
    """One sentence; "" without a comparison."""
    if not (compared := result.get("compare")):
        return ""
    found, texts = compared["tokens_per_s_ratio"], compared["texts"]
    return (
        f"With speculation / off, tokens/s: {show(found['median'], 3)} (median of {found['count']}"
        f" pairs of blocks, {show(found['min'], 3)}-{show(found['max'], 3)});"
        f" {texts['equal']} of {texts['compared']} texts are equal."
    )


def show(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def html_page(result: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """One page; pictures are part of it, and every text from outside is escaped."""
    return "".join(_parts(result, pictures))


def _parts(result: Mapping[str, Any], pictures: Mapping[str, bytes]) -> Iterator[str]:
    title = html.escape(f"paceline bench live: {result['model']}")
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
    yield f"<p>{html.escape(comparison(result))}</p>"
    yield _table(("", *sides(result)), overview(result))
    for side, summary in sides(result).items():
        yield f"<h2>Latency, {html.escape(side)}</h2>"
        yield _table(LATENCY_HEADINGS, latencies(summary))
    if failed := errors(result):
        yield "<h2>Errors</h2>" + _table(("side", "code", "requests", "example"), failed)
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        yield f'<h2>{html.escape(name)}</h2><img alt="{html.escape(name)}"'
        yield f' src="data:image/png;base64,{data}">'
    settings = json.dumps(result["config"], indent=1, ensure_ascii=False)
    yield f"<h2>Settings</h2><pre>{html.escape(settings)}</pre></body></html>\n"


def _table(headings: Sequence[str], rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
