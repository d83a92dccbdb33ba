"""`speculation.method`: what a deployment can honor goes to the target as it was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.config import Offer
from paceline.gateway.service import ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import RoundDelta
from paceline.methods import METHODS, SpeculationMethod
from tests.unit.gateway.conftest import FakeTargets

RoundOf = Callable[..., RoundDelta]
EVERYTHING = Offer("model", has_drafts=True, has_heads=True)
OFF = Offer("off", has_drafts=False, has_heads=True)
ALONE = Offer("ngram", has_drafts=False, has_heads=False)


@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_method_reaches_the_target(
    method: SpeculationMethod | None, stream: bool, make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(offer=EVERYTHING)
    harness.targets.script = [round_of("a", "length")]
    answer = await harness.complete(stream=stream, speculation={"method": method})
    assert answer.status_code == 200
    assert harness.targets.requests[0].speculation.method == method


@pytest.mark.parametrize(
    ("offer", "method", "reason"),
    [
        *(
            (OFF, method, "speculation is off in this deployment")
            for method in METHODS
            if method != "off"
        ),
        (ALONE, "model", "this model has no draft replicas"),
        (ALONE, "hybrid", "this model has no draft replicas"),
        (ALONE, "medusa", "this model has no Medusa heads"),
        (Offer(), "medusa", "this model has no Medusa heads"),
    ],
)
async def test_what_cannot_be_honored_is_refused(
    offer: Offer, method: str, reason: str, make_harness: Any
) -> None:
    harness = make_harness(offer=offer)
    for answer in (
        await harness.complete(speculation={"method": method}),
        await harness.chat(speculation={"method": method}, stream=True),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": f"'speculation.method' cannot be '{method}': {reason}.",
            "type": "invalid_request_error",
            "param": "speculation.method",
            "code": "unsupported_parameter",
        }
    assert harness.targets.requests == []


@pytest.mark.parametrize("offer", [EVERYTHING, OFF, ALONE, Offer()])
async def test_models_say_what_will_be_taken(
    offer: Offer, make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(offer=offer)
    harness.targets.script = [round_of("a", "length")]
    model = (await harness.get("/v1/models/toy")).json()
    refused = model["refused_speculation_methods"]
    for method in METHODS:
        answer = await harness.complete(speculation={"method": method})
        assert (method in model["speculation_methods"]) is (answer.status_code == 200)
        assert (method in refused) is (answer.status_code == 400)
        if method in refused:
            assert answer.json()["error"]["message"].endswith(f": {refused[method]}.")


@pytest.mark.parametrize("offer", [OFF, ALONE, Offer()])
@pytest.mark.parametrize("speculation", [None, {}, {"method": None}, {"method": "off"}])
async def test_off_and_the_deployment_s_own_are_always_there(
    offer: Offer, speculation: Any, make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(offer=offer)
    harness.targets.script = [round_of("a", "length")]
    assert (await harness.complete(speculation=speculation)).status_code == 200


async def test_each_model_has_an_offer_of_its_own(make_harness: Any, round_of: RoundOf) -> None:
    targets = FakeTargets([round_of("a", "length")])
    second = ServedModel("second", ToyTokenizer(), targets, 32, offer=ALONE)
    harness = make_harness(more_models=[second], offer=EVERYTHING)
    harness.targets.script = [round_of("a", "length")]
    listed = (await harness.get("/v1/models")).json()["data"]
    assert [model["speculation_methods"] for model in listed] == [
        list(METHODS), ["ngram", "suffix", "auto", "off"],
    ]  # fmt: skip
    for model, method, status in (
        ("toy", "medusa", 200), ("second", "medusa", 400), ("second", "suffix", 200),
    ):  # fmt: skip
        answer = await harness.complete(model=model, speculation={"method": method})
        assert answer.status_code == status
