"""The `paceline` command. Commands import what they need when they run: `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import __version__, models
from paceline.cli.bench_autoscale import bench_autoscale
from paceline.cli.bench_live import bench_live
from paceline.cli.bench_methods import bench_methods
from paceline.cli.bench_orchestration import bench_orchestration
from paceline.cli.bench_tracing import bench_tracing
from paceline.cli.chat import chat
from paceline.cli.console import err, out, print_error, print_rows, progress_display
from paceline.cli.dashboards import dashboards
from paceline.cli.distill import distill
from paceline.cli.doctor import doctor
from paceline.cli.explain import explain
from paceline.cli.options import Method
from paceline.cli.rejections import rejections
from paceline.cli.simulate import simulate
from paceline.cli.top import top
from paceline.cli.trace import trace
from paceline.cli.values import json_line
from paceline.errors import PacelineError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_CODES = (
    "Exit codes: 0 all is well, 1 it failed (one line on stderr says why), 2 the command line is "
    "wrong, 130 interrupted. Colors on a terminal only, and never with NO_COLOR set."
)
SERVE, TRY, MEASURE, OPERATE = "Serve", "Try", "Measure", "Operate"
REPOSITORY = Path(__file__).resolve().parents[3]
DEMO_CONFIG = REPOSITORY / "deploy" / "serve" / "smollm2.yaml"


class Commands(typer.core.TyperGroup):
    """Errors that we raise on purpose become one line and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            print_error(str(error))
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            print_error("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    help="Speculative decoding as a distributed service.\n\n\b\nExamples:\n"
    "  paceline demo\n"
    "  paceline serve deploy/serve/smollm2.yaml\n"
    "  paceline chat",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
models_app = typer.Typer(help="Download, list and check the demo models.", no_args_is_help=True)
bench_app = typer.Typer(help="Benchmarks.", no_args_is_help=True)
bench_app.command("orchestration")(bench_orchestration)
bench_app.command("live")(bench_live)
bench_app.command("autoscale")(bench_autoscale)
bench_app.command("tracing")(bench_tracing)
bench_app.command("methods")(bench_methods)

Host = Annotated[str | None, typer.Option(help="Address to listen on; default: the file's.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free one.")]


AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@app.command(rich_help_panel=SERVE)
def serve(
    config: Annotated[Path, typer.Argument(help="A Serve YAML, such as deploy/serve/toy.yaml.")],
    port: Port = None,
    host: Host = None,
) -> None:
    """Serve a Serve YAML on this machine, on a Ray of its own, until Ctrl-C.

    \b
    Examples:
      paceline serve deploy/serve/toy.yaml
      paceline serve deploy/serve/smollm2.yaml --port 9000
    """
    from paceline.cli.serve import serve as run

    run(config, host, port)


app.add_typer(models_app, name="models", rich_help_panel=SERVE)
app.command(rich_help_panel=SERVE)(distill)
app.command(rich_help_panel=TRY)(chat)


@app.command(rich_help_panel=TRY)
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Why is the sky blue?",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 1,
    method: Method = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows of the round table; 0 is all.")] = 24,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    config: Annotated[Path, typer.Option(help="The Serve YAML to start.")] = DEMO_CONFIG,
    url: Annotated[str, typer.Option(help="Use a running service instead.")] = "",
    api_key: Annotated[
        str,
        typer.Option(
            envvar="PACELINE_API_KEY",
            show_default=False,
            help="For a service with keys. Others on this machine see options, not variables.",
        ),
    ] = "",
) -> None:
    """Stream a chat with its tokens colored by origin, then compare with no speculation.

    \b
    Examples:
      paceline demo
      paceline demo --prompt "Write a haiku." --url http://127.0.0.1:8000
      paceline demo --method suffix
    """
    from paceline.cli.demo import at, on_this_machine
    from paceline.cli.demo_stream import DemoRequest

    request = DemoRequest(prompt, max_tokens, temperature, seed, method)
    if url:
        identical = at(url, request, rows, api_key)
    else:
        identical = on_this_machine(config, port, request, rows, api_key)
    if not identical:
        raise typer.Exit(EXIT_FAILED)


app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
app.command(rich_help_panel=MEASURE)(simulate)
app.command(rich_help_panel=OPERATE)(doctor)
app.command(rich_help_panel=OPERATE)(top)
app.command(rich_help_panel=OPERATE)(explain)
app.command(rich_help_panel=OPERATE)(trace)
app.command(rich_help_panel=OPERATE)(dashboards)
app.command(rich_help_panel=OPERATE)(rejections)


@app.command(rich_help_panel=OPERATE)
def key(name: Annotated[str, typer.Argument(help="How logs call the key's holder.")]) -> None:
    """Make an API key: the key on stdout, once; the lines for the Serve YAML on stderr."""
    from paceline.cli.keys import new_key

    made = new_key(name)
    out.print(str(made.secret), markup=False)
    err.print("The key is shown only now. Under args.gateway of the Serve YAML:", markup=False)
    err.print(made.yaml, markup=False)


@models_app.command("fetch")
def models_fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Aliases; default: all.")] = None,
) -> None:
    """Download and convert the models behind the aliases into the cache folder."""
    from paceline.cli.fetch import fetch

    with progress_display() as progress:
        folders = [fetch(name, progress) for name in names or models.ALIASES]
    for folder in folders:
        out.print(str(folder), markup=False)


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """List the aliases and whether each is in the cache."""
    from paceline.cli import models_view

    found = models_view.states()
    if as_json:
        out.print(json_line(found), markup=False)
    else:
        print_rows(models_view.table(found))


@models_app.command("verify")
def models_verify(
    names: Annotated[list[str] | None, typer.Argument(help="Aliases; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of the cached models and compare the checksums."""
    from paceline.engine.medusa_source import MEDUSA_ALIASES, verify_medusa

    with progress_display() as progress:
        folders = {
            name: (verify_medusa if name in MEDUSA_ALIASES else models.verify)(name, progress)
            for name in names or models.ALIASES
        }
    if as_json:
        found = [{"name": n, "folder": str(f), "is_ok": True} for n, f in folders.items()]
        out.print(json_line(found), markup=False)
        return
    for folder in folders.values():
        out.print(f"{folder}: ok", markup=False)


@app.command(rich_help_panel=OPERATE)
def certs(
    folder: Annotated[Path, typer.Argument(help="Where the files go; made if missing.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are valid.")] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    renew: Annotated[bool, typer.Option("--renew", help="New certificates, same CA.")] = False,
) -> None:
    """Make a CA and the certificates of targets and drafts, for rpc.tls_dir."""
    from paceline.cli.certs import certs as make

    make(folder, days, force=force, renew=renew)


@app.command(rich_help_panel=OPERATE)
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    out.print(json_line({"version": __version__}) if as_json else __version__, markup=False)


@app.command("api-table", hidden=True)
def api_table() -> None:
    """Print the README's table of request fields."""
    from paceline.cli.api_table import markdown_table

    out.print(markdown_table(), markup=False, end="")


@app.command("config-table", hidden=True)
def config_table() -> None:
    """Print the README's configuration table."""
    from paceline.cli.config_table import markdown_table

    out.print(markdown_table(), markup=False, end="")


if __name__ == "__main__":
    app()
