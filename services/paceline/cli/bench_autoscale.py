"""`paceline bench autoscale`: starts the service, counts its replicas, writes JSON and picture."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.bench_live import write
from paceline.cli.console import out
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.autoscale import Replicas

AUTOSCALE_CONFIG = Path(__file__).resolve().parents[3] / "deploy" / "serve" / "autoscale.yaml"
ASK_TIMEOUT_S = 10.0


def bench_autoscale(
    config: Annotated[Path, typer.Option(help="The Serve YAML to start.")] = AUTOSCALE_CONFIG,
    clients: Annotated[int, typer.Option(min=2, max=1000, help="At the peak.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 120,
    stretch: Annotated[float, typer.Option(min=0.1, help="Longer phases: so many times.")] = 1.0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the picture (extra 'plots').")] = None,
) -> None:
    """Start a service, let the load rise and fall, and show how its replicas follow."""
    from paceline.bench import autoscale, autoscale_plot
    from paceline.cli.serve import started

    if png is not None:
        autoscale_plot.figure_class()  # before two minutes have passed
    phases = [
        autoscale.Phase(clients if phase.num_clients > 1 else phase.num_clients, seconds)
        for phase in autoscale.PHASES
        if (seconds := phase.seconds * stretch)
    ]
    for path in (json_file, png):
        if path is not None:
            write(path, b"", "ab")  # what cannot be written fails now, not after the run
    with started(config, "127.0.0.1", port) as (url, model):
        result = asyncio.run(_run(url, model, phases, max_tokens))
    if json_file is not None:
        write(json_file, (json.dumps(result, indent=1) + "\n").encode())
    if png is not None:
        write(png, autoscale_plot.picture(result))
    summary = result["summary"]
    for name, value in summary.items():
        if name != "phases":
            out.print(f"{name}: {value}", markup=False)
    for figures in summary["phases"]:
        out.print(", ".join(f"{name} {value}" for name, value in figures.items()), markup=False)
    if summary["failures"] or summary["different_texts"]:
        raise PacelineError("requests failed, or brought other texts than the target alone")


async def _run(url: str, model: str, phases: list[Any], max_tokens: int) -> dict[str, Any]:
    from paceline.bench.autoscale import TIMEOUT_S, Demonstration
    from paceline.bench.client import LoadClient

    num_connections = max(phase.num_clients for phase in phases) + 1
    client = LoadClient(url, "", num_connections, TIMEOUT_S, time.monotonic)
    async with client:
        demonstration = Demonstration(client, model, count_replicas, phases, max_tokens)
        return await demonstration.run(lambda text: out.print(text, markup=False))


def count_replicas() -> Replicas:
    """As Serve and the Controller know them now. Blocks for some milliseconds."""
    from ray import serve

    from paceline.bench.autoscale import Replicas

    ((application, status),) = serve.status().applications.items()
    targets = status.deployments["TargetReplica"].replica_states
    drafts = status.deployments["DraftReplica"].replica_states
    controller = serve.get_deployment_handle("Controller", application)
    fleet = controller.status.remote().result(timeout_s=ASK_TIMEOUT_S)
    return Replicas(
        targets=targets.get("RUNNING", 0),
        targets_starting=targets.get("STARTING", 0),
        targets_stopping=targets.get("STOPPING", 0),
        drafts=drafts.get("RUNNING", 0),
        drafts_starting=drafts.get("STARTING", 0),
        drafts_stopping=drafts.get("STOPPING", 0),
        drafts_at_work=sum(draft["num_sessions"] > 0 for draft in fleet["drafts"]),
    )
