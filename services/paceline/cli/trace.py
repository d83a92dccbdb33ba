"""`paceline trace`: where the time of one request went, from the files that traces are written to.

Reading is `trace_files`', the request `trace_builder`'s; `trace_view` and `trace_page` draw it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import err, out
from paceline.cli.values import json_line, word
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.cli.trace_files import Reading
    from paceline.cli.trace_model import Request, Round

TRACE_ID = re.compile(r"[0-9a-f]{32}")
ROUNDS = re.compile(r"(?P<first>[0-9]{0,9})\.\.(?P<last>[0-9]{0,9})", re.ASCII)

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE]...", help="OTLP/JSON lines, one file per process."),
]
Folder = Annotated[
    Path | None,
    typer.Option("--dir", help="The folder of such files; default: traces in the cache folder."),
]
Last = Annotated[bool, typer.Option("--last", help="The request that ended last; the default.")]
TraceId = Annotated[str, typer.Option(help="This trace; X-Paceline-Trace-Id of an answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a picture.")]
Html = Annotated[Path | None, typer.Option(metavar="OUT", help="Write a page to this file.")]
Rounds = Annotated[str, typer.Option(metavar="N..M", help="Only these; one end may be left out.")]


def trace(
    files: Files = None,
    folder: Folder = None,
    last: Last = False,
    trace_id: TraceId = "",
    as_json: AsJson = False,
    html: Html = None,
    rounds: Rounds = "",
) -> None:
    """Show where the time of a traced request went, round by round: draft, wire and target.

    \b
    Examples:
      paceline trace
      paceline trace --last --html request.html
      paceline trace --trace-id 4bf92f3577b34da6a3ce929d0e0e4736
      paceline trace *.jsonl --json
    """
    from paceline.cli.trace_builder import request_of
    from paceline.cli.trace_model import request_json

    first, final = _range(rounds)
    reading, place = _read(files or [], folder, last, trace_id)
    request = request_of(reading.spans)
    for problem in [*reading.problems, *(request.problems if request else ())]:
        err.print(word(problem), markup=False)
    if request is None:
        raise PacelineError(word(_nothing(place, trace_id)))
    chosen = [
        item
        for item in request.rounds
        if first <= item.number and (final is None or item.number <= final)
    ]
    if rounds and not chosen:
        raise PacelineError(f"the request has no round {rounds}, only {_numbers(request)}")
    if html is not None:
        _write_page(html, request, chosen)
    if as_json:
        out.print(json_line(request_json(request, chosen)), markup=False)
    elif html is None:
        from paceline.cli.trace_view import show_request

        show_request(out, request, chosen)


def _range(rounds: str) -> tuple[int, int | None]:
    """The first and the last round to show; None: to the end."""
    if rounds.isascii() and rounds.isdigit() and len(rounds) < 10:
        return int(rounds), int(rounds)
    found = ROUNDS.fullmatch(rounds)
    if rounds and (not found or rounds == ".."):
        raise typer.BadParameter("rounds are N..M, N.., ..M or N", param_hint="--rounds")
    first, last = (found["first"], found["last"]) if found else ("", "")
    return int(first or 0), int(last) if last else None


def _read(
    files: Sequence[Path], folder: Path | None, last: bool, trace_id: str
) -> tuple[Reading, str]:
    """What was read, and the place for a sentence."""
    from paceline.cli.trace_files import files_in, read_last, read_trace, traces_dir

    if files and folder is not None:
        raise typer.BadParameter("name files or a folder, not both", param_hint="--dir")
    if last and trace_id:
        raise typer.BadParameter("--last is another trace's name", param_hint="--trace-id")
    wanted = trace_id.lower()
    if trace_id and not TRACE_ID.fullmatch(wanted):
        raise typer.BadParameter("a trace id has 32 hexadecimal digits", param_hint="--trace-id")
    found = list(files) or files_in(folder or traces_dir())
    place = ", ".join(map(str, files)) or str(folder or traces_dir())
    return (read_trace(found, wanted) if wanted else read_last(found)), place


def _numbers(request: Request) -> str:
    numbers = [item.number for item in request.rounds]
    return f"{min(numbers)}..{max(numbers)}" if numbers else "none at all"


def _nothing(place: str, trace_id: str) -> str:
    from paceline.cli.trace_files import traces_dir

    if trace_id:
        return f"no request of trace {trace_id.lower()} in {place}"
    return (
        f"no traced request in {place}; to write some, the args of the Serve YAML need "
        f"tracing: {{sample_ratio: 1.0, file_dir: {traces_dir()}}}"
    )


def _write_page(path: Path, request: Request, rounds: Sequence[Round]) -> None:
    from paceline.cli.trace_page import page

    try:
        path.write_text(page(request, rounds), encoding="utf-8")
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {error.strerror}") from None
    err.print(f"wrote {path}", markup=False)
