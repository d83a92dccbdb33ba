"""Scenarios, faults and verdicts agree with each other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from chaos import report, run, soak
from chaos.__main__ import SPECIAL
from chaos.checks import Findings
from chaos.faults import all_faults
from chaos.scenarios import BY_NAME, SCENARIOS, Scenario, draw_random

KEYS = {
    "scenario",
    "seed",
    "faults_fired",
    "text_identical",
    "tokens_lost",
    "tokens_duplicated",
    "requests_failed",
    "worst_stall_rounds",
}
HELPERS = {"base", "signals", "link"}


def test_every_file_is_one_fault_of_its_name() -> None:
    folder = Path(soak.__file__).parent / "faults"
    files = {path.stem for path in folder.glob("*.py")} - HELPERS - {"__init__"}
    assert set(all_faults()) == files


def test_every_step_names_a_fault_and_every_kind_is_carried_out() -> None:
    known = all_faults()
    assert {step.fault for scenario in SCENARIOS for step in scenario.steps} <= set(known)
    assert {scenario.kind for scenario in SCENARIOS} == {"faults", *SPECIAL}
    assert {*soak.KILLS, *soak.OTHERS} <= set(known)


def test_every_fault_is_in_a_scenario() -> None:
    used = {step.fault for scenario in SCENARIOS for step in scenario.steps}
    assert set(all_faults()) - used == {"drafts_gone"}  # drafts_dead has its own script


def test_random_scenarios_are_the_seeds() -> None:
    assert draw_random(3) == draw_random(3)
    assert len({draw_random(seed).steps for seed in range(20)}) == 20
    for seed in range(50):
        for step in draw_random(seed).steps:
            assert step.until_s > step.at_s
            assert not BY_NAME[step.fault].may_fail


def verdict(findings: Findings, fired: int = 1, scenario: Scenario | None = None) -> list[str]:
    result = run.Result("x", 1, "", faults_fired=fired, findings=findings)
    run.judge(result, scenario or BY_NAME["kill_draft"])
    return result.violations


def test_a_run_without_a_fault_is_broken() -> None:
    assert verdict(Findings(finished=3)) == []
    assert verdict(Findings(finished=3), fired=0) == ["no fault fired"]


def test_a_run_without_an_answer_is_broken() -> None:
    assert verdict(Findings()) == ["no request finished"]


def test_failures_are_broken_unless_allowed() -> None:
    failed = Findings(finished=1, failed=1, errors=Counter(connection_lost=1))
    assert verdict(failed) == ["failed requests: {'connection_lost': 1}"]
    assert verdict(failed, scenario=BY_NAME["kill_gateway"]) == []


@pytest.mark.parametrize(
    "findings",
    [
        Findings(finished=1, differing=["request 1"]),
        Findings(finished=1, tokens_lost=1),
        Findings(finished=1, tokens_duplicated=1),
    ],
)
def test_a_wrong_text_is_broken_in_every_scenario(findings: Findings) -> None:
    for scenario in SCENARIOS:
        assert verdict(findings, scenario=scenario)


def test_the_json_has_the_fields_that_others_read(tmp_path: Path) -> None:
    result = run.Result("noop", 7, "", faults_fired=1, round_s=0.02)
    result.findings = Findings(requests=2, finished=2, worst_stall_s=0.5)
    report.write([result], tmp_path / "out.json")
    (row,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert row.keys() >= KEYS
    assert (row["worst_stall_rounds"], row["text_identical"]) == (25.0, True)


def test_lines_say_what_broke() -> None:
    result = run.Result("noop", 7, "", violations=["it fell over"])
    assert report.line(result).endswith("BROKEN: it fell over")
    skipped = run.Result("noop", 7, "", skipped="no such thing here")
    assert report.line(skipped).endswith("skipped: no such thing here")
    assert report.summary([result, skipped]).endswith("1 broken, 1 skipped")


def test_what_was_not_watched_is_not_called_good() -> None:
    row = report.line(run.Result("bad_model", 1, "", faults_fired=3)).split()
    assert row == ["bad_model", "1", "3", "0", "0", "-", "-", "-", "-", "-", "0.0", "ok"]


def test_the_table_has_the_worst_of_all_seeds() -> None:
    good = run.Result("noop", 1, "", faults_fired=1, round_s=0.02, draft_back_s=3.0)
    good.findings = Findings(requests=2, tokens_compared=9, worst_stall_s=0.5, num_gaps=4)
    bad = run.Result("noop", 2, "", faults_fired=1, round_s=0.01, violations=["it fell over"])
    bad.findings = Findings(requests=3, failed=1, tokens_compared=9, worst_stall_s=0.4, num_gaps=4)
    bad.findings.differing.append("request 1")
    other = run.Result("kill_draft", 1, "", skipped="no such thing here")
    rows = report.table([good, other, bad]).splitlines()[-2:]
    assert rows[0].split(maxsplit=11) == [
        *("noop", "2", "2", "5", "1", "NO", "0", "0", "40.0", "0.50", "3.0"),
        "BROKEN: it fell over",
    ]
    assert rows[1].split(maxsplit=2) == ["kill_draft", "1", "skipped: no such thing here"]
