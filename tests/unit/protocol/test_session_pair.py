"""Both real ends with a fake wire between: every message is judged at both sides at once.

The target's text is a fixed function of the position, so that the expected output is known; the
draft's model is right except at chosen positions.
"""

import pytest

from paceline.generation import TokenOrigin
from paceline.protocol.draft_session import DraftSession, WorkResult
from paceline.protocol.messages import Nack, Opened, OpenStatus, Verdict
from paceline.protocol.target_session import Disposition, TargetSession
from paceline.sampling.acceptance import accept_matching
from paceline.sampling.params import SamplingParams, VerificationMode

PROMPT = (1, 2, 3)
EOS = 9999


def truth(position):
    return 100 + position


class Pair:
    """`wrong` positions are where the draft errs; `lose_*` are indices of messages to drop."""

    def __init__(self, *, max_tokens, wrong=(), draft_len=1000, ahead=16, says=truth):
        self.says = says
        self.wrong = set(wrong)
        self.draft_len = draft_len
        self.target = TargetSession(
            7,
            PROMPT,
            sampling=SamplingParams(temperature=0),
            mode=VerificationMode.GREEDY,
            max_tokens=max_tokens,
            max_len=1000,
            stop_token_ids=frozenset({EOS}),
            max_draft_ahead=ahead,
        )
        self.cache = []  # the draft engine's KV, as tokens
        self.dispositions = []
        self.deltas = []
        self.open()

    def open(self):
        self.draft = DraftSession(self.target.reopen(), max_len=self.draft_len)
        self.cache = []
        self.target.receive_opened(Opened(7, self.target.epoch, OpenStatus.OK))

    def begin_pass(self):
        """One pass of the draft engine up to (not including) its result."""
        work = self.draft.begin_work(1000)
        assert work.start <= len(self.cache), "the engine cannot skip rows"
        self.cache[work.start :] = work.token_ids
        assert tuple(self.cache[: work.start]) == self.draft.log.slice(0, work.start)
        return EOS if work.end in self.wrong else self.says(work.end)

    def propose(self, count, *, lose=False):
        for _ in range(count):
            if not self.draft.can_draft():
                break
            self.draft.end_work(WorkResult(self.begin_pass()))
        self.send(lose=lose)

    def send(self, *, lose=False):
        message = self.draft.take_draft()
        if message is not None and not lose:
            self.dispositions.append(self.target.receive_draft(message))
            if self.dispositions[-1] is Disposition.GAP:
                self.draft.receive_nack(Nack(7, self.target.epoch, len(self.target.log)))

    def verify(self, limit, *, lose=False, deliver=True):
        start = self.target.committed_len
        rows = self.target.begin_verify(limit)
        own = [self.says(start + i) for i in range(len(rows) + 1)]
        step = self.target.end_verify(accept_matching(rows, own))
        self.deltas.append(step.delta)
        if deliver and not lose:
            self.deliver(step.verdict)
        return step

    def deliver(self, verdict):
        outcome = self.draft.receive_verdict(verdict)
        if isinstance(outcome, Nack):
            repeat = self.target.receive_nack(outcome.have_len)
            assert isinstance(repeat, Verdict)
            assert not isinstance(self.draft.receive_verdict(repeat), Nack)
        return outcome

    @property
    def output(self):
        return self.target.log.slice(3, self.target.committed_len)

    @property
    def delivered(self):
        return tuple(t for delta in self.deltas for t in delta.token_ids)


def expected(num_tokens, says=truth):
    return tuple(says(3 + i) for i in range(num_tokens))


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8])
def test_a_perfect_draft_never_rewinds(limit):
    """ceil(60 / (K + 1)) passes, every proposal accepted."""
    pair = Pair(max_tokens=60)
    while not pair.target.is_finished:
        pair.propose(20)
        pair.verify(limit)
    assert pair.delivered == expected(60)
    assert len(pair.deltas) == -(-60 // (limit + 1))
    assert set(pair.dispositions) == {Disposition.KEPT}
    assert all(d.num_accepted_tokens == d.num_draft_tokens for d in pair.deltas)


@pytest.mark.parametrize("limit", range(1, 9))
@pytest.mark.parametrize("period", [2, 3, 5])
def test_a_draft_that_errs(limit, period):
    pair = Pair(max_tokens=40, wrong=range(0, 60, period))
    while not pair.target.is_finished:
        pair.propose(limit)
        pair.verify(limit)
    assert pair.delivered == pair.output == expected(40)
    assert pair.target.finish_reason == "length"


def test_a_draft_that_always_says_eos_ends_nothing():
    """seen in peers, no. 25: text and length are those of the target alone."""
    pair = Pair(max_tokens=20, wrong=range(1000))
    while not pair.target.is_finished:
        pair.propose(4)
        pair.verify(4)
    assert pair.delivered == expected(20)
    assert [d.num_accepted_tokens for d in pair.deltas] == [0] * 20
    assert pair.target.finish_reason == "length"


def test_an_eos_that_both_want_ends_at_once():
    """seen in peers, no. 24."""
    pair = Pair(max_tokens=20, says=lambda position: EOS if position == 5 else 100 + position)
    pair.propose(4)
    pair.verify(4)
    assert pair.delivered == (103, 104, EOS)
    assert pair.deltas[0].origins == (TokenOrigin.ACCEPTED,) * 3
    assert pair.target.finish_reason == "stop"


def test_a_short_draft_context_stops_drafting_by_itself():
    """seen in peers, no. 28: draft context 20, text of 60."""
    pair = Pair(max_tokens=57, draft_len=20)
    while not pair.target.is_finished:
        pair.propose(8)
        pair.verify(4)
    assert pair.delivered == expected(57)
    proposed = [d.num_draft_tokens for d in pair.deltas]
    assert proposed[:3] == [4, 4, 4]
    assert not any(proposed[4:])
    assert len(pair.cache) < 20


@pytest.mark.parametrize("delivered", [True, False])
def test_after_50_rounds_without_speculation_it_is_whole_again(delivered):
    """seen in peers, no. 33: K = 0, then K = 4. `delivered`: whether verdicts arrive one by one."""
    pair = Pair(max_tokens=100)
    held = []
    for _ in range(50):
        if delivered:
            pair.propose(2)
        step = pair.verify(0, deliver=delivered)
        held.append(step.verdict)
    for verdict in held:
        pair.deliver(verdict)
    assert [d.num_draft_tokens for d in pair.deltas] == [0] * 50
    pair.propose(4)
    while not pair.target.is_finished:
        pair.verify(4)
        pair.propose(5)
    after = pair.deltas[50:]
    assert [d.num_draft_tokens for d in after] == [4] * 10
    assert [d.num_accepted_tokens for d in after] == [4] * 10
    assert pair.delivered == expected(100)


@pytest.mark.parametrize("lost", range(6))
def test_one_lost_verdict_is_repeated(lost):
    """The next verdict shows the gap; the Nack brings back what was missed."""
    pair = Pair(max_tokens=40, wrong={5, 9, 10})
    number = 0
    while not pair.target.is_finished:
        pair.propose(4)
        pair.verify(4, lose=number == lost)
        number += 1
    assert pair.delivered == expected(40)
    assert pair.draft.committed_len >= pair.target.committed_len - 5


@pytest.mark.parametrize("lost", range(6))
def test_one_lost_proposal_costs_one_round(lost):
    pair = Pair(max_tokens=60)
    number = 0
    while not pair.target.is_finished:
        pair.propose(4, lose=number == lost)
        pair.verify(4)
        number += 1
    assert pair.delivered == expected(60)
    assert pair.deltas[lost].num_draft_tokens == 0
    assert all(d.num_draft_tokens > 0 for d in pair.deltas[lost + 2 : -1])


def test_verdict_in_the_middle_of_a_draft_pass():
    """At every pass of the draft a verdict arrives before the pass is over."""
    pair = Pair(max_tokens=40, wrong=range(0, 60, 4))
    pair.propose(3)
    while not pair.target.is_finished:
        if not pair.draft.can_draft():
            pair.verify(3)
            continue
        token_id = pair.begin_pass()
        pair.verify(3)
        pair.draft.end_work(WorkResult(token_id))
        pair.send()
    assert pair.delivered == expected(40)
    assert Disposition.GAP not in pair.dispositions


def test_proposals_cross_the_correction():
    """The draft goes on while our correction is under way: stale, then right again."""
    pair = Pair(max_tokens=40, wrong={4})
    pair.propose(3)
    step = pair.verify(3, deliver=False)
    assert step.delta.token_ids == (103, 104)
    pair.propose(2)
    assert pair.dispositions == [Disposition.KEPT, Disposition.STALE]
    rewind = pair.deliver(step.verdict)
    assert (rewind.length, rewind.num_dropped) == (4, 4)
    pair.propose(2)
    assert pair.dispositions[-1] is Disposition.KEPT
    assert pair.verify(4).delta.num_accepted_tokens == 2


def test_reopen_during_verify_changes_no_text():
    pair = Pair(max_tokens=30)
    while not pair.target.is_finished:
        pair.propose(4)
        start = pair.target.committed_len
        rows = pair.target.begin_verify(4)
        pair.target.lose_draft()
        pair.open()
        own = [truth(start + i) for i in range(len(rows) + 1)]
        step = pair.target.end_verify(accept_matching(rows, own))
        pair.deltas.append(step.delta)
        assert step.verdict.epoch == pair.draft.epoch
        pair.deliver(step.verdict)
    assert pair.delivered == expected(30)
    assert [d.num_accepted_tokens for d in pair.deltas] == [4] * 6


def test_a_new_draft_takes_over_between_rounds():
    pair = Pair(max_tokens=30)
    for round_number in range(6):
        pair.propose(4)
        pair.verify(4)
        if round_number < 5:
            pair.target.lose_draft()
            pair.open()
    assert pair.delivered == expected(30)
    assert [d.num_accepted_tokens for d in pair.deltas] == [4] * 6
    assert pair.target.epoch == 6


def test_both_logs_agree_at_the_end():
    pair = Pair(max_tokens=50, wrong={5, 6, 20, 33})
    while not pair.target.is_finished:
        pair.propose(5)
        pair.verify(4)
    ends = (pair.target.committed_len, pair.draft.committed_len)
    assert ends == (53, 53)
    assert pair.target.log.hash_at(53) == pair.draft.log.hash_at(53)
