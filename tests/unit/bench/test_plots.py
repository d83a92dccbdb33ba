"""Pictures and the page, from results that a recorder made."""

from __future__ import annotations

import re
import struct
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from paceline.bench import page, plots
from paceline.bench.client import Ask, Outcome
from paceline.bench.events import Chunk
from paceline.bench.recorder import Recorder, Slo
from paceline.errors import ConfigError

HOSTILE = '<script>alert("x")</script>'


def report(num_ok: int = 3, error: str = "") -> dict[str, Any]:
    recorder = Recorder(Slo(500, 500))
    recorder.resume(0.0)
    for index in range(num_ok):
        recorder.begin(float(index))
        recorder.chunk(Chunk("a", 2, 3, 1, 1, [3]), index + 0.25)
        outcome = Outcome(Ask(index, "/", {}), index, index, index + 0.25, index + 0.5)
        outcome.num_tokens, outcome.end_s, outcome.gaps = 4, index + 0.6, [(0.25, 2)]
        recorder.end(outcome)
    if error:
        recorder.begin(3.0)
        recorder.end(Outcome(Ask(9, "/", {}), 3.0, 3.0, end_s=3.1, error=error, message=HOSTILE))
    recorder.pause(4.0)
    summary = recorder.summary() | {"full_tokens_per_s": None}
    return {
        "summary": summary,
        "timeline": recorder.timeline(),
        "quantiles": recorder.quantiles(),
    }


def result(is_compared: bool = False, **fields: Any) -> dict[str, Any]:
    made = {"model": HOSTILE, "config": {"url": HOSTILE}, **report(**fields)}
    if is_compared:
        made["compare"] = {
            "off": report(),
            "tokens_per_s_ratio": {"count": 3, "median": 1.25, "min": 1.1, "max": 1.3},
            "texts": {"compared": 9, "equal": 9},
        }
    return made


@pytest.mark.parametrize("is_compared", [False, True])
def test_pictures_are_png_with_something_in_them(is_compared: bool) -> None:
    pictures = plots.pictures(result(is_compared))
    assert set(pictures) == {"timeline", "latency"}
    for png in pictures.values():
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", png[16:24])
        assert width > 500
        assert height > 300


def test_the_same_result_gives_the_same_picture_and_another_does_not() -> None:
    first, again, other = (plots.pictures(result(num_ok=n))["timeline"] for n in (3, 3, 2))
    assert first == again != other


def test_a_run_in_which_everything_failed_can_be_drawn() -> None:
    pictures = plots.pictures(result(num_ok=0, error="connection"))
    assert page.html_page(result(num_ok=0, error="connection"), pictures)


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"paceline\[plots\]"):
        plots.pictures(result())
    with pytest.raises(ConfigError, match=r"paceline\[plots\]"):
        plots.check()


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_one_file_and_runs_nothing() -> None:
    shown = result(is_compared=True, error=HOSTILE)
    text = page.html_page(shown, plots.pictures(shown))
    tags = Tags(text).found
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "iframe"})
    sources = [attrs["src"] for tag, attrs in tags if tag == "img"]
    assert len(sources) == 2
    assert all(source and source.startswith("data:image/png;base64,") for source in sources)
    # Nothing but the pictures has an address, and what others wrote is text.
    assert not re.search(r"(href|url\()", text)
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text


def test_the_page_has_the_figures() -> None:
    shown = result(is_compared=True)
    text = page.html_page(shown, {})
    assert "1.250 (median of 3 pairs of blocks, 1.100-1.300); 9 of 9 texts are equal" in text
    assert "<td>acceptance rate</td><td>" in text
    assert "goodput: requests/s within the SLO" in text
    assert "<td>time to first token</td><td>250.0</td>" in text


def test_rows_of_a_single_side() -> None:
    shown = result(error="queue_full")
    rows = dict(page.overview(shown))
    assert rows["requests ok / failed"] == "3 / 1"
    assert rows["tokens/s"] == "3.0"
    assert rows["tokens/s while all clients were busy"] == "-"
    assert not any(name.startswith("skipped") for name in rows)
    assert page.errors(shown) == [("with", "queue_full", "1", HOSTILE)]
    assert page.comparison(shown) == ""
