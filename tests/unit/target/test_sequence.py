"""A sequence's small facts, and its rounds' times; `test_round_clock` has where they come from."""

from paceline.generation import GenerateRequest
from paceline.protocol.lookahead import AcceptanceClass, SequenceLookahead
from paceline.protocol.messages import DraftTokens
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import accept_matching
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.target.round_clock import PassRecord
from paceline.target.sequence import PassTimes, Sequence

GREEDY = SamplingParams(temperature=0)
TIMES = PassTimes(10_000, 14_000, 13_000)


def make():
    session = TargetSession(
        1, (1, 2, 3), sampling=GREEDY, mode=VerificationMode.GREEDY, max_tokens=50, max_len=100
    )
    session.reopen()
    lookahead = SequenceLookahead(AcceptanceClass.of("", session.mode, 0.0), cap=4)
    return Sequence(session, GenerateRequest("r", (1, 2, 3), 50, GREEDY), lookahead)


def verify(sequence, limit, *own):
    session = sequence.session
    start = session.committed_len
    rows = session.begin_verify(limit)
    delta = session.end_verify(accept_matching(rows, own)).delta
    sequence.clock.passed(PassRecord(TIMES))
    return sequence.to_round(delta, start, sequence.clock.close(TIMES.ended_us))


def test_the_times_of_a_round_are_milliseconds_that_add_up():
    sequence = make()
    sequence.clock.start(4_000)
    arrived = DraftTokens(1, 1, 3, 0, (10,), 0, 2_000, 8_700, began_us=6_000, received_us=5_500)
    sequence.clock.arrive(arrived, 9_000, 0)
    sequence.clock.ready_us = 9_250
    delta = verify(sequence, 4, 10)
    assert delta.wall_ms == 10
    assert (delta.draft_ms, delta.wire_out_ms, delta.rewind_ms) == (2, 0.3, 0.5)
    assert (delta.queue_ms, delta.verify_ms, delta.sample_ms) == (0.75, 3, 1)
    assert (delta.window_ms, delta.wire_back_ms) == (1.5 + 0.7 + 0.25, 0)
    assert delta.num_speculative_tokens == 4


def test_is_decoding():
    sequence = make()
    assert not sequence.is_decoding
    sequence.cached_len = 1
    assert not sequence.is_decoding
    sequence.cached_len = 2
    assert sequence.is_decoding


def test_a_preempted_sequence_starts_afresh_but_for_its_text():
    """A wait that it was in has not missed: it must not count as one when it is back."""
    sequence = make()
    verify(sequence, 4, 10)
    sequence.cached_len, sequence.hold_until_us = 3, 99_000
    sequence.preempt()
    assert (sequence.cached_len, sequence.hold_until_us, sequence.num_preemptions) == (0, 0, 1)
    assert sequence.session.num_output_tokens == 1
