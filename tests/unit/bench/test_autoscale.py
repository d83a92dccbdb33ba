"""The autoscaling demonstration: load in phases, texts compared, moments found, a picture."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.bench.autoscale import (
    Demonstration,
    Phase,
    Replicas,
    Sample,
    moments,
    row,
    steady_figures,
)
from paceline.bench.autoscale_plot import picture
from paceline.bench.client import LoadClient
from paceline.errors import PacelineError
from tests.unit.bench.conftest import DONE, ScriptedService, event, text_event

PHASES = (Phase(1, 10), Phase(8, 20), Phase(1, 20), Phase(0, 10))


def sample(second: float, **replicas: int) -> Sample:
    return Sample(second, 1, Replicas(**replicas), 100.0 + second, None, 0.5)


RUN = [
    sample(5, targets=1, drafts=2, drafts_at_work=2),  # before the load: no answer to it
    sample(9, targets=1, drafts=1, drafts_at_work=1),
    sample(12, targets=1, drafts=1, drafts_starting=1, drafts_at_work=1),
    sample(15, targets=2, drafts=2, drafts_at_work=1),
    sample(16, targets=2, drafts=2, drafts_at_work=2),
    sample(33, targets=2, drafts=1, drafts_stopping=1, drafts_at_work=2),
    sample(35, targets=1, targets_stopping=1, drafts=1, drafts_at_work=1),
    sample(37, targets=1, drafts=1, drafts_at_work=1),
    sample(56, targets=1, drafts=0, drafts_stopping=1),
    sample(58, targets=1),
]


class TestResult:
    def test_how_long_replicas_take_to_follow(self) -> None:
        assert moments(RUN, PHASES) == {
            "second_draft_starts_s": 2.0,
            "second_draft_runs_s": 5.0,
            "second_draft_is_used_s": 6.0,
            "second_target_runs_s": 5.0,
            "second_draft_stops_s": 3.0,
            "second_draft_is_gone_s": 5.0,
            "second_target_is_gone_s": 7.0,
            "last_draft_is_gone_s": 8.0,
        }

    def test_what_has_not_happened_in_time(self) -> None:
        late = [sample(31, drafts=2, drafts_at_work=2), sample(59, drafts=2)]
        assert set(moments(late, PHASES).values()) == {None, 1.0}, "there was no second target"

    def test_figures_of_each_phase_are_of_its_second_half(self) -> None:
        rows = [row(one, [(35.0, 0.3), (36.0, 0.1), (37.5, 9.0)]) for one in RUN]
        figures = steady_figures(rows, PHASES)
        assert [f["clients"] for f in figures] == [1, 8, 1, 0]
        assert figures[0]["tokens_per_s"] == 109.0
        assert figures[1]["tokens_per_s"] is None, "no sample there"
        assert [r["ttft_p50_ms"] for r in rows[-4:-2]] == [300.0, 200.0]
        assert rows[-1]["ttft_p50_ms"] is None

    def test_picture(self) -> None:
        rows = [row(one, [(35.0, 0.3)]) for one in RUN]
        phases = [{"num_clients": p.num_clients, "seconds": p.seconds} for p in PHASES]
        assert picture({"samples": rows, "phases": phases}).startswith(b"\x89PNG")
        assert picture({"samples": [], "phases": phases}).startswith(b"\x89PNG")


async def demonstrate(scripted: ScriptedService, *phases: Phase) -> dict[str, Any]:
    async with LoadClient(scripted.url, "", 8, 10.0, time.monotonic) as client:
        run = Demonstration(client, "scripted", lambda: Replicas(targets=1), phases, 7)
        return await run.run(lambda text: None)


class TestRun:
    async def test_load_follows_the_phases(self, scripted: ScriptedService) -> None:
        result = await demonstrate(scripted, Phase(1, 0.6), Phase(3, 0.6), Phase(0, 0.6))
        summary = result["summary"]
        assert (summary["failures"], summary["different_texts"]) == ({}, 0)
        alone = [b for b in scripted.bodies if b["speculation"]["method"] == "off"]
        asked = scripted.bodies[len(alone) :]
        assert [body["prompt"] for body in alone] == ["story 0", "story 1", "story 2"]
        assert summary["requests"] == len(asked)
        assert {body["prompt"] for body in asked} == {"story 0", "story 1", "story 2"}
        assert {(body["max_tokens"], body["ignore_eos"]) for body in asked} == {(7, True)}
        assert {s["clients"] for s in result["samples"]} == {0, 1, 3}
        assert result["samples"][0]["targets"] == 1

    async def test_failures_and_other_texts_are_counted(self, scripted: ScriptedService) -> None:
        async def answer(body: dict[str, Any]) -> Any:
            is_load = body["speculation"]["method"] == "model"
            if is_load and body["prompt"] == "story 0":
                return 503, [b'{"error": {"code": "target_lost", "message": "gone"}}']
            text = "other" if is_load else "text"
            return 200, [text_event(text), event({"choices": []}), DONE]

        scripted.handler = answer
        summary = (await demonstrate(scripted, Phase(2, 0.6)))["summary"]
        assert summary["failures"].keys() == {"target_lost"}
        assert summary["different_texts"] > 0
        num_failed = summary["failures"]["target_lost"]
        assert summary["requests"] == num_failed + summary["different_texts"]

    async def test_a_target_that_does_not_answer(self, scripted: ScriptedService) -> None:
        async def refuse(body: dict[str, Any]) -> Any:
            return 429, [b'{"error": {"code": "queue_full", "message": "full"}}']

        scripted.handler = refuse
        with pytest.raises(PacelineError, match="the target alone failed: 429: full"):
            await demonstrate(scripted, Phase(1, 0.6))
