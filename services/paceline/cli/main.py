"""The `paceline` command. Commands import what they need when they run: `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import __version__, models
from paceline.cli.bench_autoscale import bench_autoscale
from paceline.cli.bench_live import bench_live
from paceline.cli.bench_orchestration import bench_orchestration
from paceline.cli.console import err, out, print_error, progress_display
from paceline.cli.explain import explain
from paceline.cli.simulate import simulate
from paceline.errors import PacelineError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
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
    help="Speculative decoding as a distributed service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Download, list and check the demo models.", no_args_is_help=True)
app.add_typer(models_app, name="models")
bench_app = typer.Typer(help="Benchmarks.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
bench_app.command("orchestration")(bench_orchestration)
bench_app.command("live")(bench_live)
bench_app.command("autoscale")(bench_autoscale)
app.command()(simulate)
app.command()(explain)

Host = Annotated[str | None, typer.Option(help="Address to listen on; default: the file's.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free one.")]


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__)


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A Serve YAML, such as deploy/serve/toy.yaml.")],
    port: Port = None,
    host: Host = None,
) -> None:
    """Serve a Serve YAML on this machine, on a Ray of its own, until Ctrl-C."""
    from paceline.cli.serve import serve as run

    run(config, host, port)


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Why is the sky blue?",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 1,
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
    """Stream a chat with its tokens colored by origin, then compare with no draft."""
    from paceline.cli.demo import at, on_this_machine
    from paceline.cli.demo_stream import DemoRequest

    request = DemoRequest(prompt, max_tokens, temperature, seed)
    if url:
        identical = at(url, request, rows, api_key)
    else:
        identical = on_this_machine(config, port, request, rows, api_key)
    if not identical:
        raise typer.Exit(EXIT_FAILED)


@app.command()
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
def models_list() -> None:
    """List the aliases and whether each is in the cache."""
    for alias in models.ALIASES.values():
        try:
            where = str(models.resolve(alias.name))
        except PacelineError as error:
            where = str(error)
        out.print(f"{alias.name}: {alias.description}\n  {where}", markup=False)


@models_app.command("verify")
def models_verify(
    names: Annotated[list[str] | None, typer.Argument(help="Aliases; default: all.")] = None,
) -> None:
    """Read every byte of the cached models and compare the checksums."""
    with progress_display() as progress:
        folders = [models.verify(name, progress) for name in names or models.ALIASES]
    for folder in folders:
        out.print(f"{folder}: ok", markup=False)


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Where the files go; made if missing.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are valid.")] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    renew: Annotated[bool, typer.Option("--renew", help="New certificates, same CA.")] = False,
) -> None:
    """Make a CA and the certificates of targets and drafts, for rpc.tls_dir."""
    from paceline.cli.certs import certs as make

    make(folder, days, force=force, renew=renew)


@app.command("config-table", hidden=True)
def config_table() -> None:
    """Print the README's configuration table."""
    from paceline.cli.config_table import markdown_table

    out.print(markdown_table(), markup=False, end="")


if __name__ == "__main__":
    app()
