"""The page at `/` in headless Chromium, over a real gateway and toy models."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import httpx
import pytest

from paceline.config import ApiKeyConfig
from tests.browser.conftest import Site

pytestmark = pytest.mark.browser

KEY = "secret-key"
IDENTICAL = "the two texts are identical."
# As in services/paceline/gateway/static/rounds.js.
MAX_ROWS = 400
STAGES = ("wire_back", "rewind", "draft", "wire_out", "window", "queue", "verify", "sample")
SPANS = (
    "[...document.querySelectorAll('#{} .token')].map("
    "(e) => [e.classList[1], e.classList[2] ?? '', e.textContent])"
)
FOCUSED = "document.activeElement.id || document.activeElement.className"


def fill(page: Any, prompt: str = "hello", max_tokens: int = 60) -> None:
    page.fill("#prompt", prompt)
    page.click("summary")
    page.fill("#max-tokens", str(max_tokens))


def wait_until_done(page: Any) -> None:
    page.wait_for_selector("#run:not([disabled])", timeout=30_000)


def run(page: Any) -> None:
    page.click("#run")
    wait_until_done(page)


class Stream:
    """What one answer's stream said, read by other hands than the page's."""

    def __init__(self, response: Any) -> None:
        lines = response.text().split("\n")
        assert "data: [DONE]" in lines
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        self.accounts = [chunk["speculation"] for chunk in chunks if "speculation" in chunk]
        pieces = [piece for account in self.accounts for piece in account["pieces"]]
        self.spans = [[p["origin"], p["source"], p["text"]] for p in pieces if p["text"]]
        self.rounds = [each for account in self.accounts for each in account["rounds"]]
        self.usage = chunks[-1]["usage"]
        self.body = response.request.post_data_json


def rows(page: Any) -> list[str]:
    """Newest first; the bar's cell is its sentence."""
    texts: list[str] = page.evaluate(
        "[...document.querySelectorAll('#rounds tr')].map((row) => [...row.cells].map("
        "(td) => td.querySelector('.bar')?.getAttribute('aria-label') ?? td.textContent).join('|'))"
    )
    return texts


def row_of(each: dict[str, Any]) -> str:
    bar = ", ".join(f"{stage.replace('_', ' ')} {each[f'{stage}_ms']:.1f} ms" for stage in STAGES)
    counts = (each["round"], each["source"] or "-", each["num_speculative_tokens"])
    accepted = f"{each['accepted']} of {each['proposed']}"
    numbers = [f"{each[f'{name}_ms']:.1f}" for name in (*STAGES, "wall")]
    return "|".join([*map(str, counts), accepted, bar, *numbers])


def figure(page: Any, run_id: str, name: str) -> str:
    text: str = page.inner_text(f"#{run_id} [data-figure={name}]")
    return text


def test_both_runs_are_shown_as_they_were_streamed(site: str, open_page: Any) -> None:
    watched = open_page(site)
    page = watched.page
    fill(page)
    run(page)
    assert page.inner_text("#summary").endswith(IDENTICAL)
    drafted, alone = map(Stream, watched.answers)
    assert "method" not in drafted.body["speculation"]
    assert alone.body["speculation"]["method"] == "off"
    assert page.evaluate(SPANS.format("with")) == drafted.spans
    assert page.evaluate(SPANS.format("without")) == alone.spans
    assert {origin for origin, *_ in drafted.spans} >= {"accepted", "recovered", "bonus"}
    assert {origin for origin, *_ in alone.spans} == {"plain"}
    assert "".join(text for *_, text in drafted.spans) == "".join(text for *_, text in alone.spans)
    assert rows(page) == [row_of(each) for each in reversed(drafted.rounds)]
    for run_id, stream in (("with", drafted), ("without", alone)):
        whole, tokens = stream.usage["speculation"], stream.usage["completion_tokens"]
        assert tokens == 60
        assert whole["rounds"] == len(stream.rounds)
        assert whole["accepted"] == sum(each["accepted"] for each in stream.rounds)
        assert figure(page, run_id, "rounds") == str(whole["rounds"])
        length = whole.get("mean_accepted_length", whole.get("mean_acceptance_length"))
        assert float(figure(page, run_id, "length")) == pytest.approx(length, abs=0.005)
        assert float(figure(page, run_id, "speed")) > 0
        assert figure(page, run_id, "first").endswith(" ms")
    whole = drafted.usage["speculation"]
    assert figure(page, "with", "rate") == f"{100 * whole['acceptance_rate']:.0f} %"
    assert figure(page, "with", "k") == str(drafted.rounds[-1]["num_speculative_tokens"])
    assert page.inner_text("#with [data-totals]") == (
        f"60 tokens in {whole['rounds']} rounds; "
        f"{whole['accepted']} of {whole['proposed']} proposed tokens accepted."
    )
    assert (watched.problems, watched.strangers) == ([], [])


def test_origins_differ_in_more_than_color(site: str, open_page: Any) -> None:
    page = open_page(site).page
    fill(page)
    run(page)
    look = """(scope) => Object.fromEntries(
      ["accepted", "recovered", "bonus", "plain"].map((origin) => {
        const element = document.querySelector(`${scope} .token.${origin}`);
        if (!element) return [origin, null];
        const style = getComputedStyle(element);
        const line = style.textDecorationLine === "none" ? "" : style.textDecorationStyle;
        return [origin, [style.color, style.backgroundColor, line, element.title.split(":")[0]]];
      }))"""
    legend, text = page.evaluate(look, "#origins"), page.evaluate(look, "#with")
    for place in range(3):
        assert len({tuple(looks)[place] for looks in legend.values()}) == 4
    shown = {origin: looks for origin, looks in text.items() if looks}
    assert len(shown) == 4
    assert all(looks[:3] == legend[origin][:3] for origin, looks in shown.items())
    assert all(looks[3] == origin for origin, looks in shown.items())


def test_a_bar_is_the_stages_of_its_round(site: str, open_page: Any) -> None:
    """In their order, on the scale of the slowest round."""
    watched = open_page(site)
    page = watched.page
    fill(page)
    run(page)
    rounds = Stream(watched.answers[0]).rounds[::-1]
    for each in rounds:
        assert sum(each[f"{stage}_ms"] for stage in STAGES) == pytest.approx(each["wall_ms"])
    slowest = max(each["wall_ms"] for each in rounds)
    bars = page.evaluate(
        "[...document.querySelectorAll('#rounds .bar')].map((bar) => "
        "[...bar.children].map((part) => [part.className, parseFloat(part.style.width)]))"
    )
    assert len({tuple(width for _, width in bar) for bar in bars}) > 1
    for bar, each in zip(bars, rounds, strict=True):
        assert [name for name, _ in bar] == list(STAGES)
        for name, width in bar:
            assert width == pytest.approx(100 * each[f"{name}_ms"] / slowest, abs=0.01)


def test_the_numbers_of_the_bars(site: str, open_page: Any) -> None:
    page = open_page(site).page
    fill(page)
    run(page)
    assert page.is_visible("#rounds .bar >> nth=0")
    assert not page.is_visible("#rounds .number >> nth=0")
    page.check("#numbers")
    assert not page.is_visible("#rounds .bar >> nth=0")
    assert page.is_visible("#rounds .number >> nth=0")


def test_settings_reach_the_request(site: str, open_page: Any) -> None:
    watched = open_page(site)
    page = watched.page
    fill(page, "hi", 20)
    page.fill("#temperature", "0.75")
    page.fill("#seed", "9")
    page.fill("#k", "2")
    page.fill("#system", "be brief")
    page.select_option("#mode", "coupled")
    page.select_option("#order", "together")
    now = "toy, 20 tokens, temperature 0.75, seed 9, K up to 2, coupled, with a system prompt"
    assert page.inner_text("#settings-now") == now
    run(page)
    assert page.inner_text("#summary").endswith(IDENTICAL)
    streams = sorted(map(Stream, watched.answers), key=lambda s: len(s.rounds))
    for stream in streams:
        body = stream.body
        assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.75, 9, 20)
        assert body["messages"][0] == {"role": "system", "content": "be brief"}
        assert body["speculation"]["mode"] == "coupled"
    assert [s.body["speculation"].get("max_tokens") for s in streams] == [2, None]
    assert max(each["num_speculative_tokens"] for each in streams[0].rounds) == 2


def test_texts_that_may_differ_are_not_called_a_fault(site: str, open_page: Any) -> None:
    page = open_page(site).page
    fill(page)
    page.fill("#temperature", "1")
    page.select_option("#mode", "rejection")
    run(page)
    assert "DIFFER after " in page.inner_text("#summary")
    assert page.inner_text("#summary").endswith("they may: only their law is the same.")


def test_a_wrong_number_in_closed_settings_is_shown(site: str, open_page: Any) -> None:
    watched = open_page(site)
    page = watched.page
    fill(page, "hi", 5000)
    page.click("summary")
    assert not page.is_visible("#max-tokens")
    page.click("#run")
    page.wait_for_selector("#max-tokens", state="visible")
    assert page.evaluate(FOCUSED) == "max-tokens"
    assert (watched.answers, watched.problems) == ([], [])


def test_a_conversation_goes_on_where_it_is_asked_to(site: str, open_page: Any) -> None:
    watched = open_page(site)
    page = watched.page
    markup = "<img src=x onerror=alert(1)>"
    fill(page, markup, 8)
    run(page)
    run(page)  # the same turn once more
    page.click("#follow")
    assert page.evaluate(FOCUSED) == "prompt"
    assert page.input_value("#prompt") == ""
    assert page.locator("#history p").count() == 2
    assert markup in page.inner_text("#history")
    assert page.locator("main img").count() == 0
    page.fill("#prompt", "and")
    run(page)
    first, _, again, _, next_, _ = map(Stream, watched.answers)
    assert [m["role"] for m in again.body["messages"]] == ["user"]
    said = "".join(text for *_, text in first.spans)
    assert next_.body["messages"] == [
        {"role": "user", "content": markup},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and"},
    ]
    page.click("#clear")
    assert page.locator("#history p").count() == 0
    assert page.evaluate(FOCUSED) == "prompt"
    assert page.locator("#with .token").count() == 0
    assert watched.problems == []


def test_old_rounds_leave_the_table_but_not_the_figures(open_page: Any) -> None:
    with Site(max_len=MAX_ROWS + 100) as url:
        watched = open_page(url)
        page = watched.page
        fill(page, "hey", MAX_ROWS + 20)
        page.fill("#k", "0")
        run(page)
        drafted = Stream(watched.answers[0])
        assert rows(page) == [row_of(each) for each in reversed(drafted.rounds[-MAX_ROWS:])]
        assert figure(page, "with", "rounds") == str(MAX_ROWS + 20)


def test_files_and_their_headers(site: str) -> None:
    with httpx.Client(base_url=site) as http:
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        types = Counter[str]()
        for name in ("playground.css", *(f"{m}.js" for m in SCRIPTS)):
            answer = http.get(f"/static/{name}")
            types[answer.headers["content-type"]] += 1
            assert_is_guarded(http, f"/static/{name}", answer)
        assert types == {"text/javascript; charset=utf-8": 5, "text/css; charset=utf-8": 1}
        assert_is_guarded(http, "/", page)
        for path in ("/static/", "/static/../playground.py", "/static/%2e%2e/api.py"):
            assert http.get(path).status_code == 404
        assert http.get("/static/..%2f..%2fapi.py").status_code == 404
        assert http.post("/").status_code == 405


SCRIPTS = ("playground", "form", "rounds", "stream", "view")


def assert_is_guarded(http: httpx.Client, path: str, answer: httpx.Response) -> None:
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    tag = answer.headers["etag"]
    for known in (tag, f'"other", W/{tag}', "*"):
        again = http.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert http.get(path, headers={"if-none-match": '"other"'}).status_code == 200
    head = http.head(path)
    assert head.content == b""
    assert head.headers["etag"] == tag


def test_the_policy_holds(site: str, open_page: Any) -> None:
    """An inline script that got into the page does not run."""
    page = open_page(site).page
    broken = page.evaluate(
        """() => new Promise((done) => {
          document.addEventListener("securitypolicyviolation", (e) => done(e.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          document.body.append(script);
        })"""
    )
    assert broken == "script-src-elem"
    assert page.evaluate("window.ran") is None


def test_a_service_with_keys(open_page: Any) -> None:
    key = ApiKeyConfig(name="me", sha256=hashlib.sha256(KEY.encode()).hexdigest())
    with Site((key,)) as url:
        watched = open_page(url)
        page = watched.page
        page.wait_for_selector("#key-field:not([hidden])")
        assert page.evaluate(FOCUSED) == "key"
        assert page.inner_text("#error") != ""
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        wait_until_done(page)
        assert page.inner_text("#summary") == "The run failed."
        assert page.evaluate(FOCUSED) == "key"
        page.fill("#key", "schlüssel")
        page.keyboard.press("Enter")
        page.wait_for_selector("#error:has-text('ASCII')")
        page.fill("#key", KEY)
        fill(page, "hi", 8)
        run(page)
        assert page.inner_text("#summary").endswith(IDENTICAL)
        assert not page.is_visible("#error")
        assert all(answer.request.headers["authorization"] for answer in watched.answers)
        assert KEY not in page.url
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        assert page.input_value("#key") == KEY
