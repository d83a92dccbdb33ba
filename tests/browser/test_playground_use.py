"""The playground in the hands of people: keyboard, phone, dark rooms, and when things go wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paceline.errors import RequestError
from tests.browser.conftest import Site
from tests.browser.test_playground import FOCUSED, IDENTICAL, Stream, fill, run, wait_until_done

pytestmark = pytest.mark.browser

SIZES = {"desktop": (1280, 900), "phone": (360, 800)}
MAX_TAB_STOPS = 40
WAIT_S = 20


def test_by_keyboard_alone(site: str, open_page: Any) -> None:
    watched = open_page(site)
    page, keyboard = watched.page, watched.page.keyboard
    page.wait_for_selector("#model option", state="attached")

    def tab_to(name: str) -> None:
        for _ in range(MAX_TAB_STOPS):
            if page.evaluate(FOCUSED) == name:
                return
            keyboard.press("Tab")
        raise AssertionError(f"no Tab leads to {name}")

    keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == "skip"
    keyboard.press("Enter")
    assert page.evaluate(FOCUSED) == "prompt"
    keyboard.press("Control+A")
    keyboard.type("hey")
    keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    keyboard.press("Enter")
    tab_to("max-tokens")
    keyboard.press("Control+A")
    keyboard.type("20")
    tab_to("run")
    keyboard.press("Enter")
    wait_until_done(page)
    assert page.inner_text("#summary").endswith(IDENTICAL)
    # Run was dead meanwhile, but the focus has not gone away.
    assert page.evaluate(FOCUSED) == "run"
    tab_to("follow")
    keyboard.press("Space")
    page.wait_for_selector("#history:not([hidden])")
    keyboard.type("and")
    keyboard.press("Control+Enter")
    page.wait_for_selector(f"#summary:has-text('{IDENTICAL}')")
    assert len(watched.answers) == 4
    assert watched.answers[3].request.post_data_json["max_tokens"] == 20


def test_focus_is_always_seen(site: str, open_page: Any) -> None:
    page = open_page(site).page
    fill(page, "hi", 20)
    run(page)
    page.click("h1")
    looks = {}
    for _ in range(MAX_TAB_STOPS):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        name, style, width = page.evaluate(
            "(() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.id || e.className || e.tagName, s.outlineStyle, s.outlineWidth]; })()"
        )
        looks[name] = (style, width)
    assert {"prompt", "SUMMARY", "model", "k", "mode", "run", "clear", "numbers"} <= set(looks)
    assert set(looks.values()) == {("solid", "3px")}


def test_stop_reaches_the_target(open_page: Any) -> None:
    site = Site()
    site.targets.holds_at = 3
    with site as url:
        page = open_page(url).page
        page.fill("#prompt", "hello")
        page.click("#run")
        page.wait_for_selector("#with .token")
        assert page.inner_text("#with [data-state]") == "running"
        assert page.inner_text("#without [data-state]") == "waiting"
        assert page.evaluate(FOCUSED) == "stop"
        page.keyboard.press("Escape")
        wait_until_done(page)
        assert page.inner_text("#summary") == "Stopped."
        assert page.inner_text("#with [data-state]") == "stopped"
        assert page.inner_text("#without [data-state]") == ""
        assert page.locator("#with .token").count() > 0
        assert not page.is_visible("#error")
        assert page.is_disabled("#stop")
        assert page.evaluate(FOCUSED) == "run"
        # The draft's run was freed, the other one never began.
        assert site.targets.aborted.wait(WAIT_S)
        assert len(site.targets.requests) == 1


def test_a_new_chat_amid_a_run(open_page: Any) -> None:
    site = Site()
    site.targets.holds_at = 3
    with site as url:
        page = open_page(url).page
        page.fill("#prompt", "hello")
        page.click("#run")
        page.wait_for_selector("#with .token")
        page.click("#clear")
        page.wait_for_selector("#prompt:focus")
        assert page.locator("#with .token").count() == 0
        assert page.inner_text("#with [data-state]") == ""
        assert page.inner_text("#summary").startswith("Run the prompt")
        site.release()
        fill(page)
        run(page)
        assert page.inner_text("#summary").endswith(IDENTICAL)


def test_comments_are_no_text(open_page: Any) -> None:
    site = Site(keepalive_interval_s=0.01)
    site.targets.holds_at = 3
    with site as url:
        watched = open_page(url)
        page = watched.page
        fill(page)
        page.click("#run")
        page.wait_for_selector("#with .token")
        assert site.commented.wait(WAIT_S)
        site.release()
        wait_until_done(page)
        assert page.inner_text("#summary").endswith(IDENTICAL)
        assert "\n: keep-alive\n" in watched.answers[0].text()
        assert Stream(watched.answers[0]).usage["completion_tokens"] == 60


def run_to_first_token(watched: Any) -> Any:
    """The page amid an answer."""
    page = watched.page
    page.fill("#prompt", "hello")
    page.click("#run")
    page.wait_for_selector("#with .token")
    return page


def test_a_failure_amid_the_stream_is_a_sentence(open_page: Any) -> None:
    site = Site()
    site.targets.holds_at = 3
    site.targets.failure = RequestError("The model failed on this.", None, "engine_error", 500)
    with site as url:
        watched = open_page(url)
        page = run_to_first_token(watched)
        site.release()
        wait_until_done(page)
        assert page.inner_text("#error") == "The model failed on this."
        assert page.inner_text("#summary") == "The run failed."
        assert page.inner_text("#with [data-state]") == "failed"
        assert page.locator("#with .token").count() > 0
        assert page.is_disabled("#follow")
        site.targets.failure = None
        fill(page)
        run(page)
        assert not page.is_visible("#error")
        assert page.inner_text("#summary").endswith(IDENTICAL)


def test_refusals_are_sentences(site: str, open_page: Any) -> None:
    page = open_page(site).page
    fill(page, "x" * 400)
    run(page)
    assert "the model's context is 160 tokens" in page.inner_text("#error")
    page.fill("#prompt", "hi")
    page.select_option("#mode", "block")
    run(page)
    assert "'speculation.mode' 'block' does not fit" in page.inner_text("#error")


def test_a_service_that_is_gone(open_page: Any) -> None:
    with Site() as url:
        page = open_page(url).page
        page.wait_for_selector("#model option", state="attached")
    run(page)
    assert page.inner_text("#error") == "The service could not be reached."


def test_a_connection_that_breaks(open_page: Any) -> None:
    site = Site()
    site.targets.holds_at = 3
    with site as url:
        watched = open_page(url)
        page = run_to_first_token(watched)
        site.break_connections()
        wait_until_done(page)
        assert page.inner_text("#error") == "The connection broke before the answer was whole."


def test_the_text_is_followed_until_the_reader_looks_back(open_page: Any) -> None:
    site = Site(max_len=500)
    site.targets.holds_at = 150
    with site as url:
        page = open_page(url, viewport={"width": 360, "height": 800}).page
        page.evaluate("document.querySelector('#with [data-text]').style.maxHeight = '5rem'")
        fill(page, "hey", 400)
        page.fill("#k", "0")
        page.click("#run")
        page.wait_for_selector("#rounds tr:nth-child(150)")
        place = (
            "(() => { const b = document.querySelector('#with [data-text]');"
            " return [b.scrollTop, b.scrollHeight - b.scrollTop - b.clientHeight]; })()"
        )
        top, below = page.evaluate(place)
        assert top > 0
        assert below < 2
        page.evaluate("document.querySelector('#with [data-text]').scrollTop = 0")
        site.release()
        wait_until_done(page)
        assert page.evaluate(place)[0] == 0


@pytest.mark.parametrize(("size", "scheme"), [*itertools.product(SIZES, ["light", "dark"])])
def test_nothing_overflows_and_all_can_be_read(
    site: str, open_page: Any, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    watched = open_page(site, viewport=viewport, color_scheme=scheme)
    page = watched.page
    page.wait_for_selector("#model option", state="attached")
    seen = {}
    for step in (lambda: None, lambda: fill(page, "word " * 3 + "x" * 60), lambda: run(page)):
        step()
        seen |= page.evaluate(CONTRASTS)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Only the numbers may need more room than there is.
    table = "(() => { const e = document.querySelector('.scroll');"
    assert page.evaluate(f"{table} return e.scrollWidth <= e.clientWidth; }})()")
    page.check("#numbers")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("#follow")
    page.fill("#prompt", "x" * 400)
    run(page)
    assert page.is_visible("#error")
    seen |= page.evaluate(CONTRASTS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert {"#error", "#history p", ".source", ".token.bonus", "th", "td", "#follow"} <= set(seen)
    assert min(seen.values()) >= 4.5, seen
    bars = page.evaluate(BAR_CONTRASTS)
    assert len(bars) == 8
    assert min(bars) >= 3, bars
    assert watched.strangers == []


def test_motion_is_reduced_where_it_is_wished(site: str, open_page: Any) -> None:
    moves = "getComputedStyle(document.querySelector('#run')).transitionDuration"
    for wish, is_still in (("reduce", True), ("no-preference", False)):
        page = open_page(site, reduced_motion=wish).page
        assert (page.evaluate(moves) == "0s") is is_still


# WCAG 2.2's contrast of text and what is behind it; 3:1 for what is drawn.
_LIGHT = """
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, two) => {
    const [a, b] = [light(one), light(two)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if ((rgb(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
"""
CONTRASTS = f"""() => {{{_LIGHT}
  const found = {{}};
  const names = ["h1", "h1 span", ".lede", "label", ".hint", "a", "#run", "#clear", "#follow",
    ".legend li", "#summary", "#error", "#history p", "#settings-now", "#prompt", "[data-totals]",
    ".token.accepted", ".source", ".token.recovered", ".token.bonus", ".token.plain",
    "dt", "dd", "th", "td"];
  for (const name of names) {{
    const element = document.querySelector(name);
    if (!element || element.disabled || !element.checkVisibility()) continue;
    found[name] = ratio(getComputedStyle(element).color, ground(element));
  }}
  return found;
}}"""
BAR_CONTRASTS = f"""() => {{{_LIGHT}
  const panel = ground(document.querySelector(".waterfall"));
  return [...document.querySelectorAll(".stage")].map((element) => {{
    const style = getComputedStyle(element);
    const drawn = style.backgroundImage.match(/rgb\\([^)]*\\)/)?.[0] ?? style.backgroundColor;
    return ratio(drawn, panel);
  }});
}}"""
