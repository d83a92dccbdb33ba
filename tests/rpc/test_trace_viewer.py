"""`paceline trace` on the files that a gateway, a target and a draft really write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from tests.rpc.traced import traced_fleet

PARTS = ("draft", "wire_out", "window", "queue", "verify", "sample", "wire_back", "rewind")
DRAFT_PARTS = ("draft", "window", "wire_back", "rewind")
WAITING: dict[str, Any] = {"step_ms": 25.0, "draft_ms": 2.0, "error_rate": 0.3}


def viewed(folder: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["trace", "--dir", str(folder), "--json", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    data: dict[str, Any] = json.loads(result.stdout)
    return data


async def test_the_viewer_sees_what_the_target_measured(tmp_path: Path) -> None:
    """The same rounds, in spans of three processes and in the deltas of the target's own clock."""
    async with traced_fleet({"sample_ratio": 1.0, "file_dir": str(tmp_path)}, **WAITING) as made:
        answer = await made.complete(speculation={"include_rounds": True})
    assert made.close() == 0
    data = viewed(tmp_path)
    assert data["trace_id"] == answer.headers["x-paceline-trace-id"]
    told = answer.json()["speculation"]["rounds"]
    keys = ("round", "proposed", "accepted")
    assert [[each[key] for key in keys] for each in data["rounds"]] == [
        [each[key] for key in keys] for each in told
    ]
    first, *others = zip(data["rounds"], told, strict=True)
    for each, own in others:
        assert each["wall_ms"] == pytest.approx(own["wall_ms"], abs=0.01)
        for part in ("queue", "verify", "sample", "wire_out"):
            assert each[f"{part}_ms"] == pytest.approx(own[f"{part}_ms"], abs=0.1), part
        # The draft's own spans say more of its part than proposals do: only its sum is the same.
        shares = [sum(one[f"{part}_ms"] for part in DRAFT_PARTS) for one in (each, own)]
        assert shares[0] == pytest.approx(shares[1], abs=0.2)
    before = first[0]["wall_ms"] - first[1]["wall_ms"]
    assert first[0]["queue_ms"] - first[1]["queue_ms"] == pytest.approx(before, abs=0.01)
    assert before >= 0
    assert sum(each["draft_ms"] for each in data["rounds"]) > 0


async def test_the_parts_add_up_to_rounds_and_those_to_the_request(tmp_path: Path) -> None:
    async with traced_fleet({"sample_ratio": 1.0, "file_dir": str(tmp_path)}, **WAITING) as made:
        await made.complete(n=2)
    assert made.close() == 0
    data = viewed(tmp_path, "--last")
    for each in data["rounds"]:
        total = sum(each[f"{part}_ms"] for part in PARTS)
        assert total == pytest.approx(each["wall_ms"], abs=1e-6)
    ends = []
    for choice in (0, 1):
        total = sum(each["wall_ms"] for each in data["rounds"] if each["choice"] == choice)
        ends.append(total)
        assert total <= data["request_ms"] + 0.01
    assert max(ends) >= 0.95 * data["request_ms"]


async def test_all_choices_of_all_prompts_are_there(tmp_path: Path) -> None:
    """The target counts each prompt's choices from 0; the viewer has them as the answer does."""
    async with traced_fleet({"sample_ratio": 1.0, "file_dir": str(tmp_path)}) as made:
        answer = await made.complete(prompt=["Once upon", "There was"], n=2, max_tokens=8)
    assert made.close() == 0
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]
    data = viewed(tmp_path)
    assert {each["choice"] for each in data["rounds"]} == {0, 1, 2, 3}
    assert len(data["rounds"]) == len(made.targets.deltas)


async def test_a_slow_request_that_nobody_sampled(tmp_path: Path) -> None:
    settings = {"sample_ratio": 0.0, "slow_request_s": 0.001, "file_dir": str(tmp_path)}
    async with traced_fleet(settings, **WAITING) as made:
        await made.complete()
    assert made.close() == 0
    data = viewed(tmp_path)
    assert len(data["rounds"]) == len(made.targets.deltas)
    for each, delta in zip(data["rounds"][1:], made.targets.deltas[1:], strict=True):
        for part in PARTS:
            own = getattr(delta, f"{part}_ms")
            assert each[f"{part}_ms"] == pytest.approx(own, abs=0.01), part


async def test_the_last_of_several_and_one_that_was_cut_short(tmp_path: Path) -> None:
    async with traced_fleet({"sample_ratio": 1.0, "file_dir": str(tmp_path)}) as made:
        first = await made.complete(max_tokens=40, temperature=0)
        text = first.json()["choices"][0]["text"]
        last = await made.complete(max_tokens=40, temperature=0, stop=[text[6:9]])
    assert made.close() == 0
    assert viewed(tmp_path)["trace_id"] == last.headers["x-paceline-trace-id"]
    data = viewed(tmp_path, "--trace-id", first.headers["x-paceline-trace-id"])
    assert sum(each["accepted"] + 1 for each in data["rounds"]) >= 40
