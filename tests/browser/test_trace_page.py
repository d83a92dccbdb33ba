"""A trace's page in headless Chromium: chosen by pointer and keys, on any screen, asking nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.trace_builder import request_of
from paceline.cli.trace_model import Request
from paceline.cli.trace_page import page
from paceline.cli.trace_spans import spans_of
from tests.unit.cli.trace_lines import make_trace

pytestmark = pytest.mark.browser

NUM_ROUNDS = 30
WIDTH = "document.querySelector('.canvas').clientWidth"
SEEN = """(index) => {
  const inner = document.querySelectorAll(".round")[index].getBoundingClientRect();
  const outer = document.querySelector(".scroll").getBoundingClientRect();
  return inner.left >= outer.left - 1 && inner.right <= outer.right + 1;
}"""


@pytest.fixture(scope="module")
def request_shown() -> Request:
    lines = [line for _, line in make_trace(NUM_ROUNDS).lines()]
    found = request_of([span for line in lines for span in spans_of(line.encode())[0]])
    assert found is not None
    return found


@pytest.fixture
def url(request_shown: Request, tmp_path: Path) -> str:
    path = tmp_path / "trace.html"
    path.write_text(page(request_shown, request_shown.rounds), encoding="utf-8")
    return path.as_uri()


def chosen(view: Any) -> list[str]:
    """What the button, the table and the details say is chosen."""
    details: str = view.inner_text("#detail h2")
    return [
        view.inner_text(".round.chosen span >> nth=0"),
        view.inner_text("tr.chosen button"),
        details.removeprefix("Round ").partition(",")[0],
    ]


def test_rounds_are_chosen_by_keys(url: str, open_page: Any, request_shown: Request) -> None:
    watched = open_page(url)
    view = watched.page
    assert chosen(view) == ["1"] * 3
    view.focus(".round[tabindex='0']")
    presses = {"ArrowRight": 1, "ArrowLeft": -1, "Home": -NUM_ROUNDS, "End": NUM_ROUNDS}
    number = 1
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "ArrowLeft", "End"):
        number = min(NUM_ROUNDS, max(1, number + presses[key]))
        view.keyboard.press(key)
        assert chosen(view) == [str(number)] * 3
        assert view.evaluate("document.activeElement.querySelector('span').textContent") == str(
            number
        )
        assert view.evaluate(SEEN, number - 1)
    assert view.locator(".round[tabindex='0']").count() == 1
    last = request_shown.rounds[-1]
    assert view.inner_text("#detail h2") == f"Round {NUM_ROUNDS}, {last.wall_ms:.1f} ms"
    assert f"{last.accepted} of {last.proposed}" in view.inner_text("#detail dl")
    for key in ("ArrowRight", "Home"):
        number = min(NUM_ROUNDS, max(1, number + presses[key]))
        view.keyboard.press(key)
        assert chosen(view) == [str(number)] * 3
    assert (watched.problems, watched.strangers) == ([], [])


def test_rounds_are_chosen_by_pointer(url: str, open_page: Any) -> None:
    view = open_page(url).page
    view.click(".round >> nth=3")
    assert chosen(view) == ["4"] * 3
    view.hover(".part.verify >> nth=1")
    assert chosen(view) == ["2"] * 3
    view.hover("h1")
    assert chosen(view) == ["4"] * 3
    view.click(".part.verify >> nth=2")
    assert chosen(view) == ["3"] * 3
    view.click("tbody button >> nth=24")
    assert chosen(view) == ["25"] * 3
    assert view.evaluate(SEEN, 24)


def test_the_scale_changes(url: str, open_page: Any) -> None:
    view = open_page(url).page
    first = view.evaluate(WIDTH)
    view.click("#closer")
    assert view.evaluate(WIDTH) == pytest.approx(2 * first, abs=1)
    view.focus(".round[tabindex='0']")
    view.keyboard.press("-")
    assert view.evaluate(WIDTH) == pytest.approx(first, abs=1)
    view.click("#fit")
    assert view.evaluate(WIDTH) == view.evaluate("document.querySelector('.scroll').clientWidth")
    view.click("#farther")
    assert view.evaluate(WIDTH) == view.evaluate("document.querySelector('.scroll').clientWidth")
    assert view.locator(".ticks span").count() > 3


def test_ticks_are_where_their_times_are(url: str, open_page: Any, request_shown: Request) -> None:
    view = open_page(url).page
    for _ in range(3):
        ticks = view.evaluate(
            "[...document.querySelectorAll('.ticks span')].map((e) => "
            "[parseFloat(e.textContent), parseFloat(e.style.left)])"
        )
        assert len(ticks) > 3
        for ms, left in ticks[:-1]:
            assert left == pytest.approx(100 * ms / request_shown.ms, abs=0.01)
        view.click("#closer")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_the_screen(url: str, open_page: Any, scheme: str, width: int) -> None:
    watched = open_page(url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    view = watched.page
    assert view.evaluate("document.documentElement.scrollWidth") == width
    looks = view.evaluate(
        """() => [...document.querySelectorAll(".swatch")].map((e) => {
          const style = getComputedStyle(e);
          return style.backgroundColor + style.backgroundImage;
        })"""
    )
    assert len(set(looks)) == len(looks) == 8
    assert watched.problems == []


def test_all_is_there_without_scripts(url: str, open_page: Any, request_shown: Request) -> None:
    view = open_page(url, java_script_enabled=False).page
    assert view.locator("tbody tr").count() == len(request_shown.rounds)
    assert view.locator(".round").count() == len(request_shown.rounds)
    assert view.locator(".ticks span").count() > 3
    assert not view.is_visible("#zoom")
