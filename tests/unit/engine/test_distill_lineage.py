"""A card says when a draft may have learned from the chats that it is measured on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.distill import Budget
from paceline.engine.distill_data import DataSettings
from paceline.engine.distill_lineage import earlier_runs, held_out_note
from tests.unit.engine.test_distill_run import job, run
from tests.unit.engine.tiny_chat import save_chat_model

MADE = "24 chats that the target made up, 900 tokens; the last 4 are held out"
MORE = "48 chats that the target made up, 1,800 tokens; the last 6 are held out"
FILE = "40 chats of chats.jsonl, 700 tokens; the last 4 are held out"
GROWN = "50 chats of chats.jsonl, 900 tokens; the last 4 are held out"
LOG = "; besides 7 rejected places in 3 texts of the log"


@pytest.mark.parametrize(
    ("seed", "data", "is_said"),
    [
        (0, MADE, False),
        (0, MADE + LOG, False),
        (0, MORE, True),
        (1, MORE, False),
        (0, FILE, False),
        (2, MADE, True),
    ],
)
def test_other_seeds_or_the_same_chats(seed: int, data: str, is_said: bool) -> None:
    earlier = [{"seed": 0, "data": MADE}, {"seed": 2, "data": MORE}]
    assert ("may have learned" in held_out_note(earlier, seed, data)) == is_said


@pytest.mark.parametrize(("data", "is_said"), [(FILE, False), (GROWN, True), (MADE, False)])
def test_files_have_no_seed(data: str, is_said: bool) -> None:
    assert bool(held_out_note([{"seed": 0, "data": FILE + LOG}], 3, data)) == is_said


@pytest.mark.parametrize(
    "report",
    [None, "{", "[]", "[" * 50_000, '{"made": 3}', '{"made": {"recipe": {}}}',
     '{"made": {"data": "x", "recipe": {"seed": "x"}}}',
     '{"made": {"data": "x", "recipe": {"seed": 1, "init": "a"}}}',
     '{"made": {"data": "x", "recipe": {"seed": 1, "init": "a"}, "earlier": [3]}}'],
)  # fmt: skip
def test_a_draft_that_does_not_say(report: str | None, tmp_path: Path) -> None:
    if report is not None:
        (tmp_path / "report.json").write_text(report)
    assert earlier_runs(tmp_path) is None
    assert "does not say what it learned from" in held_out_note(None, 0, MADE)


def test_a_draft_of_a_draft_of_a_draft(tmp_path: Path) -> None:
    """The first run's seed is remembered, and its chats are not held out unsaid."""
    target = save_chat_model("llama", tmp_path / "target")
    data = DataSettings(num_chats=12, length=40, held_out=4)
    more = replace(data, num_chats=16)
    short: dict[str, Any] = {"budget": Budget(steps=1), "num_layers": 1}
    runs = [("a", data, None), ("b", replace(data, seed=1), "a"), ("c", more, "b")]
    made = []
    for name, settings, init in [*runs, ("d", data, "b"), ("e", replace(data, seed=2), "b")]:
        came_from = tmp_path / init / "draft" if init else None
        run(job(target, tmp_path / name, data=settings, init=came_from, **short))
        made.append(json.loads((tmp_path / name / "draft/report.json").read_text())["made"])
    assert ["held_out_note" in m for m in made] == [False, False, True, False, False]
    assert [r["seed"] for r in made[2]["earlier"]] == [1, 0]
    assert "**Held out**: the draft" in (tmp_path / "c/draft/README.md").read_text()
    (tmp_path / "b/draft/report.json").unlink()
    unknown = run(job(target, tmp_path / "f", data=data, init=tmp_path / "b/draft", **short))
    assert "does not say" in unknown["made"]["held_out_note"]
