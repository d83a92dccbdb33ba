"""The page of a trace: one file, everything in the markup, nothing that a trace says runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from paceline.cli import trace_page
from paceline.cli.trace_builder import request_of
from paceline.cli.trace_model import STAGES, Request
from paceline.cli.trace_page import MAX_PAGE_MARKS, STATIC, page
from paceline.cli.trace_spans import spans_of
from tests.unit.cli.trace_lines import CLIENT_SPAN, TRACE_ID, Made, make_trace

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x1b"
VOID = {"meta", "link"}


class Parsed(HTMLParser):
    """Elements with their attributes and their text; every one must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.elements[index][2].append(data)

    def of(self, kind: str, tag: str = "") -> list[tuple[dict[str, str | None], str]]:
        """Those of a class; in order."""
        return [
            (attributes, "".join(text))
            for name, attributes, text in self.elements
            if kind in (attributes.get("class") or "").split() and tag in ("", name)
        ]

    def tags(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.elements
                if name == tag]  # fmt: skip


def request(made: Made) -> Request:
    found = request_of([span for _, line in made.lines() for span in spans_of(line.encode())[0]])
    assert found is not None
    return found


def parsed(made: Made) -> tuple[Request, Parsed]:
    wanted = request(made)
    return wanted, Parsed(page(wanted, wanted.rounds))


def facts(found: Parsed) -> list[dict[str, Any]]:
    [(_, text)] = [item for item in found.tags("script") if item[0].get("id") == "data"]
    data: list[dict[str, Any]] = json.loads(text)
    return data


def place(attributes: dict[str, str | None]) -> tuple[float, float]:
    """Left and width, percent."""
    left, width = re.findall(r"(?:left|width):([0-9.]+)%", attributes["style"] or "")
    return float(left), float(width)


def test_it_asks_for_nothing() -> None:
    _, found = parsed(make_trace())
    for _, attributes, _ in found.elements:
        assert attributes.get("src") is None
        assert (attributes.get("href") or "data:,") == "data:,"
    text = "".join((STATIC / name).read_text() for name in ("trace.css", "trace.js"))
    for word in ("http", "fetch(", "import ", "@import", "url(", "XMLHttp", "innerHTML", "eval"):
        assert word not in text
    [policy] = [a["content"] for a, _ in found.tags("meta") if a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'sha256-" in policy


def test_every_round_is_in_the_timeline_the_table_and_the_details() -> None:
    wanted, found = parsed(make_trace())
    buttons = found.of("round")
    assert [int(a["data-index"] or "") for a, _ in buttons] == list(range(12))
    rows = found.tags("tr")[1:]
    for item, (attributes, label), (_, row), data in zip(
        wanted.rounds, buttons, rows, facts(found), strict=True
    ):
        marks = "●" * item.accepted + "○" * (item.proposed - item.accepted) + "◆"
        assert label == f"{item.number}{marks}"
        left, width = place(attributes)
        assert left == pytest.approx(
            100 * (item.began_ns - wanted.began_ns) / 1e6 / wanted.ms, abs=1e-3
        )
        assert width == pytest.approx(100 * item.wall_ms / wanted.ms, abs=1e-3)
        numbers = "".join(f"{item.ms(stage):.2f}" for stage in STAGES)
        assert row == (
            f"{item.number}4{item.accepted} of {item.proposed}{marks}{item.wall_ms:.2f}{numbers}"
        )
        assert data["title"] == f"Round {item.number}, {item.wall_ms:.1f} ms"
        assert ["verify", f"{item.ms(STAGES[6]):.3f} ms"] in data["facts"]
        assert ["target", "a1b2c3"] in data["facts"]


def test_the_source_of_proposals_has_a_column_where_there_are_any() -> None:
    wanted, found = parsed(make_trace(source="<suffix>"))
    assert "Source" in found.tags("thead")[0][1]
    for item, (_, row) in zip(wanted.rounds, found.tags("tr")[1:], strict=True):
        source = "<suffix>" if item.proposed else "-"
        assert row.startswith(f"{item.number}{source}4{item.accepted} of")
    assert "Source" not in parsed(make_trace())[1].tags("thead")[0][1]


def test_a_lane_for_each_process_with_its_spans() -> None:
    made = make_trace(num_rounds=6)
    wanted, found = parsed(made)
    names = [text for _, text in found.of("name")]
    assert names == ["gateway", "target", "wire", "draft"]
    for stage in STAGES:
        name = stage.span_name
        blocks = [a for a, _ in found.of(name, "i") if "part" in (a["class"] or "").split()]
        spans = made.named(name)
        # Round 1's way from the gateway to the target is queue, too.
        assert len(blocks) == len(spans) + (name == "queue")
        for attributes in blocks:
            left, width = place(attributes)
            assert 0 <= left <= left + width <= 100.001
    assert wanted.rounds


def test_each_choice_has_its_rounds_and_lanes() -> None:
    wanted, found = parsed(make_trace(num_rounds=3, num_choices=2))
    [labels] = found.of("labels")
    assert labels[1].strip() == "msgatewaychoice 0targetwiredraftchoice 1targetwiredraft"
    indices = [int(a["data-index"] or "") for a, _ in found.of("round")]
    assert sorted(indices) == list(range(6))
    assert [wanted.rounds[index].choice for index in indices] == [0, 0, 0, 1, 1, 1]
    assert facts(found)[0]["title"].startswith("Round 1 of choice ")


def test_nothing_of_a_trace_becomes_markup() -> None:
    made = make_trace(num_rounds=2, model=EVIL)
    gateway = made.spans["paceline-gateway"][0]
    for attribute in gateway["attributes"]:
        attribute["value"] = {"stringValue": EVIL}
    for span in made.spans["paceline-target"]:
        for attribute in span["attributes"]:
            if "stringValue" in attribute["value"]:
                attribute["value"] = {"stringValue": EVIL}
    text = page(request(made), request(made).rounds)
    found = Parsed(text)
    assert [attributes.get("type") for attributes, _ in found.tags("script")] == [
        "application/json", "module",
    ]  # fmt: skip
    assert found.tags("img") == []
    assert "\x1b" not in text
    assert found.tags("h1")[0][1] == f"chat {EVIL[:-1]}\ufffd"
    assert ["target", f"{EVIL[:-1]}\ufffd"] in facts(found)[0]["facts"]


def test_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_page, "MAX_PAGE_ROUNDS", 5)
    wanted, found = parsed(make_trace(num_rounds=8))
    assert len(found.of("round")) == len(facts(found)) == 5
    [(_, notes)] = found.of("notes")
    assert notes == "3 more rounds are not on this page: --rounds N..M shows them"
    assert len(wanted.rounds) == 8


def test_marks_are_bounded() -> None:
    made = Made()
    gateway = made.span("gateway", "chat toy", CLIENT_SPAN, 0, 40, kind=2)
    session = made.span("target", "session", gateway, 0, 40)
    made.span("target", "round", session, 0, 40, paceline__round=1, paceline__proposed=2**60,
              paceline__accepted=2**60)  # fmt: skip
    _, found = parsed(made)
    assert found.of("round")[0][1] == "1" + "●" * MAX_PAGE_MARKS + "…"


def test_a_part_of_the_rounds_fills_the_timeline() -> None:
    wanted = request(make_trace())
    found = Parsed(page(wanted, wanted.rounds[3:5]))
    spots = [place(attributes) for attributes, _ in found.of("round")]
    assert spots[0][0] == 0
    assert sum(spots[1]) == pytest.approx(100, abs=1e-3)
    [(canvas, _)] = found.of("canvas")
    begin = (wanted.rounds[3].began_ns - wanted.began_ns) / 1e6
    assert float(canvas["data-from"] or "") == pytest.approx(begin, abs=1e-5)


def test_what_is_wrong_with_the_trace_is_on_the_page() -> None:
    made = make_trace(num_rounds=2)
    made.spans["paceline-gateway"][0]["status"] = {"code": 2}
    made.spans["paceline-target"] = [
        span for span in made.spans["paceline-target"] if span["name"] != "session"
    ]
    _, found = parsed(made)
    assert found.of("failed")[0][1] == "The request did not end well: failed."
    assert "no file has a session of the request" in found.of("notes")[0][1]


def test_a_request_without_rounds() -> None:
    made = make_trace(num_rounds=2)
    del made.spans["paceline-target"], made.spans["paceline-draft"]
    _, found = parsed(made)
    assert facts(found) == []
    assert "No file has a round of it." in [text for _, text in found.tags("p")]


def test_drafts_that_the_target_tells_of_are_marked() -> None:
    made = make_trace(num_rounds=3)
    for span in made.spans["paceline-draft"]:
        span["attributes"].append({"key": "paceline.reconstructed", "value": {"boolValue": True}})
    _, found = parsed(made)
    assert len(found.of("reconstructed")) == len(made.spans["paceline-draft"])


def test_ids_are_whole() -> None:
    _, found = parsed(make_trace())
    assert TRACE_ID in [text for _, text in found.tags("code")]
