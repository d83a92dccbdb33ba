"""`paceline doctor`: whether a Serve YAML would run on this machine, and what to do if not."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ApiKey

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.cli.doctor_checks import Finding, PoolFacts
    from paceline.cli.servefile import ServeFile

EXIT_FAILED = 1
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}

ConfigFile = Annotated[
    Path | None, typer.Argument(help="A Serve YAML, such as deploy/serve/smollm2.yaml.")
]
Url = Annotated[str, typer.Option(help="A running service to try, too.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object with all findings.")]


def doctor(
    config: ConfigFile = None, url: Url = "", as_json: AsJson = False, api_key: ApiKey = ""
) -> None:
    """Check a configuration, its models and this machine; every problem comes with its fix.

    Downloads nothing and starts nothing. Ends with 1 when something failed, 0 otherwise.

    \b
    Examples:
      paceline doctor deploy/serve/smollm2.yaml
      paceline doctor deploy/serve/smollm2.yaml --url http://127.0.0.1:8000 --json
    """
    from paceline.cli.console import err, out, print_rows
    from paceline.cli.values import json_line
    from paceline.errors import ConfigError

    if config is None and not url:
        raise ConfigError("nothing to check: name a Serve YAML, or a running service with --url")
    if err.is_terminal:
        with err.status("looking"):
            findings = list(examine(config, url, api_key))
    else:
        findings = list(examine(config, url, api_key))
    num_failed = sum(finding.status == "fail" for finding in findings)
    if as_json:
        out.print(json_line(as_data(findings)), markup=False)
    else:
        print_rows(findings_table(findings))
        out.print(closing(findings), markup=False)
    if num_failed:
        raise typer.Exit(EXIT_FAILED)


def examine(config: Path | None, url: str, api_key: str) -> Iterator[Finding]:
    """Each finding as soon as it is known; without a readable file, the rest is not asked."""
    from paceline.cli import doctor_facts as facts
    from paceline.cli import doctor_machine as machine
    from paceline.cli import servefile
    from paceline.cli.doctor_checks import Finding
    from paceline.errors import ConfigError

    if config is not None:
        yield machine.check_python(*facts.python_fits())
        yield from machine.check_packages(facts.packages())
        try:
            file = servefile.load(config)
            for pool in file.pools:
                facts.template_of(pool.config)
            served = [name for app in file.apps for name in app.served_model_names]
        except ConfigError as error:
            problem = str(error).removeprefix(f"{config}: ")
            fix = f"correct {config}; every key is in the README's configuration table"
            yield Finding("config", "fail", problem, fix)
        else:
            yield Finding("config", "ok", f"{config}: serves {', '.join(served)}")
            yield from _examine_file(file, url)
    if url:
        for probe in facts.probes(url, api_key):
            yield machine.check_probe(probe)


def _examine_file(file: ServeFile, url: str) -> Iterator[Finding]:
    from paceline.cli import cluster, doctor_checks
    from paceline.cli import doctor_facts as facts
    from paceline.cli import doctor_machine as machine
    from paceline.cli.doctor_methods import check_heads, check_methods

    known, pools, gpus = facts.deployments(file), facts.pools(file), facts.gpus()
    yield from doctor_checks.check_models(pools, gpus, facts.free_ram())
    for pool in file.pools:
        yield check_methods(pool.name, pool.offer)
        yield from check_heads(pool)
    models = [model for found in pools for model in found.models]
    yield machine.check_cpus(models, gpus, facts.num_cpus())
    http = file.schema.http_options
    here = cluster.base_url(http.host, http.port)
    served_at = url if url.rstrip("/").replace("localhost", "127.0.0.1") == here else ""
    yield machine.check_http_port(facts.port(http.host, http.port), served_at)
    yield from _examine_ports(file, pools)
    for app in file.apps:
        yield from machine.check_certificates(
            facts.certificates(app.rpc.tls_dir), app.target.host, datetime.now(UTC)
        )
        yield machine.check_keys(len(app.gateway.api_keys), http.host)
    yield from machine.check_ray(facts.ray_facts(known), len(gpus))


def _examine_ports(file: ServeFile, pools: list[PoolFacts]) -> Iterator[Finding]:
    """Pools may share a range of ports: then their targets are counted together."""
    from paceline.cli import doctor_facts as facts
    from paceline.cli import doctor_machine as machine

    num_targets: dict[tuple[str, int, int], int] = {}
    for pool, found in zip(file.pools, pools, strict=True):
        target = pool.config.target
        where = (target.host, target.port_min, target.port_max)
        num_targets[where] = num_targets.get(where, 0) + found.target.num_replicas
    for (host, first, last), num in num_targets.items():
        num_free = facts.num_free_ports(host, first, last, num)
        yield machine.check_target_ports(first, last, num_free, num)


def findings_table(findings: list[Finding]) -> Table:
    """What was measured, and below it what to do."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        found = Text(_printable(finding.name), style="bold")
        found.append(f"  {_printable(finding.fact)}", style="not bold")
        table.add_row(Text(finding.status, style=STYLES[finding.status]), found)
        if finding.fix:
            fix = Text(f"fix: {_printable(finding.fix)}", style="cyan")
            table.add_row("", Padding(fix, (0, 0, 0, 2)))
    return table


def closing(findings: list[Finding]) -> str:
    counts = {status: sum(f.status == status for f in findings) for status in STYLES}
    return f"\n{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"


def as_data(findings: list[Finding]) -> dict[str, Any]:
    return {
        "is_ok": all(finding.status != "fail" for finding in findings),
        "findings": [
            {"name": f.name, "status": f.status, "fact": f.fact, "fix": f.fix or None}
            for f in findings
        ],
    }


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
