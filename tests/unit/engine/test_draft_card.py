"""What figures promise, against the formulas by hand."""

from __future__ import annotations

import pytest

from paceline.engine.draft_card import card, speedup, tokens_per_round

DRAFT = {
    "kind": "draft", "name": "my-draft", "target": "tiny", "num_chats": 64,
    "acceptance": {
        "num_tokens": 10179, "agreement": 0.5,
        "coupled": {"0.7": 0.4, "1.0": 0.3}, "optimal": {"0.7": 0.45, "1.0": 0.35},
    },
    "cost": {"target_ms": 60.0, "draft_ms": 6.0, "ratio": 0.1},
    "speedup": {
        key: {"colocated": 1.5, "num_tokens": 2, "hidden": 2.0, "num_hidden": 10}
        for key in ("0", "0.7", "1.0")
    },
    "machine": "cpu", "measure_command": "again",
}  # fmt: skip


def test_tokens_per_round_are_the_sum_of_powers() -> None:
    assert tokens_per_round(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert tokens_per_round(0.0, 5) == 1.0
    assert tokens_per_round(1.0, 5) == 6.0


@pytest.mark.parametrize(("acceptance", "cost"), [(0.5, 0.1), (0.8, 0.2), (0.9, 0.02)])
def test_the_best_number_is_the_best(acceptance: float, cost: float) -> None:
    found = speedup(acceptance, cost)
    by_number = [tokens_per_round(acceptance, k) / (1 + k * cost) for k in range(17)]
    assert found.colocated == max(by_number)
    assert by_number[found.num_tokens] == found.colocated
    assert found.num_hidden == min(int(1 / cost), 16)
    assert found.hidden == tokens_per_round(acceptance, found.num_hidden)


def test_a_draft_that_does_not_pay_is_not_used() -> None:
    found = speedup(0.1, 0.5)
    assert (found.num_tokens, found.colocated) == (0, 1.0)
    slow = speedup(0.9, 1.5)  # slower than its target: it hides not even one token
    assert (slow.num_hidden, slow.hidden) == (0, 1.0)


def test_the_card_shows_the_figures() -> None:
    text = card(DRAFT)
    assert "# my-draft" in text
    assert "10,179 answer tokens of 64 held-out chats | T = 0 | T = 0.7 | T = 1.0 |" in text
    assert "| 0.500 | 0.400 | 0.300 |" in text
    assert "| 1.50 (K = 2) |" in text
    assert "costs 0.10 of a target step" in text
    assert "How it was made" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1


@pytest.mark.parametrize(
    ("budget", "said"),
    [({"steps": 40, "seconds": 0.0}, "same weights"), ({"steps": 0, "seconds": 90.0}, "by time")],
)
def test_the_card_says_whether_it_can_be_repeated(budget: dict[str, float], said: str) -> None:
    made = {
        "data": "12 chats", "recipe": {"seed": 5, "student_config": {}}, "machine": "cpu",
        "progress": {"steps": 40, "tokens": 9000, "seconds": 60.0}, "budget": budget,
        "command": "paceline distill tiny",
    }  # fmt: skip
    text = card({**DRAFT, "made": made})
    assert said in text
    assert "40 steps over 9,000 tokens in 1.0 minutes" in text
    assert "student_config" not in text
