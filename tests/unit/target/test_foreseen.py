"""What a pass shows about proposals that it did not verify."""

from paceline.sampling.acceptance import Acceptance
from paceline.sampling.params import VerificationMode
from paceline.target.lookahead import was_foreseen


def session_of(make_rig):
    """Three proposals behind one committed output token."""
    rig = make_rig()
    rig.add_draft(1)
    rig.add((1, 2, 3), 60)
    rig.deliver()
    rig.step()
    rig.deliver()
    rig.draft(3)
    session = rig.scheduler._sequences[1].session
    assert session.window_len == 3
    return session


def test_the_token_behind_a_full_acceptance(make_rig):
    session = session_of(make_rig)
    proposals = session.log.slice(session.committed_len)
    assert was_foreseen(session, 1, Acceptance(1, proposals[1])) is True
    assert was_foreseen(session, 1, Acceptance(1, proposals[1] + 1)) is False
    assert was_foreseen(session, 0, Acceptance(0, proposals[0])) is True


def test_nothing_behind_it_or_a_rejection(make_rig):
    session = session_of(make_rig)
    proposals = session.log.slice(session.committed_len)
    assert was_foreseen(session, 3, Acceptance(3, 1)) is None
    assert was_foreseen(session, 2, Acceptance(1, proposals[1])) is None


def test_the_rejection_modes_do_not_compare(make_rig):
    session = session_of(make_rig)
    session.mode = VerificationMode.BLOCK
    assert was_foreseen(session, 0, Acceptance(0, 1)) is None
