"""The page at `/` in headless Chromium, over a real gateway and toy models."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import pytest

from paceline.config import ApiKeyConfig
from tests.browser.conftest import Site

pytestmark = pytest.mark.browser

KEY = "secret-key"
SIZES = {"desktop": (1280, 900), "phone": (360, 800)}


def fill(page: Any, prompt: str = "hello", max_tokens: int = 60) -> None:
    page.fill("#prompt", prompt)
    page.click("summary")
    page.fill("#max-tokens", str(max_tokens))


def wait_until_done(page: Any) -> None:
    page.wait_for_selector("#run:not([disabled])", timeout=30_000)


def truth(url: str, method: str, prompt: str = "hello", max_tokens: int = 60) -> dict[str, Any]:
    """The same request, asked by us."""
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 1,
        "speculation": {"include_rounds": True, "method": method},
    }
    answer: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body).json()
    return answer


def test_both_runs(site: str, open_page: Any) -> None:
    watched = open_page(site)
    page = watched.page
    fill(page)
    page.click("#run")
    wait_until_done(page)
    assert page.inner_text("#summary").endswith("the two texts are identical.")
    drafted, plain = truth(site, "model"), truth(site, "off")
    text = "document.querySelector('#{} [data-text]').textContent"
    wanted = drafted["choices"][0]["message"]["content"].replace("\r\n", "\n")
    assert page.evaluate(text.format("with")) == wanted
    assert page.evaluate(text.format("without")) == wanted
    # Every piece has the color of its origin, and there are pieces of drafts on the one side only.
    origins = "[...document.querySelectorAll('#{} .token')].map((e) => e.className)"
    shown = page.evaluate(origins.format("with"))
    assert {"token accepted", "token recovered"} <= set(shown)
    assert set(page.evaluate(origins.format("without"))) == {"token plain"}
    assert all(p["origin"] == "plain" for p in plain["speculation"]["pieces"])
    colors = page.evaluate(
        "['accepted', 'recovered', 'bonus', 'plain'].map((o) =>"
        " getComputedStyle(document.querySelector('.legend .token.' + o)).backgroundColor)"
    )
    assert len(set(colors)) == 4
    # One row for each round, and the figures are those of the whole answer.
    counts = page.evaluate("[...document.querySelectorAll('#rounds tr')].map((r) => r.innerText)")
    assert counts
    accepted = sum(int(row.split("\t")[2].split(" of ")[0]) for row in counts)
    assert len(counts) + accepted == drafted["usage"]["completion_tokens"]
    assert page.inner_text("#with [data-figure=rate]").endswith(" %")
    assert page.inner_text("#without [data-figure=rate]") == "-"
    assert float(page.inner_text("#with [data-figure=speed]")) > 0
    assert (watched.problems, watched.strangers) == ([], [])


def test_a_conversation_goes_on(site: str, open_page: Any) -> None:
    page = open_page(site).page
    fill(page, "hi", 8)
    page.click("#run")
    wait_until_done(page)
    asked = []
    page.on("request", lambda r: asked.append(r.post_data) if r.method == "POST" else None)
    page.fill("#prompt", "and")
    page.click("#run")
    wait_until_done(page)
    assert page.inner_text("#error") == ""
    roles = [message["role"] for message in json.loads(asked[0])["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert page.locator("#history p").count() == 2
    page.click("#clear")
    assert page.locator("#history p").count() == 0
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_by_keyboard_alone(site: str, open_page: Any) -> None:
    page = open_page(site).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("hey")
    for _ in range(2):
        page.keyboard.press("Tab")
    reached = set()
    for _ in range(12):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert "run" in reached
    page.keyboard.press("Control+Enter")
    wait_until_done(page)
    assert "identical" in page.inner_text("#summary")


def test_stop(site: str, open_page: Any) -> None:
    page = open_page(site).page
    # The answer never comes: the page must let go of it.
    page.route("**/v1/chat/completions", lambda route: None)
    page.click("#run")
    page.wait_for_selector("#stop:not([disabled])")
    page.keyboard.press("Escape")
    wait_until_done(page)
    assert page.inner_text("#summary") == "Stopped."
    assert page.is_disabled("#stop")


def test_errors_are_sentences(site: str, open_page: Any) -> None:
    page = open_page(site).page
    fill(page, "x" * 400)
    page.click("#run")
    wait_until_done(page)
    assert "the model's context is 160 tokens" in page.inner_text("#error")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body=': keep-alive\n\ndata: {"error": {"message": "The target was lost."}}\n\n',
        ),
    )
    page.click("#run")
    wait_until_done(page)
    assert page.inner_text("#error") == "The target was lost."
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.click("#run")
    wait_until_done(page)
    assert page.inner_text("#error") != ""


def test_a_service_with_keys(open_page: Any) -> None:
    key = ApiKeyConfig(name="me", sha256=hashlib.sha256(KEY.encode()).hexdigest())
    with Site((key,)) as url:
        page = open_page(url).page
        page.wait_for_selector("#key-field:not([hidden])")
        assert page.inner_text("#error") != ""
        page.fill("#key", KEY)
        page.fill("#prompt", "hi")
        page.fill("#max-tokens", "8")
        page.click("#run")
        wait_until_done(page)
        assert "identical" in page.inner_text("#summary")
        assert KEY not in page.url
        assert page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_all_can_be_read(
    site: str, open_page: Any, size: str, scheme: str
) -> None:
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    watched = open_page(site, viewport=viewport, color_scheme=scheme)
    page = watched.page
    fill(page)
    page.click("#run")
    wait_until_done(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ratios = page.evaluate(CONTRASTS)
    assert ratios
    assert min(ratios.values()) >= 4.5, ratios
    assert watched.problems == []


# WCAG 2.2's contrast of text and what is behind it.
CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if ((rgb(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = {};
  const names = ["h1", "header p", "label", ".hint", "a", "#run", "#stop", ".legend", "#summary",
    ".token.accepted", ".token.recovered", ".token.bonus", "dt", "dd", "th", "td"];
  for (const name of names) {
    const element = document.querySelector(name);
    if (!element || element.disabled) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
    found[name] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return found;
}"""


def test_files_and_their_headers(site: str) -> None:
    for path in ("/", "/static/playground.js", "/static/playground.css", "/static/view.js"):
        answer = httpx.get(f"{site}{path}")
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        etag = {"if-none-match": answer.headers["etag"]}
        assert httpx.get(f"{site}{path}", headers=etag).status_code == 304
        assert httpx.head(f"{site}{path}").content == b""
    for path in ("/static/", "/static/../playground.py", "/static/%2e%2e/api.py", "/static/x.js"):
        assert httpx.get(f"{site}{path}").status_code == 404
