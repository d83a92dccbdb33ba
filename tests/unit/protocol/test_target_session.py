"""The target's side of one sequence: what is committed, and what the draft is told."""

import pytest

from paceline.errors import LocalProtocolError
from paceline.generation import TokenOrigin
from paceline.protocol.link import LinkEvent, LinkState
from paceline.protocol.messages import DraftTokens, Opened, OpenSession, OpenStatus, Verdict
from paceline.protocol.target_session import Disposition, Step, TargetSession, TokenDelta
from paceline.sampling.acceptance import Acceptance, accept_matching
from paceline.sampling.params import SamplingParams, VerificationMode

ACCEPTED, RECOVERED = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED
BONUS, PLAIN = TokenOrigin.BONUS, TokenOrigin.PLAIN
GREEDY = SamplingParams(temperature=0)
EOS = 99
PROMPT = (1, 2, 3)


def make(*, prompt=PROMPT, max_tokens=100, max_len=1000, stop=(EOS,), ahead=16):
    return TargetSession(
        7,
        prompt,
        sampling=GREEDY,
        mode=VerificationMode.GREEDY,
        max_tokens=max_tokens,
        max_len=max_len,
        stop_token_ids=frozenset(stop),
        max_draft_ahead=ahead,
    )


def attach(session):
    opened = session.reopen()
    assert session.receive_opened(Opened(7, session.epoch, OpenStatus.OK))
    return opened


def proposals(session, token_ids, *, start=None, last_round=None):
    """What a draft that holds exactly the target's tokens would send."""
    start = len(session.log) if start is None else start
    seen = session.round if last_round is None else last_round
    return DraftTokens(7, session.epoch, start, session.log.hash_at(start), tuple(token_ids), seen)


def streaming(*, window=(), **kwargs):
    session = make(**kwargs)
    attach(session)
    if window:
        assert session.receive_draft(proposals(session, window)) is Disposition.KEPT
    return session


def verify(session, limit, *own):
    """One pass in which the target's own tokens at the rows are `own`."""
    return session.end_verify(accept_matching(session.begin_verify(limit), own))


class TestConstruction:
    def test_fresh(self):
        session = make()
        assert (session.committed_len, session.num_output_tokens, session.window_len) == (3, 0, 0)
        assert (session.link, session.epoch, session.round) == (LinkState.LOST, 0, 0)
        assert not session.is_finished
        assert not session.is_attached

    @pytest.mark.parametrize(
        ("bad", "sentence"),
        [
            ({"prompt": ()}, "a sequence needs at least one prompt token"),
            ({"max_tokens": 0}, "no room for a single output token"),
            ({"max_len": 3}, "no room for a single output token"),
        ],
    )
    def test_what_can_never_run(self, bad, sentence):
        with pytest.raises(LocalProtocolError, match=sentence):
            make(**bad)

    def test_room_for_one(self):
        assert make(max_len=4).end_len == 4

    @pytest.mark.parametrize(
        ("max_tokens", "max_len", "end_len"), [(5, 1000, 8), (5, 8, 8), (5, 7, 7), (1, 4, 4)]
    )
    def test_the_nearer_end_counts(self, max_tokens, max_len, end_len):
        assert make(max_tokens=max_tokens, max_len=max_len).end_len == end_len

    @pytest.mark.parametrize(("max_tokens", "limit"), [(100, 19), (17, 19), (16, 18), (1, 3)])
    def test_the_last_output_token_is_never_drafted(self, max_tokens, limit):
        """16 ahead of 3, but at most the position before the last one."""
        assert make(max_tokens=max_tokens).limit_position == limit


class TestPlainSteps:
    def test_without_a_draft_a_pass_is_a_decode_step(self):
        session = make()
        assert session.begin_verify(4) == ()
        step = session.end_verify(Acceptance(0, 10))
        assert step == Step(TokenDelta(1, (10,), (PLAIN,), 0, 0, None), None)
        assert (session.committed_len, session.round) == (4, 1)
        assert session.log.slice(0) == (1, 2, 3, 10)

    def test_attached_it_tells_the_draft(self):
        session = streaming()
        step = verify(session, 4, 10)
        assert step.verdict == Verdict(
            session_id=7,
            epoch=1,
            start=3,
            token_ids=(10,),
            num_accepted_tokens=0,
            limit_position=20,
            round=1,
        )

    def test_eos(self):
        session = make()
        step = verify(session, 0, EOS)
        assert step.delta == TokenDelta(1, (EOS,), (PLAIN,), 0, 0, "stop")
        assert session.is_finished

    def test_eos_as_the_last_token_is_a_stop(self):
        assert verify(make(max_tokens=1), 0, EOS).delta.finish_reason == "stop"

    def test_ignored_eos(self):
        assert verify(make(stop=()), 0, EOS).delta.finish_reason is None

    def test_a_stop_id_in_the_prompt_ends_nothing(self):
        assert verify(make(prompt=(EOS, EOS)), 0, 5).delta.finish_reason is None

    def test_context_limit(self):
        session = make(max_len=5)
        assert verify(session, 0, 10).delta.finish_reason is None
        assert verify(session, 0, 11).delta.finish_reason == "length"

    def test_nothing_after_the_end(self):
        session = make(max_tokens=1)
        verify(session, 0, 10)
        with pytest.raises(LocalProtocolError, match="while verifying or after the end"):
            session.begin_verify(0)


class TestVerification:
    """Window (10, 11, 12, 13) after the prompt (1, 2, 3); K = 4 unless said otherwise."""

    @pytest.mark.parametrize(
        ("own", "token_ids", "origins", "accepted"),
        [
            ((20, 0, 0, 0, 0), (20,), (RECOVERED,), 0),
            ((10, 20, 0, 0, 0), (10, 20), (ACCEPTED, RECOVERED), 1),
            ((10, 11, 12, 20, 0), (10, 11, 12, 20), (ACCEPTED,) * 3 + (RECOVERED,), 3),
            ((10, 11, 12, 13, 20), (10, 11, 12, 13, 20), (ACCEPTED,) * 4 + (BONUS,), 4),
        ],
    )
    def test_origins(self, own, token_ids, origins, accepted):
        session = streaming(window=(10, 11, 12, 13))
        step = verify(session, 4, *own)
        assert step.delta == TokenDelta(1, token_ids, origins, 4, accepted, None)
        assert session.log.slice(0) == PROMPT + token_ids
        assert session.window_len == 0
        assert step.verdict.token_ids == token_ids
        assert step.verdict.num_accepted_tokens == accepted
        assert step.verdict.start == 3
        assert step.verdict.limit_position == 3 + len(token_ids) + 16

    def test_limit_caps_the_rows_and_the_rest_waits(self):
        session = streaming(window=(10, 11, 12, 13))
        assert session.begin_verify(2) == (10, 11)
        session.cancel_verify()
        delta = verify(session, 2, 10, 11, 12).delta
        assert (delta.num_draft_tokens, delta.num_accepted_tokens) == (2, 2)
        assert delta.origins == (ACCEPTED, ACCEPTED, BONUS)
        assert session.window_len == 1  # 13 is still a valid proposal: the bonus was 12
        assert not session.is_flushed
        assert session.begin_verify(9) == (13,)

    def test_a_bonus_that_differs_drops_the_rest(self):
        session = streaming(window=(10, 11, 12, 13))
        verify(session, 2, 10, 11, 20)
        assert session.log.slice(3) == (10, 11, 20)
        assert session.is_flushed

    @pytest.mark.parametrize("limit", [0, -1])
    def test_no_limit_is_a_plain_step_that_keeps_the_window(self, limit):
        session = streaming(window=(10, 11))
        assert verify(session, limit, 10).delta.origins == (PLAIN,)
        assert session.window_len == 1
        assert not session.is_flushed

    def test_a_plain_step_that_differs_empties_the_window(self):
        session = streaming(window=(10, 11))
        verify(session, 0, 20)
        assert session.window_len == 0
        assert session.is_flushed

    def test_never_more_rows_than_room(self):
        """max_tokens 3: at most two proposals, then the target's own."""
        session = streaming(window=(10, 11), max_tokens=3)
        assert session.begin_verify(9) == (10, 11)
        session.cancel_verify()
        verify(session, 0, 10)
        assert session.begin_verify(9) == (11,)

    def test_the_window_of_a_lost_draft_is_as_good_as_before(self):
        session = streaming(window=(10, 11))
        session.lose_draft()
        step = verify(session, 4, 10, 11, 12)
        assert step.delta.origins == (ACCEPTED, ACCEPTED, BONUS)
        assert step.verdict is None

    def test_proposals_that_arrive_during_the_pass_stay(self):
        session = streaming(window=(10, 11))
        assert session.begin_verify(4) == (10, 11)
        assert session.receive_draft(proposals(session, (12, 13))) is Disposition.KEPT
        step = session.end_verify(Acceptance(2, 12))
        assert step.delta.num_draft_tokens == 2
        assert session.log.slice(session.committed_len) == (13,)

    def test_proposals_that_arrive_during_the_pass_fall_with_it(self):
        session = streaming(window=(10, 11))
        session.begin_verify(4)
        session.receive_draft(proposals(session, (12, 13)))
        session.end_verify(Acceptance(2, 20))
        assert session.log.slice(3) == (10, 11, 20)

    def test_reopen_during_the_pass(self):
        """The pass verified real tokens: its result stands although the window is gone."""
        session = streaming(window=(10, 11, 12))
        session.begin_verify(2)
        session.lose_draft()
        assert attach(session).token_ids == PROMPT
        step = session.end_verify(Acceptance(2, 20))
        assert step.delta.token_ids == (10, 11, 20)
        assert (step.verdict.epoch, step.verdict.start) == (2, 3)
        assert session.is_flushed

    def test_wrong_order(self):
        session = make()
        with pytest.raises(LocalProtocolError, match="without begin_verify"):
            session.end_verify(Acceptance(0, 1))
        session.begin_verify(0)
        with pytest.raises(LocalProtocolError, match="while verifying"):
            session.begin_verify(0)

    @pytest.mark.parametrize("accepted", [-1, 3])
    def test_accepted_more_than_verified(self, accepted):
        session = streaming(window=(10, 11))
        session.begin_verify(2)
        with pytest.raises(LocalProtocolError, match=f"accepted {accepted} of 2"):
            session.end_verify(Acceptance(accepted, 1))

    def test_cancel_commits_nothing(self):
        session = streaming(window=(10,))
        session.begin_verify(1)
        session.cancel_verify()
        assert (session.committed_len, session.round, session.window_len) == (3, 0, 1)


class TestEndsInsideABlock:
    def test_eos_inside_the_accepted_part(self):
        session = streaming(window=(10, EOS, 12, 13))
        delta = verify(session, 4, 10, EOS, 12, 13, 14).delta
        assert delta == TokenDelta(1, (10, EOS), (ACCEPTED, ACCEPTED), 4, 2, "stop")
        session.close()
        assert session.log.slice(0) == (*PROMPT, 10, EOS)

    def test_eos_first(self):
        session = streaming(window=(EOS, 11))
        delta = verify(session, 4, EOS, 11, 12).delta
        assert (delta.token_ids, delta.num_accepted_tokens) == ((EOS,), 1)

    def test_eos_as_bonus(self):
        delta = verify(streaming(window=(10,)), 4, 10, EOS).delta
        assert (delta.token_ids, delta.origins) == ((10, EOS), (ACCEPTED, BONUS))
        assert delta.finish_reason == "stop"

    def test_eos_as_recovered_token(self):
        delta = verify(streaming(window=(10, 11)), 4, EOS, 0, 0).delta
        assert (delta.token_ids, delta.origins) == ((EOS,), (RECOVERED,))

    def test_an_eos_that_only_the_draft_wants_never_ends(self):
        """seen in peers, no. 25."""
        session = streaming(window=(EOS, EOS, EOS))
        delta = verify(session, 4, 20, 0, 0, 0).delta
        assert (delta.token_ids, delta.finish_reason) == ((20,), None)

    def test_eos_before_length_in_the_same_block(self):
        """seen in peers, no. 21: both ends in one round, the earlier one wins."""
        session = streaming(window=(10, EOS, 12), max_tokens=4)
        delta = verify(session, 4, 10, EOS, 12, 13).delta
        assert (delta.token_ids, delta.finish_reason) == ((10, EOS), "stop")

    def test_eos_exactly_at_length_is_a_stop(self):
        session = streaming(window=(10, 11), max_tokens=3)
        delta = verify(session, 4, 10, 11, EOS).delta
        assert (delta.token_ids, delta.finish_reason) == ((10, 11, EOS), "stop")

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 7])
    def test_usage_is_exact(self, max_tokens):
        """seen in peers, no. 26: K = 4 and a draft that is always right."""
        session = streaming(max_tokens=max_tokens)
        committed = []
        while not session.is_finished:
            room = session._granted_limit - len(session.log)
            window = range(100 + len(session.log), 100 + len(session.log) + room)
            session.receive_draft(proposals(session, window))
            first = 100 + session.committed_len
            own = range(first, first + min(4, session.window_len) + 1)
            committed.extend(verify(session, 4, *own).delta.token_ids)
        assert committed == list(range(103, 103 + max_tokens))
        assert session.num_output_tokens == max_tokens
        assert session.finish_reason == "length"


class TestLink:
    def test_open_carries_every_token_and_the_credit(self):
        session = make()
        verify(session, 0, 10)
        assert session.reopen() == OpenSession(
            session_id=7,
            epoch=1,
            prompt_len=3,
            token_ids=(1, 2, 3, 10),
            sampling=GREEDY,
            mode=VerificationMode.GREEDY,
            limit_position=20,
        )
        assert session.link is LinkState.OPENING
        assert session.is_attached

    def test_accepted(self):
        session = streaming()
        assert session.link is LinkState.STREAMING
        assert session.is_attached

    @pytest.mark.parametrize("status", [OpenStatus.BUSY, OpenStatus.UNSUPPORTED])
    def test_refused(self, status):
        session = make()
        session.reopen()
        assert session.receive_opened(Opened(7, 1, status))
        assert session.link is LinkState.LOST
        assert not session.is_attached

    def test_answers_that_nobody_waits_for(self):
        session = make()
        session.reopen()
        assert not session.receive_opened(Opened(7, 0, OpenStatus.OK))
        assert not session.receive_opened(Opened(7, 2, OpenStatus.OK))
        assert session.link is LinkState.OPENING
        assert session.receive_opened(Opened(7, 1, OpenStatus.OK))
        assert not session.receive_opened(Opened(7, 1, OpenStatus.BUSY))
        assert session.link is LinkState.STREAMING

    @pytest.mark.parametrize("event", [LinkEvent.PEER_LOST, LinkEvent.OPEN_TIMEOUT])
    def test_lost_while_opening(self, event):
        session = make()
        session.reopen()
        session.lose_draft(event)
        assert session.link is LinkState.LOST

    def test_lost_while_streaming_cannot_be_an_open_timeout(self):
        with pytest.raises(LocalProtocolError, match="open_timeout in state streaming"):
            streaming().lose_draft(LinkEvent.OPEN_TIMEOUT)

    def test_reopen_while_attached_is_our_bug(self):
        with pytest.raises(LocalProtocolError, match="reopen in state streaming"):
            streaming().reopen()

    def test_each_open_has_its_own_epoch_and_an_empty_window(self):
        session = streaming(window=(10, 11))
        session.lose_draft()
        assert session.reopen().epoch == 2
        assert session.window_len == 0

    def test_a_new_draft_must_hear_from_us_first(self):
        """Even if the last rounds confirmed every proposal of the old one."""
        session = streaming(window=(10, 11, 12))
        verify(session, 2, 10, 11, 12)
        assert not session.is_flushed
        session.lose_draft()
        session.reopen()
        assert session.is_flushed

    def test_close(self):
        session = streaming(window=(10,))
        session.close()
        assert (session.link, session.window_len) == (LinkState.CLOSED, 0)
        session.close()
        assert session.link is LinkState.CLOSED
        with pytest.raises(LocalProtocolError):
            session.reopen()


def test_no_credit_beyond_the_drafts_own_context():
    session = make(ahead=16)
    assert session.reopen(draft_max_len=8).limit_position == 8
    assert session.limit_position == 8
    session.lose_draft()
    assert session.reopen().limit_position == len(PROMPT) + 16
