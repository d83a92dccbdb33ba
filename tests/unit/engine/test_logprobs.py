"""Log-probabilities against plain Python, ties, and rows that no healthy model produces."""

from __future__ import annotations

import json
import math

import pytest
import torch

from paceline.engine import logprobs
from paceline.engine.logprobs import MIN_LOGPROB, token_logprobs
from paceline.generation import TokenLogprobs

INF, NAN = float("inf"), float("nan")


def expected(row: list[float], token_id: int, num_top: int) -> TokenLogprobs:
    peak = max(row)
    scale = peak + math.log(math.fsum(math.exp(logit - peak) for logit in row))
    ranked = sorted(range(len(row)), key=lambda i: -row[i])[:num_top]
    rank = 1 + sum(logit > row[token_id] for logit in row)
    top = tuple((i, row[i] - scale) for i in ranked)
    return TokenLogprobs(token_id, row[token_id] - scale, rank, top)


def assert_close(got: TokenLogprobs, want: TokenLogprobs) -> None:
    assert (got.token_id, got.rank) == (want.token_id, want.rank)
    assert [i for i, _ in got.top] == [i for i, _ in want.top]
    assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
    assert [v for _, v in got.top] == pytest.approx([v for _, v in want.top], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 33, 99])
def test_equals_plain_python(num_top: int, dtype: torch.dtype) -> None:
    """Rounded logits, so that many ids tie; one of them at the last place of the list."""
    torch.manual_seed(num_top)
    logits = (torch.randn(12, 33) * 3).round().to(dtype)
    token_ids = torch.randint(33, (12,)).tolist()
    got = token_logprobs(logits, token_ids, num_top)
    assert len(got) == 12
    for entry, row, token_id in zip(got, logits.tolist(), token_ids, strict=True):
        assert_close(entry, expected(row, token_id, num_top))


def test_ties_at_the_last_place_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4000] = 1.0
    (entry,) = token_logprobs(logits, [7], 4)
    assert [token_id for token_id, _ in entry.top] == [4000, 0, 1, 2]
    assert entry.rank == 2


def test_parts_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    logits = torch.randn(11, 40)
    whole = token_logprobs(logits, list(range(11)), 3)
    monkeypatch.setattr(logprobs, "_MAX_LOGITS", 90)
    assert token_logprobs(logits, list(range(11)), 3) == whole


def test_odd_rows_are_finite_and_hurt_no_other_row() -> None:
    good = [0.5, 3.0, 2.0, -INF]
    odd = [[NAN] * 4, [-INF] * 4, [1.0, NAN, 2.0, -INF], [INF, 1.0, INF, NAN], [3e38, -3e38, 0, 0]]
    logits = torch.tensor([*odd, good])
    entries = token_logprobs(logits, [1] * 6, 4)
    for entry in entries:
        values = [entry.logprob, *(value for _, value in entry.top)]
        assert all(MIN_LOGPROB <= value <= 0.0 for value in values)
        json.dumps(values, allow_nan=False)
    assert entries[0].logprob == entries[1].logprob == entries[2].logprob == MIN_LOGPROB
    assert entries[0].top == tuple((i, MIN_LOGPROB) for i in range(4))
    assert entries[2].top[0][0] == 2
    assert entries[-1] == token_logprobs(torch.tensor([good]), [1], 4)[0]
    assert entries[-1].top[-1] == (3, MIN_LOGPROB)


def test_no_rows_no_entries() -> None:
    assert token_logprobs(torch.empty(0, 9), [], 5) == []


@pytest.mark.parametrize(("token_ids", "num_top", "word"), [([1], 0, "fit"), ([1, 2], -1, "top")])
def test_wrong_arguments_are_refused(token_ids: list[int], num_top: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        token_logprobs(torch.zeros(2, 4), token_ids, num_top)
