"""Real weights: text with the draft is text without it (`real.py` runs the full matrix)."""

from __future__ import annotations

import pytest

from tests.e2e.real import Pair, load_pair

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

SEEDS = (None, 1, 2)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair()


def test_the_draft_changes_no_token(pair: Pair) -> None:
    alone = [run.token_ids for run in pair.run(0, SEEDS, 32)]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    for draft_tokens in (1, 4, 8):
        runs = pair.run(draft_tokens, SEEDS, 32)
        assert [run.token_ids for run in runs] == alone
        assert sum(run.num_accepted_tokens for run in runs) > 0
        assert max(d.num_draft_tokens for run in runs for d in run.deltas) == draft_tokens
    for engine in (pair.target, pair.draft):
        engine.check_integrity()
        assert engine.stats().num_free_blocks == engine.info.num_blocks
