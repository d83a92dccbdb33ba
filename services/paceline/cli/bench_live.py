"""`paceline bench live`: its options, and the files it writes. The load itself is bench/live.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.errors import ConfigError
from paceline.methods import SpeculationMethod

if TYPE_CHECKING:
    from paceline.bench.live import LiveConfig

_LOAD, _ASKED = "Load", "What is asked"
_SPECULATION, _REPORT = "Speculation", "Report"

Url = Annotated[str, typer.Option(help="The service, as in http://127.0.0.1:8000.")]
Prompts = Annotated[
    Path, typer.Option(help="JSON lines with 'messages' or 'prompt', or a plain text a line.")
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        help="Closed loop: so many requests always in flight; default 1.",
        rich_help_panel=_LOAD,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Open loop: requests a second, whatever the service does; latency counts from"
        " when a request was due.",
        rich_help_panel=_LOAD,
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(help="Of the open loop: 1 is Poisson, less is burstier.", rich_help_panel=_LOAD),
]
MaxInFlight = Annotated[
    int,
    typer.Option(
        help="Of the open loop; a request due beyond it is skipped and counted.",
        rich_help_panel=_LOAD,
    ),
]
NumRequests = Annotated[int, typer.Option(help="0: every prompt once.", rich_help_panel=_LOAD)]
Duration = Annotated[
    float | None,
    typer.Option(help="Seconds in which requests begin.", rich_help_panel=_LOAD),
]
Warmup = Annotated[
    int, typer.Option(min=0, help="Requests before, not measured.", rich_help_panel=_LOAD)
]
Timeout = Annotated[
    float, typer.Option(min=0.001, help="Seconds for one request.", rich_help_panel=_LOAD)
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer.", rich_help_panel=_ASKED)]
Temperature = Annotated[
    float, typer.Option(min=0, max=2, help="0 is greedy.", rich_help_panel=_ASKED)
]
Seed = Annotated[
    int,
    typer.Option(min=0, help="Of the first request, and of arrivals.", rich_help_panel=_ASKED),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Always max-tokens long.", rich_help_panel=_ASKED),
]
Body = Annotated[
    str,
    typer.Option(help="More fields of each request, as JSON.", rich_help_panel=_ASKED),
]
Endpoint = Annotated[
    Literal["auto", "chat", "completions"],
    typer.Option(help="auto: as the prompt's record.", rich_help_panel=_ASKED),
]
Model = Annotated[
    str, typer.Option(help="Default: what the service names.", rich_help_panel=_ASKED)
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="PACELINE_API_KEY",
        show_default=False,
        help="Others on this machine see options, not variables.",
        rich_help_panel=_ASKED,
    ),
]
Speculation = Annotated[
    str,
    typer.Option(
        help="The request's field as JSON; the options below go into it.",
        rich_help_panel=_SPECULATION,
    ),
]
Method = Annotated[
    SpeculationMethod | None,
    typer.Option(help="Where proposals come from.", rich_help_panel=_SPECULATION),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option("--k", min=0, help="Most draft tokens in a pass.", rich_help_panel=_SPECULATION),
]
Lookahead = Annotated[
    Literal["adaptive", "fixed"] | None,
    typer.Option(help="fixed: always K.", rich_help_panel=_SPECULATION),
]
Rounds = Annotated[
    bool,
    typer.Option(
        "--rounds/--no-rounds",
        help="Ask for each round's counts; without them and any option above the body is plain"
        " OpenAI, for other servers.",
        rich_help_panel=_SPECULATION,
    ),
]
Compare = Annotated[
    Literal["off"] | None,
    typer.Option(
        help="Run the same requests without speculation, too, in turns.",
        rich_help_panel=_SPECULATION,
    ),
]
Blocks = Annotated[int, typer.Option(help="Turns of a comparison.", rich_help_panel=_SPECULATION)]
SloTtftMs = Annotated[
    float | None,
    typer.Option(help="Goodput: bound of the time to first token.", rich_help_panel=_REPORT),
]
SloItlMs = Annotated[
    float | None,
    typer.Option(
        help="Goodput: bound of a request's mean time per output token behind the first.",
        rich_help_panel=_REPORT,
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result.", rich_help_panel=_REPORT)
]
Records = Annotated[
    bool,
    typer.Option("--records", help="Each request in the JSON, too.", rich_help_panel=_REPORT),
]
Plots = Annotated[
    Path | None,
    typer.Option(help="Folder for PNG pictures (extra 'plots').", rich_help_panel=_REPORT),
]
Html = Annotated[
    Path | None,
    typer.Option(help="One self-contained page (extra 'plots').", rich_help_panel=_REPORT),
]


def bench_live(
    url: Url,
    prompts: Prompts,
    concurrency: Concurrency = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    max_in_flight: MaxInFlight = 512,
    num_requests: NumRequests = 0,
    duration: Duration = None,
    warmup: Warmup = 0,
    timeout: Timeout = 600.0,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    body: Body = "",
    endpoint: Endpoint = "auto",
    model: Model = "",
    api_key: ApiKey = "",
    speculation: Speculation = "",
    method: Method = None,
    k: NumDraftTokens = None,
    lookahead: Lookahead = None,
    rounds: Rounds = True,
    compare: Compare = None,
    blocks: Blocks = 3,
    slo_ttft_ms: SloTtftMs = None,
    slo_itl_ms: SloItlMs = None,
    json_file: JsonFile = None,
    records: Records = False,
    plots: Plots = None,
    html: Html = None,
) -> None:
    """Load a running service and report what its clients saw."""
    from paceline.bench.live import LiveConfig
    from paceline.bench.recorder import Slo

    if rate is not None and concurrency is not None:
        raise ConfigError("--rate (open loop) and --concurrency (closed loop) exclude each other")
    config = LiveConfig(
        url=url,
        concurrency=1 if concurrency is None else concurrency,
        rate=rate,
        burstiness=burstiness,
        max_in_flight=max_in_flight,
        num_requests=num_requests,
        duration_s=duration,
        num_warmup=warmup,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        extra_body=json_object("--body", body),
        endpoint=endpoint,
        model=model,
        speculation=speculation_field(speculation, method, k, lookahead),
        include_rounds=rounds,
        slo=Slo(slo_ttft_ms, slo_itl_ms),
        compare_off=compare == "off",
        blocks=blocks,
        timeout_s=timeout,
        keep_records=records,
    )
    _run(config, prompts, api_key, Files(json_file, plots, html))


@dataclass(frozen=True, slots=True)
class Files:
    """Where the result goes; None: nowhere."""

    json: Path | None
    plots: Path | None
    html: Path | None

    @property
    def has_pictures(self) -> bool:
        return self.plots is not None or self.html is not None

    def check(self) -> None:
        """What would fail after minutes of load fails before it, as a ConfigError."""
        if self.has_pictures:
            from paceline.bench import plots

            plots.check()
        for path in (self.json, self.html, self.plots and self.plots / "timeline.png"):
            if path is not None:
                write(path, b"", "ab")

    def write(self, result: Mapping[str, Any]) -> None:
        if self.json is not None:
            write(self.json, (json.dumps(result, indent=1) + "\n").encode())
        if not self.has_pictures:
            return
        from paceline.bench import plots
        from paceline.bench.page import html_page

        pictures = plots.pictures(result)
        for name, png in pictures.items():
            if self.plots is not None:
                write(self.plots / f"{name}.png", png)
        if self.html is not None:
            write(self.html, html_page(result, pictures).encode())


def write(path: Path, content: bytes, mode: Literal["ab", "wb"] = "wb") -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _run(config: LiveConfig, prompts: Path, api_key: str, files: Files) -> None:
    """Exit code 1 when no request succeeded."""
    import asyncio

    from paceline.bench.live import run_live
    from paceline.bench.prompts import load_prompts
    from paceline.cli.console import out, status_display
    from paceline.cli.live_view import show

    config.check()
    loaded = load_prompts(prompts)
    files.check()
    with status_display() as status:
        result = asyncio.run(run_live(config, loaded, api_key, status))
    files.write(result)
    show(out, result)
    if not result["summary"]["num_ok"]:
        raise typer.Exit(1)


def speculation_field(
    text: str, method: str | None, k: int | None, lookahead: str | None
) -> dict[str, Any]:
    """The request's `speculation`: options in place of what the JSON says of the same."""
    options = {"method": method, "max_tokens": k, "lookahead": lookahead}
    field = json_object("--speculation", text)
    return field | {name: value for name, value in options.items() if value is not None}


def json_object(option: str, text: str) -> dict[str, Any]:
    """What an option says; nothing is an empty object. Raises ConfigError."""
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"{option} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object")
    return value
