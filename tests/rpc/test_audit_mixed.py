"""Whatever a request may ask for is audited as it was planned: a right service raises nothing."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import pytest

from paceline.config import ModelConfig
from paceline.engine.base import Engine
from paceline.engine.loader import load_engine
from tests.rpc.audit_world import OffByOne, lockstep

NUM_REQUESTS = 24
CHOICES: dict[str, tuple[Any, ...]] = {
    "n": (1, 1, 2),
    "stop": ([], [], ["a"]),
    "logit_bias": ({}, {"65": 3.0, "66": -100.0}),
    "presence_penalty": (0.0, 0.8, -1.0),
    "frequency_penalty": (0.0, 0.5),
    "repetition_penalty": (1.0, 1.3),
    "top_k": (0, 3, 20),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.1),
    "min_tokens": (0, 4),
    "stop_token_ids": ([], [70, 71]),
    "ignore_eos": (False, True),
    "max_tokens": (1, 7, 24),
    "guided_regex": (None, None, None, "[a-f]{3,9}"),
}


def load(error_rate: float = 0.0) -> Engine:
    model = ModelConfig(num_kv_blocks=256, max_model_len=512, toy_error_rate=error_rate)
    return load_engine(model)


def some_fields(random: Random) -> dict[str, Any]:
    """A third of everything, at random."""
    fields = {
        name: random.choice(values)
        for name, values in CHOICES.items()
        if name == "max_tokens" or random.random() < 1 / 3
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if "guided_regex" in fields:
        fields.pop("ignore_eos", None)
    most = fields["max_tokens"]
    return fields | {"min_tokens": min(fields.get("min_tokens", 0), most)}


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection", "block"])
async def test_mixed(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    deployed = "coupled" if mode == "greedy" else mode
    audited = lockstep(load(), load(0.3), deployed)
    random = Random(f"mixed {mode}")
    for _ in range(NUM_REQUESTS):
        temperature = 0.0 if mode == "greedy" else random.choice((0.5, 1.0, 1.7))
        await audited.ask(temperature=temperature, **some_fields(random))
        await audited.audited()
    counts = audited.counts
    assert not audited.has_alarm
    assert (counts.num_requests, counts.num_ties, counts.skipped) == (NUM_REQUESTS, 0, {})
    assert counts.num_tokens > 5 * NUM_REQUESTS
    assert audited.num_accepted > NUM_REQUESTS
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[a-f]{3,20}"},
        {"repetition_penalty": 1.3, "top_p": 0.9},
        {"temperature": 0.002, "max_tokens": 8},
    ],
    ids=["grammar", "unknown law", "cold"],
)
async def test_where_no_law_is_known_texts_are_compared(fields: dict[str, Any]) -> None:
    """Off by one, in rejection mode: the undrafted text alone gives it away."""
    target = OffByOne(load().info)
    audited = lockstep(target, load(0.3), "rejection", tie_tolerance=0.01)
    assert await audited.until_alarm(200, **({"temperature": 1.0} | fields)) > 1
