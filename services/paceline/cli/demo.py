"""`paceline demo`: one prompt with speculation in color, then the same without it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.text import Text

from paceline.cli import demo_view
from paceline.cli.console import err, out, told
from paceline.cli.demo_stream import (
    REQUEST_TIMEOUT_S,
    Answer,
    DemoRequest,
    Piece,
    is_refused,
    model_name,
    stream_chat,
)
from paceline.errors import ConfigError, PacelineError
from paceline.methods import LOCAL_SOURCES

WITH_DRAFT: dict[str, Any] = {"include_rounds": True}
WITHOUT_DRAFT: dict[str, Any] = {"method": "off"}
WARM_UP_TOKENS = 8
SLOWER = (
    "The small draft guesses this text badly, and here it shares cores and memory bandwidth with "
    "its target: drafting cost more than it saved. Text that repeats itself fares better:\n"
    "  --prompt 'Write a short Python function that reverses a list, then explain it.'"
)
DRAFT_WAIT_S = 60.0


def on_this_machine(
    config: Path, port: int, request: DemoRequest, max_rows: int, api_key: str = ""
) -> bool:
    """Start the service, run the demo, stop the service. True when both texts are identical."""
    from paceline.cli import servefile
    from paceline.cli.serve import started

    _check(request)
    if not config.is_file():
        raise ConfigError(f"{config} is not there; name a Serve YAML with --config")
    offer = servefile.load(config).pools[0].offer
    if request.method and (reason := offer.why_not(request.method)):
        raise ConfigError(f"--method cannot be {request.method} with {config}: {reason}")
    with started(config, None, port) as (url, _):
        return at(url, request, max_rows, api_key, offer.has_drafts)


def at(
    url: str,
    request: DemoRequest,
    max_rows: int,
    api_key: str = "",
    has_drafts: bool | None = None,
) -> bool:
    """Run the demo against a running service. True when both texts are identical.

    `has_drafts`: proposals may come from a draft replica, which is waited for. None: the service
    is asked.
    """
    _check(request)
    try:
        with client(url, api_key) as http:
            return _run(http, request, max_rows, has_drafts)
    except httpx.HTTPError as error:
        raise PacelineError(f"no answer from {url}: {error}") from error


def client(url: str, api_key: str, timeout_s: float = REQUEST_TIMEOUT_S) -> httpx.Client:
    """Raises ConfigError for a key that is no header, without showing it, and PacelineError for
    what is no URL."""
    key = api_key.strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError("PACELINE_API_KEY is no API key: it has characters that no key has")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=timeout_s)
    except httpx.InvalidURL as error:
        raise PacelineError(f"no answer from {url}: {error}") from error


def _check(request: DemoRequest) -> None:
    if request.method == "off":
        raise ConfigError("the demo compares with no speculation: --method off leaves nothing")


def _run(http: httpx.Client, request: DemoRequest, max_rows: int, has_drafts: bool | None) -> bool:
    try:
        model = model_name(http)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise PacelineError(f"{http.base_url} names no model: is it the service?") from error
    with_draft = WITH_DRAFT | ({} if request.method is None else {"method": request.method})
    _warm_up(http, model, request, with_draft, has_drafts)
    out.print(demo_view.legend())
    out.print(Text.assemble("\n", (told(model), "bold"), ", the same prompt twice."))
    out.print(f"> {request.prompt}\n", style="bold", markup=False)
    drafted = _ask(http, model, request, with_draft)
    out.print(demo_view.rounds_table(drafted.rounds, max_rows))
    out.print("\nAgain, without speculation:\n")
    alone = _ask(http, model, request, WITHOUT_DRAFT)
    out.print(demo_view.summary_table(drafted, alone))
    if drafted.tokens_per_s < alone.tokens_per_s and drafted.sources.keys() <= {"model"}:
        out.print(SLOWER)
    if drafted.text == alone.text:
        return True
    out.print("[bold red]The two texts differ: this must never happen. Please report it.[/]")
    return False


def _ask(
    http: httpx.Client, model: str, request: DemoRequest, speculation: dict[str, Any]
) -> Answer:
    answer = stream_chat(
        http, request.body(model, speculation), lambda piece: demo_view.show_piece(out, piece)
    )
    out.print("\n")
    return answer


def _warm_up(
    http: httpx.Client,
    model: str,
    request: DemoRequest,
    with_draft: dict[str, Any],
    has_drafts: bool | None,
) -> None:
    """Short requests until a draft takes part, so that the first pass's costs are not measured."""
    short = replace(request, max_tokens=WARM_UP_TOKENS)
    stream_chat(http, short.body(model, WITHOUT_DRAFT), _ignore)
    if has_drafts is None and request.method not in LOCAL_SOURCES:
        has_drafts = not is_refused(http, short.body(model, {"method": "model"}))
    if not has_drafts or request.method in LOCAL_SOURCES:
        stream_chat(http, short.body(model, with_draft), _ignore)
        return
    deadline = time.monotonic() + DRAFT_WAIT_S
    while time.monotonic() < deadline:
        if stream_chat(http, short.body(model, with_draft), _ignore).num_proposed:
            return
    err.print("no draft has joined: both answers come from the target alone")


def _ignore(piece: Piece) -> None:
    """Warm-up text is not shown."""
