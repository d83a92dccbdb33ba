"""What a draft's session asks of a pass and what the pass says: plain data, main text or branch.

Knows no engine, no message and no session.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import LocalProtocolError
from paceline.sampling.sparse_probs import SparseProbs


# One for every row of every pass, and never changed: not frozen only because that makes them twice
# as slow to build.
@dataclass(slots=True)
class DraftWork:
    """One sequence's share of a draft pass: append `token_ids` at `start`, then draw a token.

    `token_ids` is everything that the cache lacks, at least the last token of the text. At most
    `max_rows` of these rows may be computed (what a prefix cache holds is free); if they do not
    reach the end, nothing is drawn and the rest is asked for again. The drawn token has output
    index `output_index`. `context_hash` covers everything up to the end of `token_ids`. `round`
    (u32) keys the noise of the draw where it is the draft's own. `num_runner_ups`: so many tokens
    that come next after the drawn one are wanted as well. With `fork_of` the engine's sequence is
    new and begins with what that one has in the cache before the pass, up to `start`.
    `received_us`: when the newest verdict came, if this is the first work after it; else 0.
    """

    start: int
    token_ids: tuple[int, ...]
    max_rows: int
    output_index: int
    context_hash: int
    round: int
    num_runner_ups: int = 0
    fork_of: int | None = None
    received_us: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows that the pass computes at most."""
        return min(self.max_rows, len(self.token_ids))


@dataclass(slots=True)  # as above
class WorkResult:
    """What a pass made of a `DraftWork`.

    `token_id`: the drawn token, None if the rows did not reach the end, or if they did and the
    engine has no room for more: then nothing longer is asked for. `cached_len`: tokens in the
    cache after the pass, None: all of them. `draft_probs`: the law that the token was drawn
    from (needed in the rejection modes, ignored in the others). `runner_ups`: the tokens that come
    next after `token_id`, best first, as many as are wanted and possible.
    """

    token_id: int | None
    cached_len: int | None = None
    draft_probs: SparseProbs | None = None
    runner_ups: tuple[int, ...] = ()


def check_result(work: DraftWork, result: WorkResult) -> int:
    """The cached length after the pass; `LocalProtocolError` for a result that does not fit."""
    cached_len = work.end if result.cached_len is None else result.cached_len
    if not work.start <= cached_len <= work.end:
        raise LocalProtocolError(f"{cached_len} tokens cached by rows [{work.start}, {work.end})")
    if result.token_id is None:
        return cached_len
    if cached_len < work.end:
        raise LocalProtocolError("a token was drawn before the end of its context")
    if len(result.runner_ups) > work.num_runner_ups or result.token_id in result.runner_ups:
        raise LocalProtocolError(
            f"runner-ups {result.runner_ups} of {result.token_id}, {work.num_runner_ups} wanted"
        )
    return cached_len
