"""A failing schedule is made small, keeps breaking the same rule, and is replayed from its text."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chaos import planted, simulate
from paceline.testing.draw import draw_scenario
from paceline.testing.faults import NUMBERS
from paceline.testing.shrink import broken_rule, from_json, shrink, to_json

ROOT = Path(__file__).resolve().parents[2]


def first_broken(bug):
    for seed in range(planted.MAX_SEEDS):
        rule = broken_rule(draw_scenario(seed), planted.BUGS[bug])
        if rule is not None:
            return draw_scenario(seed), rule
    raise AssertionError(f"{bug} was not found")


def size(scenario):
    numbers = sum(getattr(scenario.faults, name) for name in NUMBERS)
    lengths = sum(len(c.request.prompt_token_ids) + c.request.max_tokens for c in scenario.clients)
    return len(scenario.clients) + scenario.num_targets + scenario.num_drafts + numbers + lengths


@pytest.mark.parametrize("seed", range(40))
def test_any_scenario_survives_its_text(seed):
    scenario = draw_scenario(seed)
    assert from_json(to_json(scenario)) == scenario
    assert "\n" not in to_json(scenario)


@pytest.mark.parametrize("bug", ["resumes one token late", "commits a rejected token"])
def test_a_failure_shrinks_to_one_that_breaks_the_same_rule(bug):
    scenario, rule = first_broken(bug)
    small, num_tries = shrink(scenario, lambda s: broken_rule(s, planted.BUGS[bug]), 150)
    assert num_tries <= 150
    assert broken_rule(small, planted.BUGS[bug]) == rule
    assert broken_rule(small) is None
    assert size(small) < size(scenario)
    assert len(small.clients) <= 2


def test_what_does_not_fail_is_not_shrunk():
    scenario = draw_scenario(1)
    assert shrink(scenario, broken_rule) == (scenario, 1)


def test_shrinking_stops_when_nothing_smaller_fails():
    """The rule here: two clients or more, and any kill. Nothing else matters, so all else goes."""
    scenario = replace(draw_scenario(0), clients=draw_scenario(0).clients[:1] * 5)
    scenario = replace(scenario, faults=replace(scenario.faults, num_kills=3, num_cuts=2, drop=0.5))

    def rule_of(candidate):
        is_bad = len(candidate.clients) >= 2 and candidate.faults.num_kills
        return "two and a kill" if is_bad else None

    small, _ = shrink(scenario, rule_of, 10_000)
    assert len(small.clients) == 2
    assert (small.faults.num_kills, small.faults.num_cuts, small.faults.drop) == (1, 0, 0)
    assert all(client.request.max_tokens == 1 for client in small.clients)


def test_the_printed_command_fails_the_same_way(capsys):
    bug = "sends the whole request again"
    code = simulate.main(["--seeds", "300", "--jobs", "1", "--bug", bug])
    printed = capsys.readouterr().out
    assert code == 1
    rule = printed.split("breaks a rule: ")[1].splitlines()[0]
    command = shlex.split(printed.splitlines()[-1])
    assert command[:3] == ["python", "-m", "chaos.simulate"]
    done = subprocess.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, f"breaks a rule: {rule}\n")


@pytest.mark.long
def test_figures_do_not_depend_on_the_number_of_processes(tmp_path):
    figures = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        arguments = ["--seeds", "250", "--start", "7", "--jobs", jobs, "--json", str(path)]
        assert simulate.main(arguments) == 0
        figures.append(json.loads(path.read_text()))
    first, second = (
        {key: value for key, value in each.items() if "second" not in key and "_per_s" not in key}
        for each in figures
    )
    assert first == second
    assert (first["seeds"], first["start"], first["failed"]) == (250, 7, None)
    assert first["tokens_checked"] > 1_000


def test_runs_that_met_too_little_fail(monkeypatch, capsys):
    tally = simulate.Tally(num_seeds=simulate.MIN_SEEDS)
    tally.fired.update(drop=1)
    monkeypatch.setattr(simulate, "simulate", lambda *_: tally)
    assert simulate.main(["--seeds", "1"]) == 1
    assert "never met: drop OpenSession" in capsys.readouterr().out
