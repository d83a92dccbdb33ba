"""`paceline top`: its frame, its rates, and what it does about a service that is away."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.cli.top import MAX_METRICS_BYTES, Watch
from paceline.cli.top_data import (
    ACCEPTED,
    GENERATED,
    MAX_HISTORY,
    PROPOSED,
    History,
    Look,
    Rates,
    link_state,
    rates_between,
    read_counters,
)
from paceline.cli.top_view import MAX_ROWS, frame, short_name, sparkline
from tests.unit.cli.toy_service import (
    KEY,
    gateway,
    serving,
    two_models,
    two_targets_two_drafts,
)

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(gateway(two_targets_two_drafts())) as address:
        yield address


def top(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["top", "--interval", "0.1", *arguments], env=env)


def drawn(look: Look, history: History | None = None, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    history = History() if history is None else history
    console.print(frame(look, history.receive(look), history, "http://there", width))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(name))


# -- the command --------------------------------------------------------------------------------


def test_one_frame_of_a_real_gateway(url: str) -> None:
    result = top("--once", "--url", url)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"paceline top  {url}  6 running  1 waiting"
    assert max(map(len, lines)) <= 80
    assert row(result.stdout, "aaaa1111")[:6] == ["aaaa1111", "4", "1", "4.0", "3.5", "25.50"]
    assert row(result.stdout, "cccc3333")[:4] == ["cccc3333", "4/128", "66%", "3.00"]
    assert "\x1b" not in result.stdout


def test_rates_come_from_the_metrics_of_a_real_gateway(url: str) -> None:
    """Somebody asks between the two looks."""

    def ask(_: float) -> None:
        body = {"model": "toy", "prompt": "hello", "max_tokens": 30, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200

    clock = iter((10.0, 12.0))
    with httpx.Client(base_url=url) as http:
        watch = Watch(http, url, 1.0, False, lambda: next(clock), ask)
        watch.once()
    assert list(watch.history.tokens_per_s) == [15.0]
    assert 0 < (watch.history.acceptance_rate[0] or 0) <= 1
    assert list(watch.history.num_speculative_tokens) == [2.0]


def test_json_is_one_object_a_look(url: str) -> None:
    result = top("--once", "--json", "--url", url)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    said = json.loads(line)
    assert (said["url"], said["problem"]) == (url, None)
    assert (said["rates"]["num_running"], said["rates"]["num_waiting"]) == (6, 1)
    assert [target["num_running"] for target in said["fleet"]["targets"]] == [4, 2]
    assert set(said["counters"]) == {GENERATED, PROPOSED, ACCEPTED}


def test_nobody_there_is_one_line_and_exit_1() -> None:
    result = top("--once", "--url", "http://127.0.0.1:9")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no answer from http://127.0.0.1:9: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_service_with_keys() -> None:
    with serving(gateway(two_targets_two_drafts(), has_keys=True)) as url:
        assert top("--once", "--url", url).exit_code == 1
        assert top("--once", "--url", url, env={"PACELINE_API_KEY": KEY}).exit_code == 0


def test_without_a_controller_the_rates_are_still_shown() -> None:
    with serving(gateway(None)) as url:
        result = top("--once", "--url", url)
    assert result.exit_code == 0
    assert "The controller did not answer" in result.stdout
    assert row(result.stdout, "tokens/s")[1] == "0.0"


@pytest.mark.parametrize("interval", ["0", "0.09", "3601"])
def test_an_interval_has_bounds(interval: str) -> None:
    assert CliRunner().invoke(app, ["top", "--interval", interval]).exit_code == 2


def test_ctrl_c_ends_it_well(url: str) -> None:
    command = [sys.executable, "-m", "paceline.cli.main", "top", "--json", "--interval", "0.1"]
    with subprocess.Popen([*command, "--url", url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    assert looks[0]["time_s"] < looks[1]["time_s"] < looks[2]["time_s"]


def test_a_service_that_is_away_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Every second look fails."""
    answers = iter((200, 503, 200))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(404)
        status = next(answers)
        if status == 503:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=two_targets_two_drafts())

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    with httpx.Client(base_url="http://t", transport=httpx.MockTransport(answer)) as http:
        watch = Watch(http, "http://t", 2.0, True, iter(range(9)).__next__, sleep)
        with pytest.raises(KeyboardInterrupt):
            watch.forever()
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [look["problem"] for look in looks] == [
        None, "no answer from http://t: refused; trying again every 2 s", None,
    ]  # fmt: skip
    assert [look["fleet"] is None for look in looks] == [False, True, False]
    assert slept == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "body", [b"x" * (MAX_METRICS_BYTES + 1), b"{", b"no metric {", b"\xff\xfe\x00 1\n"]
)
def test_what_is_no_metrics_page_gives_no_rates(body: bytes) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, content=body)
        return httpx.Response(200, json=two_targets_two_drafts())

    with httpx.Client(base_url="http://t", transport=httpx.MockTransport(answer)) as http:
        watch = Watch(http, "http://t", 0.1, True, iter(range(9)).__next__, lambda _: None)
        watch.once()
    assert list(watch.history.tokens_per_s) == [None]


# -- rates ----------------------------------------------------------------------------------------


def look(now_s: float, fleet: dict[str, Any] | None = None, **counters: float) -> Look:
    names = {"generated": GENERATED, "proposed": PROPOSED, "accepted": ACCEPTED}
    given = {names[name]: value for name, value in counters.items()}
    return Look(now_s, fleet, given or None)


def test_counters_are_summed_over_the_models() -> None:
    text = (
        "# TYPE vllm:generation_tokens counter\n"
        'vllm:generation_tokens_total{model_name="a"} 3\n'
        'vllm:generation_tokens_total{model_name="b"} 4\n'
        "other_total 9\n"
    )
    assert read_counters(text) == {GENERATED: 7.0}
    assert read_counters("") == {}


def test_rates_between_two_looks() -> None:
    before = look(1.0, generated=10, proposed=8, accepted=4)
    rates = rates_between(before, look(3.0, generated=40, proposed=28, accepted=19))
    assert (rates.tokens_per_s, rates.acceptance_rate) == (15.0, 0.75)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, look(1.0, generated=1, proposed=1, accepted=1)),  # no past
        (look(0.0), look(1.0, generated=1)),  # no metrics then
        (look(0.0, generated=1), look(1.0)),  # or now
        (look(0.0, generated=9), look(1.0, generated=1)),  # another gateway has answered
        (look(1.0, generated=1), look(1.0, generated=9)),  # no time has passed
    ],
)
def test_what_cannot_be_known_is_none(before: Look | None, now: Look) -> None:
    assert rates_between(before, now).tokens_per_s is None


def test_no_proposals_are_no_acceptance() -> None:
    same = {"generated": 1, "proposed": 5, "accepted": 5}
    rates = rates_between(look(0.0, **same), look(1.0, **same))
    assert (rates.tokens_per_s, rates.acceptance_rate) == (0.0, None)


def test_without_metrics_targets_say_what_was_accepted() -> None:
    rates = rates_between(None, look(0.0, two_targets_two_drafts()))
    assert rates.acceptance_rate == 0.625


def test_k_is_that_of_the_busy_targets() -> None:
    fleet = {"targets": [
        {"num_running": 1, "num_speculative_tokens": 4},
        {"num_running": 0, "num_speculative_tokens": 16},
    ]}  # fmt: skip
    assert rates_between(None, look(0.0, fleet)).num_speculative_tokens == 4.0
    fleet["targets"][0]["num_running"] = 0
    assert rates_between(None, look(0.0, fleet)).num_speculative_tokens == 10.0


def test_every_model_counts() -> None:
    rates = rates_between(None, look(0.0, {"models": two_models()}))
    assert (rates.num_running, rates.num_waiting) == (10, 2)


def test_history_is_bounded() -> None:
    history = History()
    for second in range(MAX_HISTORY + 5):
        history.receive(look(float(second), generated=second * second))
    assert len(history.tokens_per_s) == MAX_HISTORY
    assert len(history.acceptance_rate) == len(history.num_speculative_tokens) == MAX_HISTORY
    last = MAX_HISTORY + 4
    assert history.tokens_per_s[-1] == last**2 - (last - 1) ** 2


# -- the frame ------------------------------------------------------------------------------------


def test_bars_grow_with_their_values() -> None:
    assert sparkline((0.0, 3.0, 6.0), 6.0, 10) == "▁▄▇"
    assert sparkline((1.0, None, 2.0), 2.0, 2) == " ▇"
    assert sparkline((0.0, None), 0.0, 5) == "▁ "
    assert sparkline((-1.0, 9.0), 1.0, 5) == "▁▇"


def test_a_frame_fits_its_width() -> None:
    history = History()
    for second in range(200):
        history.receive(look(float(second), generated=second**3))
    for width in (60, 80, 200):
        text = drawn(look(200.0, two_targets_two_drafts(), generated=200**3), history, width)
        assert max(map(len, text.splitlines())) <= width
        assert "▇" in text


def test_who_serves_whom_and_what_is_wrong() -> None:
    fleet = two_targets_two_drafts()
    target, draft = fleet["targets"][0], fleet["drafts"][0]
    assert link_state(target, draft) == ""
    assert link_state(fleet["targets"][1], draft) == "dialling"
    target["breakers"] = {draft["replica_id"]: "dark"}
    assert link_state(target, draft) == "dark"
    assert "cccc3333 (dark)" in drawn(look(0.0, fleet), width=140)
    target["breakers"] = {draft["replica_id"]: "closed"}
    assert "cccc3333 (" not in drawn(look(0.0, {**fleet, "targets": [target]}), width=140)
    assert link_state(target, None) == ""


def test_columns_that_nobody_fills_are_left_out() -> None:
    fleet = two_targets_two_drafts()
    assert "KV" not in drawn(look(0.0, fleet))
    fleet["targets"][0] |= {"kv_cache_usage": 0.42, "tokens_per_s": 31.25}
    text = drawn(look(0.0, fleet), width=140)
    assert row(text, "aaaa1111")[4:6] == ["42%", "31.2"]
    assert row(text, "bbbb2222")[4:6] == ["-", "-"]


FIGURES = {
    "busy_share": 0.9, "kv_cache_usage": 0.42, "tokens_per_s": 1031.25, "window": 2.5,
    "acceptance_rate": 0.625, "rtt_ms": 1.25, "speculation_state": "open",
    "breakers": {"paceline#DraftReplica#cccc3333": "dark"},
    "sources": {"model": 0.25, "suffix": 0.625, "medusa": 0.125, "ngram": 0},
}  # fmt: skip


def test_all_figures_of_a_target_fit() -> None:
    fleet = two_targets_two_drafts(**FIGURES)
    text = drawn(look(0.0, fleet))
    assert max(map(len, text.splitlines())) <= 80
    assert row(text, "target") == [
        "target", "run", "wait", "busy", "KV", "tok/s", "K", "win", "acc", "src", "batch", "ms",
        "rtt",
        "served", "by",
    ]  # fmt: skip
    assert row(text, "aaaa1111")[:14] == [
        "aaaa1111", "4", "1", "90%", "42%", "1031.2", "4.0", "2.5", "62%", "smh", "3.5", "25.50",
        "1.25", "cccc3333",
    ]  # fmt: skip
    assert "src: m draft model, n ngram, s suffix, h Medusa heads" in text
    assert "src" not in drawn(look(0.0, two_targets_two_drafts()))
    assert "aaaa1111 rests: passes without drafts were faster" in text
    assert "127.0.0.1:52000" not in text
    wide = drawn(look(0.0, fleet), width=120)
    assert row(wide, "aaaa1111")[1] == "127.0.0.1:52000"
    assert "cccc3333 (dark)" in wide


def test_each_model_has_its_tables() -> None:
    text = drawn(look(0.0, {"models": two_models()}), width=120)
    lines = [line.strip() for line in text.splitlines()]
    assert lines.index("toy") < lines.index("big")
    assert sum(line.startswith("target") for line in lines) == 2
    assert sum(line.startswith("draft") for line in lines) == 1


def test_a_model_whose_controller_is_silent() -> None:
    silent = {"targets": [], "drafts": [], "problem": "The controller did not answer."}
    text = drawn(look(0.0, {"models": {**two_models(), "third": silent}}))
    assert "third\n\nThe controller did not answer." in text
    assert "No target has reported" not in text


def test_drafts_that_leave_are_marked() -> None:
    fleet = two_targets_two_drafts()
    fleet["drafts"][1]["is_draining"] = True
    assert "dddd4444 (draining)" in drawn(look(0.0, fleet))


def test_a_large_fleet_is_cut() -> None:
    fleet = two_targets_two_drafts()
    fleet["targets"] *= 20
    fleet["num_targets"] = 40
    assert f"and {40 - MAX_ROWS} more targets" in drawn(look(0.0, fleet))


def test_an_empty_fleet_is_a_sentence() -> None:
    text = drawn(look(0.0, {"targets": [], "drafts": []}))
    assert "No target has reported to the controller." in text


@pytest.mark.parametrize("value", [None, [], {}, "\x1b[2J", -1, float("nan"), {"x": 1}, [[]], True])
def test_any_json_is_drawn(value: Any) -> None:
    fleet = two_targets_two_drafts()
    for kind in ("targets", "drafts"):
        for name in fleet[kind][0]:
            bent = json.loads(json.dumps(fleet))
            bent[kind][0][name] = value
            assert "\x1b" not in drawn(look(0.0, bent))
    for name in fleet:
        drawn(look(0.0, {**fleet, name: value}))
    drawn(look(0.0, {"targets": [], "models": {"a": value, "\x1b[2J": value}}))


def test_short_names() -> None:
    assert short_name("paceline#TargetReplica#4xq2c7el") == "4xq2c7el"
    assert short_name("x" * 40) == "x" * 12
    assert short_name(None) == "-"


def test_rates_as_json_name_every_field() -> None:
    assert set(Rates().plain()) == {
        "tokens_per_s", "acceptance_rate", "num_speculative_tokens", "num_running", "num_waiting",
    }  # fmt: skip
