"""`paceline bench tracing`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench_tracing(
    batch: Annotated[int, typer.Option(min=1, max=256, help="Sequences at a time.")] = 32,
    runs: Annotated[int, typer.Option(min=1, help="Of each mode.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a run.")] = 4.0,
    warmup: Annotated[float, typer.Option(min=0.0, help="Seconds before it.")] = 1.0,
    draft_ms: Annotated[float, typer.Option(min=0.0, help="A draft pass.")] = 3.0,
    verify_ms: Annotated[float, typer.Option(min=0.01, help="A target pass.")] = 25.0,
    endpoint: Annotated[
        str, typer.Option(help="Spans go to this OTLP/gRPC collector, not to files.")
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Rows go here.")] = None,
) -> None:
    """Measure what tracing costs: tokens/s at sample ratios 0, 0.1 and 1 by tokens/s without."""
    import asyncio
    import json
    import tempfile

    from rich.table import Table

    from paceline.bench import tracing
    from paceline.bench.ceiling import Costs
    from paceline.bench.schemes import Effort
    from paceline.cli.bench_live import write
    from paceline.cli.console import print_rows, status_display

    if json_file is not None:
        write(json_file, b"", "ab")  # what cannot be written fails now, not after the run
    setting = tracing.setting_of(Costs(draft_ms, verify_ms), batch)
    effort = Effort(runs, warmup, seconds)
    with tempfile.TemporaryDirectory() as folder, status_display() as say:
        costs = asyncio.run(tracing.run(setting, effort, Path(folder), say, endpoint))
        say("")
    title = f"batch {batch}, target pass {verify_ms:g} ms, medians of {runs} runs; cpu: ms a pass"
    table = Table(title=title)
    for heading in (
        "sample ratio",
        "tokens/s",
        "by off",
        "least",
        "most",
        "cpu",
        "spans",
        "dropped",
    ):
        table.add_column(heading, justify="right")
    for cost in costs:
        ratios = (cost.ratio, min(cost.ratios), max(cost.ratios))
        cells = (f"{cost.tokens_per_s:.1f}", *(f"{ratio:.4f}" for ratio in ratios))
        counts = (cost.num_spans, cost.num_dropped)
        table.add_row(cost.mode.name, *cells, f"{cost.cpu_ms:.3f}", *map(str, counts))
    print_rows(table)
    if json_file is not None:
        rows = [cost.row() for cost in costs]
        write(json_file, (json.dumps(rows, indent=1) + "\n").encode())
