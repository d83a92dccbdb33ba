"""`paceline bench methods`: its options and its table. The measuring is bench/methods.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.methods import MethodsConfig, Sets

HEADINGS = ("set", "method", "tokens/s", "by off", "least", "most", "length", "accepted", "texts")


def bench_methods(
    url: Annotated[str, typer.Option(help="A running service, as http://127.0.0.1:8000.")] = "",
    config: Annotated[
        Path | None, typer.Option(help="Or: start this Serve YAML, and stop it at the end.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="Compared with off; separated by commas, default all that are offered."),
    ] = "",
    sets: Annotated[
        str,
        typer.Option(
            help="Of chat, code, repeat, mixed, or categories of --prompts; separated by commas."
        ),
    ] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with 'messages' or 'prompt', and 'category'.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Prompts of a set; 0 is all.")] = 0,
    rounds: Annotated[int, typer.Option(help="Of every method, in turns.")] = 5,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of a set's first request.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one request.")] = 600.0,
    model: Annotated[str, typer.Option(help="Default: what the service names.")] = "",
    api_key: Annotated[
        str,
        typer.Option(
            envvar="PACELINE_API_KEY",
            show_default=False,
            help="Others on this machine see options, not variables.",
        ),
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result.")] = None,
) -> None:
    """Compare the methods of speculation with none: speed, accepted length, and equal texts.

    \b
    Examples:
      paceline bench methods --url http://127.0.0.1:8000 --methods ngram,suffix --sets repeat,chat
      paceline bench methods --config deploy/serve/smollm2.yaml --rounds 3 --json methods.json
    """
    from paceline.bench.live import LiveConfig
    from paceline.bench.methods import MethodsConfig, method_names

    if bool(url) == (config is not None):
        raise ConfigError("name a running service with --url, or a Serve YAML with --config")
    live = LiveConfig(
        url,
        concurrency=concurrency,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        timeout_s=timeout,
        model=model,
    )
    wanted = MethodsConfig(live, method_names(_names(methods)), rounds)
    wanted.check()
    _run(wanted, _sets(prompts, _names(sets), limit), config, api_key, json_file)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sets(file: Path | None, names: tuple[str, ...], limit: int) -> Sets:
    from paceline.bench import prompt_sets
    from paceline.bench.methods import sets_of
    from paceline.bench.prompts import load_prompts

    if file is not None:
        prompts = load_prompts(file)
    else:
        prompts = [prompt for name in prompt_sets.SETS for prompt in prompt_sets.prompt_set(name)]
    return {name: some[: limit or None] for name, some in sets_of(prompts, names).items()}


def _run(
    wanted: MethodsConfig, sets: Sets, file: Path | None, api_key: str, json_file: Path | None
) -> None:
    """Exit code 1 when the texts of some method differ from those without speculation."""
    import asyncio
    import json
    from dataclasses import replace

    from paceline.bench.methods import run_methods
    from paceline.cli.bench_live import write
    from paceline.cli.console import status_display

    if json_file is not None:
        write(json_file, b"", "ab")  # what cannot be written fails now, not after the run
    with _service(wanted.live.url, file) as url, status_display() as status:
        wanted = replace(wanted, live=replace(wanted.live, url=url))
        result = asyncio.run(run_methods(wanted, sets, api_key, status))
        status("")
    if json_file is not None:
        write(json_file, (json.dumps(result, indent=1) + "\n").encode())
    show(result)
    if any(row["texts"]["equal"] < row["texts"]["compared"] for row in result["rows"]):
        raise typer.Exit(1)


@contextmanager
def _service(url: str, file: Path | None) -> Iterator[str]:
    if file is None:
        yield url
        return
    from paceline.cli.serve import started

    with started(file, None, 0) as (own, _):
        yield own


def show(result: Mapping[str, Any]) -> None:
    """length: tokens a pass. Words of the service neither style nor steer the terminal."""
    from rich.table import Table
    from rich.text import Text

    from paceline.cli.console import print_rows, print_told, told
    from paceline.cli.values import word

    config = result["config"]
    table = Table(
        title=Text(
            f"{told(result['model'])}, medians of {config['rounds']} rounds, "
            f"{config['live']['concurrency']} at a time"
        ),
        title_justify="left",
    )
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if column > 1 else "left")
    for row in result["rows"]:
        table.add_row(*(Text(word(cell)) for cell in _cells(row)))
    print_rows(table)
    for method, sentence in result["refused"].items():
        print_told(f"{method} was refused: {sentence}")
    for row in result["rows"]:
        for sentence in row["example_errors"].values():
            print_told(f"{row['set']}, {row['method']}: {sentence}")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    ratio, texts = row["ratio"], row["texts"]
    speed = row["tokens_per_s"]["median"]
    num_different = texts["compared"] - texts["equal"]
    return (
        row["set"],
        row["method"],
        _figure(speed, "{:.1f}"),
        *(_figure(ratio[name], "{:.3f}") for name in ("median", "min", "max")),
        _figure(row["mean_acceptance_length"], "{:.2f}"),
        _figure(row["acceptance_rate"], "{:.2f}"),
        f"{num_different} of {texts['compared']} differ" if num_different else "equal",
    )


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
