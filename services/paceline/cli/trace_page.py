"""A traced request as one HTML file that asks for nothing: the timeline, the rounds, their times.

Everything is in the markup, also without scripts; the script only chooses rounds and grows the
timeline. Knows no file and no span. What comes from a trace is escaped where it is written.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from paceline.cli.trace_bars import step
from paceline.cli.trace_lanes import Lane, lanes_of
from paceline.cli.trace_model import NS_PER_MS, STAGES, Request, Round
from paceline.cli.values import NOTHING, fixed, percent, word
from paceline.round_times import segments

STATIC = Path(__file__).with_name("static")
MAX_PAGE_ROUNDS = 1_000
MAX_PAGE_MARKS = 24  # tokens of a round that have a mark each
ROUND_REM = 6  # how wide a round is at first, on average
NUM_TICKS = 12
LEFT = ' class="left"'
_SIGNS = {"accepted": "●", "rejected": "○"}
_CLASSES = {"rejected": "recovered"}
MEANINGS = {
    "wire_back": "the verdict on its way to the draft",
    "rewind": "until the draft goes on behind the verdict",
    "draft": "computing the proposals",
    "wire_out": "the proposals on their way",
    "window": "waiting for proposals",
    "queue": "waiting for a pass",
    "verify": "the target's pass",
    "sample": "from its logits to the tokens",
}


def page(request: Request, rounds: Sequence[Round]) -> str:
    """`rounds`: those to show, in order; more than fit one page are left out and counted."""
    shown = rounds[:MAX_PAGE_ROUNDS]
    style, script = (_read(name) for name in ("trace.css", "trace.js"))
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; script-src '{_hash(script)}'"
    )
    title = f"{request.model or 'trace'} {request.trace_id[:8]}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="content-security-policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
            f"<title>{_text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            *_header(request),
            '<main class="page">',
            *_notes(request, len(rounds) - len(shown)),
            *_figures(request),
            *_shares(shown),
            *_timeline(request, shown),
            *_table(shown, len(request.choices) > 1),
            "</main>",
            f'<script type="application/json" id="data">{_data(request, shown)}</script>',
            f'<script type="module">{script}</script>\n</body>\n</html>\n',
        ]
    )


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _text(value: object) -> str:
    return escape(word(value))


def _header(request: Request) -> Iterator[str]:
    name = request.span.name if request.span.is_server else request.model
    yield f'<header><div class="page"><h1>{_text(name or "request")}</h1>'
    parts = [f"trace <code>{_text(request.trace_id)}</code>"]
    if request_id := request.attribute("paceline.request_id"):
        parts.append(f"request <code>{_text(request_id)}</code>")
    for name, attribute in (
        ("mode", "paceline.mode"),
        ("finished by", "gen_ai.response.finish_reasons"),
    ):
        if value := request.attribute(attribute):
            parts.append(f"{name} {_text(value)}")
    yield f"<p>{', '.join(parts)}</p></div></header>"


def _notes(request: Request, num_hidden: int) -> Iterator[str]:
    if request.failure:
        yield f'<p class="failed">The request did not end well: {_text(request.failure)}.</p>'
    notes = [*request.problems]
    if num_hidden:
        notes.append(f"{num_hidden} more rounds are not on this page: --rounds N..M shows them")
    if notes:
        yield f'<div class="notes">{"".join(f"<p>{_text(note)}</p>" for note in notes)}</div>'


def _figures(request: Request) -> Iterator[str]:
    figures = [
        ("Request", f"{request.ms:.1f} ms"),
        ("First tokens", f"{fixed(request.first_chunk_ms, 1)} ms"),
        ("Tokens", str(request.num_tokens)),
        ("Rounds", str(len(request.rounds))),
        ("Tokens/round", fixed(request.num_tokens_per_round, 2)),
        ("Accepted", f"{request.accepted} of {request.proposed}"),
        ("Acceptance", percent(request.acceptance_rate)),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    yield f'<section class="panel" aria-label="Figures"><dl class="figures">{cells}</dl></section>'


def _shares(rounds: Sequence[Round]) -> Iterator[str]:
    if not rounds:
        return
    wall = sum(item.wall_ms for item in rounds) or 1.0
    totals = {stage: sum(item.ms(stage) for item in rounds) for stage in STAGES}
    yield '<section class="panel" aria-labelledby="shares-title">'
    yield '<h2 id="shares-title">Where the time of the rounds went</h2>'
    parts = "".join(
        f'<i class="{stage.span_name}" style="width:{100 * total / wall:.3f}%"></i>'
        for stage, total in totals.items()
    )
    yield f'<div class="bar share" aria-hidden="true">{parts}</div><ul class="legend">'
    for stage, total in totals.items():
        name = stage.span_name
        yield (
            f'<li title="{MEANINGS[name]}"><i class="swatch {name}"></i>{name} '
            f"<b>{total:.1f} ms</b> {percent(total / wall)}</li>"
        )
    yield "</ul></section>"


def _timeline(request: Request, rounds: Sequence[Round]) -> Iterator[str]:
    if not rounds:
        yield '<p class="panel">No file has a round of it.</p>'
        return
    is_whole = len(rounds) == len(request.rounds)
    begins = min(item.began_ns for item in rounds)
    ends = max(item.ended_ns for item in rounds)
    if is_whole:
        begins, ends = min(begins, request.began_ns), max(ends, request.ended_ns)
    frame = _Frame(begins, max(1, ends - begins), request.began_ns)
    yield '<section class="panel" aria-labelledby="timeline-title">'
    yield '<div class="heading"><h2 id="timeline-title">Timeline</h2>'
    yield '<div class="zoom" id="zoom" hidden>'
    yield '<button id="farther" type="button" aria-label="Zoom out">&minus;</button>'
    yield '<button id="closer" type="button" aria-label="Zoom in">+</button>'
    yield '<button id="fit" type="button">Fit</button></div></div>'
    yield from _signs()
    yield from _lanes(frame, request, rounds)
    yield '<p class="hint">Arrow keys go from round to round, + and - change the scale.</p>'
    yield '<div class="detail" id="detail" aria-live="polite"></div></section>'


def _lanes(frame: _Frame, request: Request, rounds: Sequence[Round]) -> Iterator[str]:
    """Names at the left, which stay; the rounds of a choice are above its lanes."""
    choices = sorted({item.choice for item in rounds})
    is_several = len(choices) > 1
    lanes = lanes_of(request, rounds)
    names: list[str] = []
    rows: list[str] = []
    for choice in (None, *choices):
        if choice is not None:
            names.append(f'<div class="of-rounds">{f"choice {choice}" if is_several else "rounds"}')
            rows += _buttons(frame, rounds, choice)
        for lane in (lane for lane in lanes if lane.choice == choice):
            names.append(f'<div class="name" style="--rows:{lane.num_rows}">{lane.name}')
            rows += _lane(frame, lane)
    yield f'<div class="timeline"><div class="labels"><div>ms</div>{"</div>".join([*names, ""])}'
    yield '</div><div class="scroll" tabindex="0" role="region" aria-label="Timeline">'
    yield (
        f'<div class="canvas" data-from="{frame.begins_ms:.6f}" data-span="{frame.span_ms:.6f}" '
        f'style="width:{ROUND_REM * len(rounds) / len(choices):.1f}rem">'
    )
    for index, item in enumerate(rounds):
        kind = "band odd" if index % 2 and not is_several else "band"
        yield f'<div class="{kind}" style="{frame.place(item.began_ns, item.ended_ns)}"></div>'
    yield f'<div class="ticks" aria-hidden="true">{"".join(frame.ticks())}</div>'
    yield from rows
    yield "</div></div></div>"


class _Frame:
    """Places on the timeline, in percent of its width. Its times count from the request's begin."""

    def __init__(self, began_ns: int, span_ns: int, zero_ns: int) -> None:
        self._began_ns = began_ns
        self._span_ns = span_ns
        self.begins_ms = (began_ns - zero_ns) / NS_PER_MS
        self.span_ms = span_ns / NS_PER_MS

    def place(self, began_ns: int, ended_ns: int) -> str:
        left = min(max(0.0, (began_ns - self._began_ns) / self._span_ns), 1.0)
        right = min(max(left, (ended_ns - self._began_ns) / self._span_ns), 1.0)
        return f"left:{100 * left:.4f}%;width:{100 * (right - left):.4f}%"

    def ticks(self) -> Iterator[str]:
        """For who runs no script."""
        each = step(self.span_ms / NUM_TICKS)
        tick = math.ceil(self.begins_ms / each)
        while (at := tick * each) < self.begins_ms + self.span_ms:
            left = 100 * (at - self.begins_ms) / self.span_ms
            yield f'<span style="left:{left:.4f}%">{at:g} ms</span>'
            tick += 1


def _signs() -> Iterator[str]:
    signs = (
        ("●", "accepted", "accepted"),
        ("○", "recovered", "rejected"),
        ("◆", "recovered", "recovered: the target's, for a rejected one"),
        ("◆", "bonus", "bonus: the target's, after a whole accepted block"),
        ("◆", "", "plain: the target's, with no proposal"),
    )
    items = (f'<li><span class="{kind}">{sign}</span> {what}</li>' for sign, kind, what in signs)
    yield f'<ul class="legend">{"".join(items)}</ul>'


def _buttons(frame: _Frame, rounds: Sequence[Round], choice: int) -> Iterator[str]:
    is_several = any(item.choice != choice for item in rounds)
    yield f'<div class="rounds" role="group" aria-label="Rounds of choice {choice}">'
    for index, item in enumerate(rounds):
        if item.choice != choice:
            continue
        label = f"{_title(item, is_several)}, {item.accepted} of {item.proposed} accepted"
        yield (
            f'<button type="button" class="round" tabindex="{0 if index == 0 else -1}" '
            f'data-index="{index}" style="{frame.place(item.began_ns, item.ended_ns)}" '
            f'aria-label="{label}"><span>{item.number}</span>'
            f'<span class="marks">{_marks(item)}</span></button>'
        )
    yield "</div>"


def _lane(frame: _Frame, lane: Lane) -> Iterator[str]:
    yield f'<div class="lane" style="--rows:{lane.num_rows}">'
    for block in lane.blocks:
        kind = f"part {block.kind}{' reconstructed' if block.is_reconstructed else ''}"
        whose = "" if block.round_index is None else f' data-index="{block.round_index}"'
        place = frame.place(block.began_ns, block.ended_ns)
        row = f";--row:{block.row}" if block.row else ""
        said = f"{block.kind} {(block.ended_ns - block.began_ns) / NS_PER_MS:.2f} ms"
        yield f'<i class="{kind}"{whose} style="{place}{row}" title="{said}"></i>'
    yield "</div>"


def _title(item: Round, is_several: bool) -> str:
    whose = f" of choice {item.choice}" if is_several else ""
    return f"Round {item.number}{whose}, {item.wall_ms:.1f} ms"


def _marks(item: Round) -> str:
    found = item.tokens(MAX_PAGE_MARKS + 1)
    marks = "".join(
        f'<span class="{_CLASSES.get(kind, kind)}">{_SIGNS.get(kind, "◆")}</span>'
        for kind in found[:MAX_PAGE_MARKS]
    )
    return marks + ("…" if len(found) > MAX_PAGE_MARKS else "")


def _table(rounds: Sequence[Round], is_several: bool) -> Iterator[str]:
    if not rounds:
        return
    longest = max(item.wall_ms for item in rounds) or 1.0
    yield '<section class="panel" aria-labelledby="rounds-title">'
    yield '<h2 id="rounds-title">Rounds, in milliseconds</h2>'
    yield '<div class="table" tabindex="0" role="region" aria-label="Table of rounds"><table>'
    choice = ["Choice"] if is_several else []
    has_sources = any(item.source for item in rounds)
    headings = [
        *choice,
        *(["Source"] if has_sources else []),
        "K",
        "Accepted",
        "Tokens",
        "Time",
        "Wall",
    ]
    cells = "".join(
        f'<th scope="col"{_side(name)}>{name.replace("_", " ")}</th>'
        for name in ("Round", *headings, *(stage.span_name for stage in STAGES))
    )
    yield f"<thead><tr>{cells}</tr></thead><tbody>"
    for item in rounds:
        whose = f"<td>{item.choice}</td>" if is_several else ""
        source = f'<td class="left">{_text(item.source or NOTHING)}</td>' if has_sources else ""
        times = "".join(f"<td>{item.ms(stage):.2f}</td>" for stage in STAGES)
        yield (
            f'<tr><td><button type="button">{item.number}</button></td>{whose}{source}'
            f"<td>{item.num_speculative_tokens}</td><td>{item.accepted} of {item.proposed}</td>"
            f'<td class="left marks">{_marks(item)}</td>'
            f'<td class="bars">{_bar(item, longest)}</td><td>{item.wall_ms:.2f}</td>{times}</tr>'
        )
    yield "</tbody></table></div></section>"


def _side(name: str) -> str:
    return {"Time": ' class="bars left"', "Tokens": LEFT, "Source": LEFT}.get(name, "")


def _bar(item: Round, longest_ms: float) -> str:
    """The round's moments in their order."""
    parts = "".join(
        f'<i class="{stage.span_name}" '
        f'style="width:{100 * (ends - begins) / NS_PER_MS / longest_ms:.3f}%"></i>'
        for stage, begins, ends in segments(item.began_ns, item.ended_ns, item.intervals)
    )
    said = ", ".join(f"{stage.span_name} {item.ms(stage):.1f} ms" for stage in STAGES)
    return f'<div class="bar" role="img" aria-label="{said}">{parts}</div>'


def _data(request: Request, rounds: Iterable[Round]) -> str:
    """JSON that no text in it can end: < is written by its number."""
    is_several = len(request.choices) > 1
    found = [
        {"title": _title(item, is_several), "facts": list(_facts(request, item))} for item in rounds
    ]
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


_ATTRIBUTES = {
    "paceline.num_tokens": "tokens",
    "paceline.k": "K",
    "paceline.source": "source",
    "paceline.batch_size": "batch",
    "paceline.num_rows": "rows of the pass",
    "paceline.limit_position": "limit",
    "paceline.epoch": "epoch",
    "paceline.replica_id": "target",
    "paceline.draft_replica_id": "draft",
}


def _facts(request: Request, item: Round) -> Iterator[tuple[str, str]]:
    for stage in STAGES:
        yield stage.span_name.replace("_", " "), f"{item.ms(stage):.3f} ms"
    yield "begin", f"{(item.began_ns - request.began_ns) / NS_PER_MS:.3f} ms"
    yield "accepted", f"{item.accepted} of {item.proposed}"
    if item.span.attributes.get("paceline.aborted") is True:
        yield "aborted", "yes"
    for name, shown in _ATTRIBUTES.items():
        if value := item.span.text(name):
            yield shown, word(value).rpartition("#")[2]
