"""`bench methods` against services whose clock is ours: ratios, texts, order, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.bench.live import LiveConfig
from paceline.bench.methods import (
    COMPARED,
    DRAFT_WAIT_S,
    MAX_ROUNDS,
    MethodsConfig,
    method_names,
    run_methods,
    sets_of,
)
from paceline.bench.prompt_sets import SETS, prompt_set
from paceline.bench.prompts import Prompt
from paceline.errors import ConfigError, PacelineError
from tests.unit.bench.conftest import DONE, Answer, ScriptedService, event

PROMPTS = {
    "chat": [Prompt("a", "chat", "A"), Prompt("b", "chat", "B")],
    "code": [Prompt("c", "code", "C")],
}
SECONDS = {"off": 6.0, "model": 4.0, "ngram": 2.0}


class Timed:
    """Answers six tokens in SECONDS of a clock that nothing else moves. `model` is told to accept
    two of four in each of two passes, `ngram` one of one in each of three."""

    def __init__(self, service: ScriptedService) -> None:
        self.now_s = 0.0
        self.service = service
        self.order: list[str] = []
        self.num_proposed = {"model": 4, "ngram": 1}
        self.num_accepted = {"model": 2, "ngram": 1}
        self.texts: dict[str, str] = {}
        self.refusal = b'{"error": {"message": "no heads here", "code": "no_heads"}}'
        service.handler = self.answer

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def answer(self, body: dict[str, Any]) -> Answer:
        method = body["speculation"]["method"]
        assert body["speculation"]["include_rounds"] is True
        self.order.append(method)
        if method not in SECONDS:
            return 400, [self.refusal]
        self.now_s += SECONDS[method]
        accepted = self.num_accepted.get(method, 0)
        proposed = self.num_proposed.get(method, 0)
        one = {"accepted": accepted, "proposed": proposed, "num_speculative_tokens": 4}
        rounds = [one] * (6 // (accepted + 1))
        text = self.texts.get(method, "words") + str(body["seed"])
        chunk = {"choices": [{"text": text}], "speculation": {"rounds": rounds}}
        return 200, [event(chunk), DONE]


async def methods(timed: Timed, rounds: int = 3, **fields: Any) -> dict[str, Any]:
    return await run_for(timed, ("model", "ngram"), rounds, **fields)


async def run_for(
    timed: Timed, names: tuple[str, ...], rounds: int = 3, **fields: Any
) -> dict[str, Any]:
    config = MethodsConfig(LiveConfig(timed.service.url, **fields), method_names(names), rounds)
    result = await run_methods(config, PROMPTS, clock=timed.clock, sleep=timed.sleep)
    json.dumps(result)  # everything in it must be JSON
    return result


async def test_figures_of_every_set_and_method(scripted: ScriptedService) -> None:
    result = await methods(Timed(scripted))
    assert (result["model"], result["sets"]) == ("scripted", {"chat": 2, "code": 1})
    rows = {(row["set"], row["method"]): row for row in result["rows"]}
    assert list(rows) == [(name, kind) for name in PROMPTS for kind in ("off", "model", "ngram")]
    for (_, method), row in rows.items():
        speed = 6 / SECONDS[method]
        assert row["tokens_per_s"] == {"count": 3, "median": speed, "min": speed, "max": speed}
        ratio = SECONDS["off"] / SECONDS[method]
        assert row["ratio"] == {"count": 3, "median": ratio, "min": ratio, "max": ratio}
    chat = {method: rows["chat", method] for method in ("off", "model", "ngram")}
    assert [row["mean_acceptance_length"] for row in chat.values()] == [1.0, 3.0, 2.0]
    assert [row["acceptance_rate"] for row in chat.values()] == [None, 0.5, 1.0]
    assert [row["texts"] for row in chat.values()] == [{"compared": 6, "equal": 6}] * 3


async def test_methods_take_turns_with_the_same_requests(scripted: ScriptedService) -> None:
    timed = Timed(scripted)
    await methods(timed, seed=40)
    turns = [
        *("off", "model", "ngram") * 2,  # warm-up: one request of each set
        *("off", "off", "model", "model", "ngram", "ngram"),
        *("model", "model", "ngram", "ngram", "off", "off"),
        *("ngram", "ngram", "off", "off", "model", "model"),
        *("off", "model", "ngram", "model", "ngram", "off", "ngram", "off", "model"),
    ]
    assert timed.order == turns
    seeds = [body["seed"] for body in scripted.bodies[6:24]]
    assert seeds == [40, 41] * 9


async def test_another_text_is_counted(scripted: ScriptedService) -> None:
    timed = Timed(scripted)
    timed.texts = {"ngram": "other words"}
    rows = (await methods(timed))["rows"]
    equal = {(row["set"], row["method"]): row["texts"]["equal"] for row in rows}
    assert equal["chat", "model"] == 6
    assert equal["chat", "ngram"] == equal["code", "ngram"] == 0


def says(scripted: ScriptedService, refused: Any) -> None:
    model = {"id": "scripted", "refused_speculation_methods": refused}
    scripted.models = 200, [json.dumps({"data": [{"id": "other"}, model]}).encode()]


async def test_all_that_the_service_offers_is_measured(scripted: ScriptedService) -> None:
    """It is not even asked for the rest."""
    timed = Timed(scripted)
    lacking = {name: "not here" for name in COMPARED if name not in ("model", "ngram")}
    says(scripted, lacking)
    result = await run_for(timed, (), model="scripted")
    assert result["refused"] == lacking
    assert set(timed.order) == {row["method"] for row in result["rows"]} == set(SECONDS)
    assert result["config"]["methods"] == ("model", "ngram")


@pytest.mark.parametrize("told", [None, "nonsense", {}])
async def test_a_service_that_does_not_say_is_tried(scripted: ScriptedService, told: Any) -> None:
    says(scripted, told)
    result = await run_for(Timed(scripted), (), model="scripted")
    assert result["refused"] == dict.fromkeys(set(COMPARED) - set(SECONDS), "400: no heads here")
    assert {row["method"] for row in result["rows"]} == set(SECONDS)


async def test_what_was_asked_for_and_is_not_offered(scripted: ScriptedService) -> None:
    timed = Timed(scripted)
    with pytest.raises(PacelineError, match="the service refuses medusa: 400: no heads here"):
        await run_for(timed, ("medusa", "ngram"))
    timed.order.clear()
    says(scripted, dict.fromkeys(COMPARED[1:], "not here"))
    said = "scripted has no ngram: not here; it offers model"
    with pytest.raises(PacelineError, match=said):
        await run_for(timed, ("model", "ngram"), model="scripted")
    for nothing in (None, ""):
        says(scripted, {"ngram": nothing})
        with pytest.raises(PacelineError, match="scripted has no ngram: it does not say why; it"):
            await run_for(timed, ("ngram",), model="scripted")
    says(scripted, {"ngram": "x" * 301})
    with pytest.raises(PacelineError, match=r"has no ngram: x{300}; it offers"):
        await run_for(timed, ("ngram",), model="scripted")
    says(scripted, dict.fromkeys(COMPARED, "all is off"))
    with pytest.raises(PacelineError, match="scripted offers no method: all is off"):
        await run_for(timed, (), model="scripted")
    assert timed.order == []


async def test_a_draft_that_never_joins_is_waited_for_once_a_set(
    scripted: ScriptedService,
) -> None:
    timed = Timed(scripted)
    timed.num_proposed["model"] = timed.num_accepted["model"] = 0
    result = await methods(timed, rounds=1)
    measured_s = 3 * sum(SECONDS.values())
    waited_s = timed.now_s - measured_s - 2 * sum(SECONDS.values())
    longest_s = DRAFT_WAIT_S + SECONDS["model"] + 1
    assert DRAFT_WAIT_S <= waited_s / 2 <= longest_s
    assert {row["method"] for row in result["rows"]} == {"off", "model", "ngram"}


async def test_a_service_that_answers_nothing(scripted: ScriptedService) -> None:
    timed = Timed(scripted)

    async def refuse(body: dict[str, Any]) -> Answer:
        return 400, [timed.refusal]

    scripted.handler = refuse
    with pytest.raises(PacelineError, match="without speculation: no_heads, 400: no heads here"):
        await methods(timed)


async def test_a_request_that_fails_later_is_counted(scripted: ScriptedService) -> None:
    timed = Timed(scripted)

    async def sometimes(body: dict[str, Any]) -> Answer:
        if len(timed.order) >= 6 and body["speculation"]["method"] == "ngram":
            return 500, [b'{"error": {"message": "out of memory"}}']
        return await timed.answer(body)

    scripted.handler = sometimes
    rows = (await methods(timed))["rows"]
    failed = next(row for row in rows if row["method"] == "ngram")
    assert (failed["num_failed"], failed["texts"]["compared"]) == (6, 0)
    assert failed["example_errors"] == {"http_500": "500: out of memory"}


@pytest.mark.parametrize("rounds", [0, MAX_ROUNDS + 1])
def test_rounds_are_bounded(rounds: int) -> None:
    MethodsConfig(LiveConfig("http://x"), rounds=MAX_ROUNDS).check()
    with pytest.raises(ConfigError, match="--rounds"):
        MethodsConfig(LiveConfig("http://x"), rounds=rounds).check()


def test_names_of_methods() -> None:
    assert method_names(()) == ()
    assert method_names(("suffix", "model", "suffix")) == ("model", "suffix")
    for name in ("off", "magic"):
        with pytest.raises(ConfigError, match=f"'{name}' is none of them"):
            method_names((name,))


def test_sets_are_categories() -> None:
    prompts = [*PROMPTS["chat"], *PROMPTS["code"], Prompt("d", "", "D")]
    assert list(sets_of(prompts, ())) == ["chat", "code", "all"]
    assert sets_of(prompts, ("code", "chat")) == {"code": PROMPTS["code"], "chat": PROMPTS["chat"]}
    with pytest.raises(ConfigError, match="no set 'poems' of prompts, only chat, code, all"):
        sets_of(prompts, ("poems",))


def test_our_own_sets() -> None:
    assert len(SETS) == 4
    for name, texts in SETS.items():
        prompts = prompt_set(name)
        assert len(prompts) == len(set(texts)) >= 8
        assert {prompt.category for prompt in prompts} == {name}
        path, fields = prompts[0].fields()
        assert path.endswith("/chat/completions")
        assert fields["messages"][0]["content"] == texts[0]
