"""The draft's work and the engine's rows: one translation for whoever drives a `DraftTable`.

Pure. It does not know threads, streams or time, and decides nothing about tokens.
"""

from __future__ import annotations

from paceline.engine.base import Propose, StepItem, StepResult
from paceline.protocol.draft_session import WorkResult
from paceline.protocol.draft_table import PassItem


def step_item(item: PassItem) -> StepItem:
    """The engine's view of one sequence's share of a pass."""
    work = item.work
    key = item.propose_round
    return StepItem(
        sequence_id=item.sequence_id,
        start=work.start,
        token_ids=work.token_ids,
        num_samples=1,
        sampling=item.sampling,
        output_index=work.output_index,
        rule=None if key is None else Propose(key),
        # One row is a decode step; of more than one it is not known how many are cached.
        max_rows=work.max_rows if len(work.token_ids) > 1 else None,
        cache_salt=item.cache_salt,
        num_runner_ups=work.num_runner_ups,
        fork_of=work.fork_of,
    )


def work_result(result: StepResult) -> WorkResult:
    """The table's view of what the engine did."""
    return WorkResult(
        token_id=result.token_ids[0] if result.token_ids else None,
        cached_len=result.cached_len,
        draft_probs=result.draft_probs[0] if result.draft_probs else None,
        runner_ups=result.runner_ups[0] if result.runner_ups else (),
    )
