"""The real drivers in two processes, with passes of a few milliseconds."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from paceline.bench.ceiling import Costs
from paceline.bench.orchestration import run_suite
from paceline.bench.report import rows
from paceline.bench.schemes import Cell, Effort, Kind, Scheme, engine_info, steady
from paceline.bench.serving import app_config, helpers, service
from paceline.bench.suites import COLOCATED, NO_DRAFT, Group, Steps
from paceline.engine.base import StepItem
from paceline.engine.scripted import ScriptedEngine
from paceline.generation import GenerateRequest, TokenOrigin
from paceline.sampling.params import SamplingParams

FAST = Costs(draft_ms=0.5, verify_ms=4.0, draft_row_ms=0.0, verify_row_ms=0.0)
GREEDY = SamplingParams(temperature=0.0)
OURS = Scheme(Kind.OURS, fan_out=2)


def alone(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What the target writes by itself."""
    engine = ScriptedEngine(engine_info("alone", 4096, 1))
    engine.add(1)
    text = list(prompt)
    start = 0
    for _ in range(num_tokens):
        result = engine.step([StepItem(1, start, tuple(text[start:]), 1, GREEDY)])[0]
        start = len(text)
        text.append(result.token_ids[0])
    return text[len(prompt) :]


async def test_texts_are_the_targets_own_and_drafts_do_help() -> None:
    setting = steady(FAST, 2.0, 2, 0.75)
    async with helpers() as others, service(setting, OURS, others, 2) as running:
        request = GenerateRequest("r", (1, 2, 3), 300, GREEDY, ignore_eos=True)
        text, origins = list[int](), list[TokenOrigin]()
        async with aclosing(running.driver.generate(request)) as deltas:
            async for delta in deltas:
                if delta is not None:
                    text += delta.token_ids
                    origins += delta.origins
        wire = await others.wire(setting)
    assert text == alone((1, 2, 3), 300)
    assert origins.count(TokenOrigin.ACCEPTED) > 50
    # The relay only ever adds to what the loopback takes.
    assert wire.delay_us is None or wire.measured_rtt_ms >= 1e-3 * wire.delay_us


async def test_a_suite_measures_every_cell_in_turn() -> None:
    setting = steady(FAST, 0.0, 2, 0.75)
    cells = tuple(Cell(setting, scheme) for scheme in (NO_DRAFT, COLOCATED, OURS))
    twin = steady(FAST, 1.0, 2, 0.75)
    group = Group("tiny", (*cells, Cell(twin, NO_DRAFT)))
    steps = Steps("steps", setting, (NO_DRAFT, OURS), (1, 2, 1))
    said: list[str] = []
    outcomes = await run_suite("try", (group, steps), Effort(2, 0.1, 0.2), said.append)
    made = rows(outcomes)
    assert [row["scheme"] for row in made[:4]] == [
        "no_draft",
        "colocated_lockstep",
        "ours",
        "no_draft",
    ]
    # No wire: one measurement for both round trips.
    assert made[0]["tokens_per_s"] == made[3]["tokens_per_s"]
    assert (made[0]["rtt_ms"], made[3]["rtt_ms"]) == (0.0, 1.0)
    assert [row["batch"] for row in made[4:]] == [1, 1, 2, 2, 1, 1]
    assert [row["step"] for row in made[4:]] == [0, 0, 1, 1, 2, 2]
    assert all(row["vs_no_draft"] is not None for row in made if row["scheme"] == "ours")
    assert all(row["failures"] == 0 for row in made)
    assert all(row["tokens_per_s"] > 0 and 0 < row["target_busy"] <= 1.01 for row in made)
    drafted = [row for row in made if row["scheme"] == "ours"]
    assert all(0 < row["draft_busy"] <= 1.01 for row in drafted)
    order = [sentence for sentence in said if "tiny" in sentence]
    assert [text.split(", ")[-2] for text in order] == [
        "no_draft",
        "colocated_lockstep",
        "ours",
    ] * 2


@pytest.mark.parametrize(
    ("scheme", "method", "lookahead", "k"),
    [
        (NO_DRAFT, "off", "adaptive", 4),
        (Scheme(Kind.OURS, 6, 1), "model", "fixed", 6),
        (OURS, "model", "adaptive", 4),
    ],
)
def test_a_scheme_is_a_configuration(scheme: Scheme, method: str, lookahead: str, k: int) -> None:
    speculation = app_config(steady(FAST, 0.5, 8, 0.5), scheme, 8).speculation
    assert speculation.method == method
    assert speculation.lookahead == lookahead
    assert speculation.num_speculative_tokens == k
    assert speculation.max_fan_out == scheme.fan_out
