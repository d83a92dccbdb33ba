"""`paceline simulate`: sizes a fleet, or checks the simulator against the orchestration bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from paceline.cli.console import err, out, print_error, status_display
from paceline.errors import ConfigError

TABLE_COLUMNS = 200

if TYPE_CHECKING:
    from paceline.simulate.config import SimulateConfig

EXIT_DISAGREES = 1


def simulate(
    config: Annotated[
        Path, typer.Argument(help="A YAML such as deploy/simulate/fleet.yaml.", show_default=False)
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything there, too.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="JSON of `paceline bench orchestration`: simulate its settings instead."),
    ] = None,
) -> None:
    """Simulate a fleet: tokens/s, latency and cost of a configuration."""
    from paceline.simulate.load import load, read_trace

    parsed, runs = load(config)
    if against is not None:
        _agree(parsed, against, json_file)
        return
    trace = []
    arrivals = parsed.traffic.arrivals
    if arrivals.process == "trace":
        names = {item.name for item in parsed.traffic.classes}
        trace = read_trace(config.parent / arrivals.trace, names)
    from paceline.simulate.results import Study

    _check_writable(json_file)
    with status_display() as show:
        study = Study(trace, lambda what, share: show(_progress(what, share)))
        rows = study.sweep(runs)
        found = study.find(parsed) if parsed.find is not None else None
    _print_table(_table(rows, "runs"))
    if found is not None:
        _print_table(_table(found["tried"], "the draft:target ratio"))
        out.print(f"best: {found['num_drafts']} drafts for {found['num_targets']} targets", end="")
        out.print(f" ({found['reason']})", markup=False)
    report: dict[str, Any] = {"config": _echo(parsed), "rows": rows, "find": found}
    _write(report, json_file)


def _progress(what: str, share: float) -> str:
    """In steps of a tenth without a terminal, where each change is a line."""
    percent = round(100 * share)
    return f"{what}: {percent if err.is_terminal else percent // 10 * 10} %"


def _echo(config: SimulateConfig) -> dict[str, Any]:
    data: dict[str, Any] = config.model_dump(mode="json")
    return data


def _check_writable(path: Path | None) -> None:
    """What cannot be written fails now, not after the run."""
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _write(report: dict[str, Any], path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


COLUMNS = (
    ("targets", "num_targets"),
    ("drafts", "num_drafts"),
    ("tokens/s", "tokens_per_s"),
    ("/ no draft", "ratio"),
    ("TTFT p99 ms", "ttft_ms"),
    ("ITL p99 ms", "itl_ms"),
    ("in SLO", "goodput_share"),
    ("target busy", "target_busy"),
    ("draft busy", "draft_busy"),
    ("acceptance", "acceptance_rate"),
    ("K", "mean_num_speculative_tokens"),
    ("tokens/pass", "mean_acceptance_length"),
    ("cost/h", "cost_per_hour"),
    ("cost/M tokens", "cost_per_million_tokens"),
)


def _print_table(table: Table) -> None:
    """Whole figures, however narrow the terminal is."""
    from rich.console import Console

    Console(width=max(out.width, TABLE_COLUMNS), highlight=False).print(table)


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    varied = [key for key in rows[0].get("varied", {}) if key != "fleet.num_drafts"]
    table = Table(*varied, *(head for head, _ in COLUMNS), title=title)
    for row in rows:
        first = [str(row["varied"][key]) for key in varied]
        table.add_row(*first, *(_cell(row.get(key)) for _, key in COLUMNS))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = value["p99"]
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _agree(config: SimulateConfig, path: Path, json_file: Path | None) -> None:
    """Exit code 1 when a setting differs by more than the tolerance."""
    from paceline.simulate.agreement import TOLERANCE, compare, read_bench

    if config.draft_kind is None:
        raise ConfigError("--against needs a configuration with fleet.draft")
    rows = read_bench(path)
    with status_display() as show:
        comparisons = list(compare(config, rows, show))
    heads = ("scheme", "RTT ms", "acceptance", "batch", "bench", "simulated", "difference")
    table = Table(*heads, title="tokens/s")
    for item in comparisons:
        values = (item.scheme, f"{item.rtt_ms:g}", f"{item.acceptance:g}", str(item.batch))
        rates = (f"{item.bench_tokens_per_s:.1f}", f"{item.simulated_tokens_per_s:.1f}")
        color = "green" if item.agrees else "red"
        table.add_row(*values, *rates, f"[{color}]{item.difference:+.1%}[/]")
    _print_table(table)
    worst = max(comparisons, key=lambda item: abs(item.difference))
    num_apart = sum(not item.agrees for item in comparisons)
    out.print(f"{len(comparisons)} settings, largest difference {worst.difference:+.1%}")
    names = ("scheme", "rtt_ms", "acceptance", "batch", "bench_tokens_per_s")
    plain = [
        {
            **{name: getattr(item, name) for name in names},
            "simulated_tokens_per_s": round(item.simulated_tokens_per_s, 3),
            "difference": round(item.difference, 5),
        }
        for item in comparisons
    ]
    _write({"config": _echo(config), "tolerance": TOLERANCE, "rows": plain}, json_file)
    if num_apart:
        print_error(f"{num_apart} settings differ by more than {TOLERANCE:.0%}")
        raise typer.Exit(EXIT_DISAGREES)
