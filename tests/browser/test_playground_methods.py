"""Where proposals come from, on the page at `/`: what can be chosen, and what each token shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.config import Offer
from tests.browser.conftest import Site
from tests.browser.test_playground import IDENTICAL, SPANS, Stream, fill, row_of, rows, run

pytestmark = pytest.mark.browser

EVERYTHING = Offer("auto", has_drafts=True, has_heads=True)
OFFERS = {
    "toy": EVERYTHING,
    "alone": Offer("ngram", has_drafts=False),
    "off": Offer("off", has_drafts=False),
}
NO_DRAFTS, NO_HEADS = "this model has no draft replicas", "this model has no Medusa heads"
IS_OFF = "speculation is off in this deployment"
CHOICES = """[...document.querySelectorAll('#method option')].map(
  (e) => [e.value, e.disabled, e.title, e.textContent])"""


@pytest.fixture(scope="module")
def able() -> Iterator[str]:
    with Site(offers=OFFERS) as url:
        yield url


def choices(page: Any) -> dict[str, str]:
    """Method -> why it cannot be chosen. The same is said to those who look, point and listen."""
    reasons = {}
    for method, is_disabled, title, text in page.evaluate(CHOICES):
        assert is_disabled is (title != "")
        assert text.endswith(f": {title}") is is_disabled
        reasons[method] = title
    return reasons


def test_only_what_the_model_has_can_be_chosen(able: str, open_page: Any) -> None:
    watched = open_page(able)
    page = watched.page
    fill(page)
    everything = ["", "model", "ngram", "suffix", "medusa", "hybrid", "auto"]
    assert choices(page) == dict.fromkeys(everything, "")
    page.select_option("#method", "hybrid")
    page.select_option("#model", "alone")
    lacking = {"model": NO_DRAFTS, "hybrid": NO_DRAFTS, "medusa": NO_HEADS}
    assert choices(page) == dict.fromkeys(everything, "") | lacking
    # What was chosen is no longer there.
    assert page.input_value("#method") == ""
    assert page.inner_text("#settings-now").startswith("alone, 60 tokens")
    assert "hybrid" not in page.inner_text("#settings-now")
    page.select_option("#method", "suffix")
    run(page)
    assert page.inner_text("#summary").endswith(IDENTICAL)
    page.select_option("#model", "off")
    assert choices(page) == {"": ""} | dict.fromkeys(everything[1:], IS_OFF)
    page.select_option("#model", "toy")
    assert choices(page) == dict.fromkeys(everything, "")
    assert page.input_value("#method") == ""
    assert watched.problems == []


def test_a_deployment_without_heads(site: str, open_page: Any) -> None:
    page = open_page(site).page
    page.wait_for_selector("#model option", state="attached")
    lacking = {method: reason for method, reason in choices(page).items() if reason}
    assert lacking == {"medusa": NO_HEADS}


def test_the_method_is_asked_for_and_a_refusal_is_shown(site: str, open_page: Any) -> None:
    watched = open_page(site)
    page = watched.page
    fill(page)
    page.select_option("#method", "model")
    run(page)
    assert page.inner_text("#summary").endswith(IDENTICAL)
    drafted, alone = map(Stream, watched.answers)
    assert drafted.body["speculation"]["method"] == "model"
    assert alone.body["speculation"]["method"] == "off"
    assert ", model" in page.inner_text("#settings-now")
    # As when the page was opened before a rollout that took the heads away.
    page.evaluate("document.querySelector('#method [value=medusa]').disabled = false")
    page.evaluate("document.querySelector('#method').value = 'medusa'")
    run(page)
    assert NO_HEADS in page.inner_text("#error")


@pytest.mark.parametrize("method", ["model", "suffix", "medusa"])
def test_tokens_show_what_proposed_them(method: str, able: str, open_page: Any) -> None:
    watched = open_page(able)
    page = watched.page
    fill(page)
    page.select_option("#method", method)
    run(page)
    run(page)  # suffix knows the text by now
    assert page.inner_text("#summary").endswith(IDENTICAL)
    drafted = Stream(watched.answers[2])
    assert page.evaluate(SPANS.format("with")) == drafted.spans
    assert {source for _, source, _ in drafted.spans} == {"", method}
    assert all((origin == "accepted") is (source != "") for origin, source, _ in drafted.spans)
    assert rows(page) == [row_of(each) for each in reversed(drafted.rounds)]
    whole = drafted.usage["speculation"]
    items = page.locator("#with [data-sources] li").all_inner_texts()
    assert items == [f"{method} {whole['accepted']} of {whole['proposed']}"]
    page.click("#clear")
    assert not page.is_visible("#with [data-sources]")


def test_a_tree_that_is_followed_to_a_leaf_earns_a_bonus(able: str, open_page: Any) -> None:
    """Though not all of its tokens can be accepted."""
    watched = open_page(able)
    page = watched.page
    fill(page)
    page.select_option("#method", "medusa")
    run(page)
    ends = [
        (account["pieces"][-1]["origin"], account["rounds"][0])
        for account in Stream(watched.answers[0]).accounts
        if account["pieces"]
    ]
    counts = [(each["accepted"], each["proposed"]) for origin, each in ends if origin == "bonus"]
    assert all(accepted > 0 for accepted, _ in counts)
    assert any(accepted < proposed for accepted, proposed in counts)
    shown = [row.split("|")[3] for row in rows(page)]
    assert {f"{accepted} of {proposed}" for accepted, proposed in counts} <= set(shown)


def test_sources_look_different(able: str, open_page: Any) -> None:
    """Also to those who see no colors, and in the text as in its legend and in the table."""
    watched = open_page(able)
    page = watched.page
    fill(page)
    looks: dict[str, Any] = {}
    for method in ("model", "suffix", "medusa"):
        page.select_option("#method", method)
        run(page)
        run(page)
        looks[method] = page.evaluate(
            """(method) => ["#with .token.accepted", "#with .source", "#rounds .source"].map(
              (where) => document.querySelector(`${where}.${method}`)).map(getComputedStyle)
              .map((s) => [s.textDecorationStyle, s.textDecorationThickness])""",
            method,
        )
        assert looks[method][0] == looks[method][1] == looks[method][2]
    assert len({tuple(look[0]) for look in looks.values()}) == 3
