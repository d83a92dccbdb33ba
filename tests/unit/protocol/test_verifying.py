"""A session that verifies local proposals: what is committed, and what becomes of the window."""

import pytest

from paceline.errors import LocalProtocolError
from paceline.generation import TokenOrigin
from paceline.proposers.base import LocalProposal
from paceline.protocol.messages import DraftTokens, Opened, OpenStatus
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import Acceptance
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs

GREEDY = SamplingParams(temperature=0.0)
# 10 - 11, 10 - 12 - 13, 20
TREE = LocalProposal((10, 20, 11, 12, 13), (-1, -1, 0, 0, 3))


def session(window=(), *, mode=VerificationMode.GREEDY, max_tokens=20, stop=()):
    made = TargetSession(
        1,
        (1, 2, 3),
        sampling=GREEDY if mode is VerificationMode.GREEDY else SamplingParams(),
        mode=mode,
        max_tokens=max_tokens,
        max_len=64,
        stop_token_ids=frozenset(stop),
    )
    made.reopen()
    made.receive_opened(Opened(1, 1, OpenStatus.OK))
    laws = tuple(SparseProbs((i,), (TOTAL_WEIGHT,)) for i in window)
    laws = laws if mode is VerificationMode.BLOCK else ()
    if window:
        made.receive_draft(DraftTokens(1, 1, 3, made.log.hash_at(3), window, 0, draft_probs=laws))
    return made


def test_local_proposals_take_the_place_of_the_window_and_leave_it():
    made = session((10, 11, 12))
    assert made.begin_verify(2, LocalProposal((10, 30, 31))) == (10, 30)
    assert made.log.slice(0) == (1, 2, 3, 10, 11, 12)
    delta = made.commit(Acceptance(1, 11))
    assert (delta.token_ids, delta.num_draft_tokens, delta.is_local) == ((10, 11), 2, True)
    assert delta.origins == (TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED)
    assert (made.window_len, made.begin_verify(4)) == (1, (12,))


def test_what_the_text_contradicts_is_gone():
    made = session((10, 11, 12))
    made.begin_verify(4, LocalProposal((10, 30)))
    made.commit(Acceptance(2, 31))
    assert (made.window_len, made.is_flushed) == (0, True)


def test_without_local_proposals_it_is_the_window():
    made = session((10, 11))
    assert made.begin_verify(4, LocalProposal()) == (10, 11)
    assert made.commit(Acceptance(2, 5)).is_local is False


@pytest.mark.parametrize(("max_tokens", "count"), [(1, 0), (3, 2), (9, 3)])
def test_the_last_token_is_always_the_targets_own(max_tokens, count):
    made = session(max_tokens=max_tokens)
    assert len(made.begin_verify(5, LocalProposal((7, 8, 9)))) == count


def test_a_refusal_of_local_proposals_is_none_of_the_drafts():
    """In block mode a rejected block ends the window whatever fits; nobody looked at this one."""
    made = session((10, 11, 12), mode=VerificationMode.BLOCK)
    assert made.begin_verify(2, LocalProposal((10, 30))) == (10, 30)
    assert [probs.weight(i) for probs, i in zip(made.verifying_probs, (10, 30), strict=True)] == [
        TOTAL_WEIGHT,
        TOTAL_WEIGHT,
    ]
    step = made.end_verify(Acceptance(1, 11))
    assert (step.verdict.has_rejection, step.verdict.num_accepted_tokens) == (False, 0)
    assert made.begin_verify(4) == (12,)
    assert made.verifying_probs[0].weight(12) == TOTAL_WEIGHT


def test_eos_ends_a_local_block():
    made = session(stop=(11,))
    made.begin_verify(4, LocalProposal((10, 11, 12)))
    delta = made.commit(Acceptance(3, 13))
    assert (delta.token_ids, delta.finish_reason) == ((10, 11), "stop")


class TestTrees:
    @pytest.mark.parametrize(
        ("path", "token", "last"),
        [
            ((), 5, TokenOrigin.RECOVERED),
            ((20,), 5, TokenOrigin.BONUS),
            ((10,), 14, TokenOrigin.RECOVERED),
            ((10, 11), 5, TokenOrigin.BONUS),
            ((10, 12, 13), 5, TokenOrigin.BONUS),
        ],
    )
    def test_the_accepted_path_is_committed(self, path, token, last):
        made = session((10, 12, 40))
        assert made.begin_verify(9, TREE) == TREE.token_ids
        assert made.verifying_parents == TREE.parents
        delta = made.commit(Acceptance(len(path), token), path)
        assert (delta.token_ids, delta.origins[-1]) == ((*path, token), last)
        assert (delta.num_draft_tokens, delta.num_accepted_tokens) == (5, len(path))

    def test_a_limit_leaves_a_smaller_tree(self):
        made = session()
        assert made.begin_verify(3, TREE) == (10, 20, 11)
        assert made.verifying_parents == (-1, -1, 0)
        assert made.commit(Acceptance(1, 12), (10,)).origins[-1] is TokenOrigin.RECOVERED

    @pytest.mark.parametrize(
        ("num_accepted", "path"), [(1, None), (2, (10,)), (2, (10, 13)), (1, (12,)), (6, (10,) * 6)]
    )
    def test_what_is_no_path_is_a_bug(self, num_accepted, path):
        made = session()
        made.begin_verify(9, TREE)
        with pytest.raises(LocalProtocolError):
            made.commit(Acceptance(num_accepted, 5), path)

    def test_the_rejection_modes_take_chains_only(self):
        made = session(mode=VerificationMode.BLOCK)
        with pytest.raises(LocalProtocolError, match="chains"):
            made.begin_verify(9, TREE)
