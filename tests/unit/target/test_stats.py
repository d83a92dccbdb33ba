"""What a scheduler counts of a pass and of a round."""

from __future__ import annotations

import pytest

from paceline.metrics.target_catalog import MAX_POSITION
from paceline.protocol.lookahead import PassRecord
from paceline.protocol.rounds import TokenDelta, token_origins
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import Acceptance
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.target.lookahead import num_unused
from paceline.target.stats import SchedulerStats


def a_round(num_draft: int, num_accepted: int, finish: str | None = None) -> TokenDelta:
    token_ids = tuple(range(num_accepted + 1))
    origins, counts = token_origins(num_accepted, num_draft), (num_draft, num_accepted)
    return TokenDelta(1, token_ids, origins, *counts, finish)  # type: ignore[arg-type]


def test_rounds() -> None:
    stats = SchedulerStats()
    for delta, chosen in ((a_round(0, 0), 4), (a_round(3, 1), 4), (a_round(5, 5), 2)):
        stats.end_round(delta, chosen, 2)
    assert (stats.num_rounds, stats.num_plain_rounds, stats.num_rejected_rounds) == (3, 1, 1)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (8, 6)
    assert (stats.num_committed_tokens, stats.num_unused_tokens) == (9, 6)
    assert stats.accepted_per_pos[:6] == [2, 1, 1, 1, 1, 0]
    assert stats.chosen.total == 4 + 4 + 5, "no less than was verified"


def test_a_tree_that_is_accepted_to_a_leaf_has_no_rejection() -> None:
    stats = SchedulerStats()
    for num_verified in (2, 3):  # the leaf of a path of two, and a node that had children
        origins = token_origins(2, num_verified)
        stats.end_round(TokenDelta(1, (1, 2, 3), origins, 8, 2, None), 8, 0, "medusa")
    assert stats.num_rejected_rounds == 1


def test_the_end_of_a_text_is_no_rejection() -> None:
    stats = SchedulerStats()
    stats.end_round(a_round(4, 2, "stop"), 4, 0)
    assert stats.num_rejected_rounds == 0


def test_places_are_bounded() -> None:
    stats = SchedulerStats()
    stats.end_round(a_round(MAX_POSITION + 5, MAX_POSITION + 3), 4, 0)
    assert stats.accepted_per_pos == [1] * MAX_POSITION + [3]


def test_passes() -> None:
    stats = SchedulerStats()
    stats.end_pass(PassRecord(2, 9, 5, 2, 4, 1_000, 26_000, None))
    assert (stats.num_passes, stats.num_rows, stats.num_prefill_rows) == (1, 9, 5)
    assert stats.busy_us == 25_000
    assert stats.pass_s.total == pytest.approx(0.025)
    assert sum(stats.pass_rows.counts) == 1
    stats.admit(1_500_000, 0)
    stats.admit(9_000_000, 1)
    assert stats.queue_s.total == 1.5


@pytest.mark.parametrize(
    ("num_verified", "num_accepted", "token", "expected"),
    [
        (4, 4, 9, 0),  # nothing was ahead
        (2, 2, 7, 0),  # the pass's own token is the next proposal: the text goes on with it
        (2, 2, 9, 2),  # it is another
        (2, 1, 6, 2),  # a rejection: whatever is behind hangs in the air
        (0, 0, 5, 0),
        (0, 0, 9, 4),
    ],
)
def test_proposals_that_nobody_will_verify(
    num_verified: int, num_accepted: int, token: int, expected: int
) -> None:
    session = TargetSession(
        1, (1, 2), sampling=SamplingParams(), mode=VerificationMode.GREEDY, max_tokens=32,
        max_len=64, stop_token_ids=frozenset(),
    )  # fmt: skip
    session.log.extend((5, 6, 7, 8))
    assert session.window_len == 4
    assert num_unused(session, num_verified, Acceptance(num_accepted, token)) == expected


def test_nobody_waits_less_than_no_time() -> None:
    """A pass that ended before the request came may give it its place."""
    stats = SchedulerStats()
    stats.admit(-3000, 0)
    assert (stats.queue_s.total, stats.queue_s.counts[0]) == (0.0, 1)
