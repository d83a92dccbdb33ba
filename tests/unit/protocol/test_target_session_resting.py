"""A draft that rests, as the target's session sees it: what it is told, and when."""

from paceline.protocol.target_session import MAX_UNTOLD, Disposition
from tests.unit.protocol.branching import (
    PROMPT,
    draft,
    prepared,
    streaming,
    verify,
    window,
)


class TestResting:
    def test_what_it_wakes_with_leads_to_the_branch(self):
        """Untold commits, then a correction, then credit: one verdict tells all of it, and what
        was adopted meanwhile is gone on with."""
        session = prepared(after=(10, 21))
        session.max_draft_ahead = 0
        assert verify(session, 0, 10).verdict is None
        assert verify(session, 1, 21, 0).verdict is None
        assert window(session) == (100, 101, 102)
        session.max_draft_ahead = 16
        verdict = verify(session, 1, 100, 101).verdict
        assert (verdict.start, verdict.token_ids) == (3, (10, 21, 100, 101))
        more = draft((*PROMPT, 10, 21, 100, 101, 102), 103, last_round=3)
        assert session.receive_draft(more) is Disposition.KEPT
        assert window(session) == (102, 103)

    def test_it_is_told_now_and_then(self):
        session = streaming(max_tokens=200)
        session.max_draft_ahead = 0
        verdicts = [verify(session, 0, 10).verdict for _ in range(2 * MAX_UNTOLD)]
        told = [verdict for verdict in verdicts if verdict is not None]
        assert [(v.start, len(v.token_ids)) for v in told] == [
            (3, MAX_UNTOLD),
            (3 + MAX_UNTOLD, MAX_UNTOLD),
        ]
