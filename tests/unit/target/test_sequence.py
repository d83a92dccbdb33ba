"""Where the time of a round went: which arrivals a pass used."""

from paceline.generation import GenerateRequest
from paceline.protocol.lookahead import AcceptanceClass, SequenceLookahead
from paceline.protocol.messages import DraftTokens
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import accept_matching
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.target.sequence import Arrival, PassTimes, Sequence

GREEDY = SamplingParams(temperature=0)
TIMES = PassTimes(10_000, 14_000)


def make():
    session = TargetSession(
        1, (1, 2, 3), sampling=GREEDY, mode=VerificationMode.GREEDY, max_tokens=50, max_len=100
    )
    session.reopen()
    lookahead = SequenceLookahead(AcceptanceClass.of("", session.mode, 0.0), cap=4)
    return Sequence(session, GenerateRequest("r", (1, 2, 3), 50, GREEDY), lookahead)


def arrive(sequence, *token_ids, now_us, wire_us=0, draft_us=0):
    log = sequence.session.log
    draft = DraftTokens(1, 1, len(log), log.hash_at(len(log)), token_ids, 0, draft_us)
    sequence.session.receive_draft(draft)
    sequence.keep(Arrival.of(draft, now_us, wire_us))


def verify(sequence, limit, *own):
    session = sequence.session
    start = session.committed_len
    rows = session.begin_verify(limit)
    delta = session.end_verify(accept_matching(rows, own)).delta
    return sequence.to_round(delta, start, TIMES)


def test_plain_round():
    delta = verify(make(), 4, 10)
    assert (delta.draft_ms, delta.wire_ms, delta.queue_ms, delta.verify_ms) == (0, 0, 0, 4)
    assert delta.num_speculative_tokens == 4


def test_one_message():
    sequence = make()
    arrive(sequence, 10, 11, now_us=9_000, wire_us=300, draft_us=2_000)
    delta = verify(sequence, 4, 10, 11, 12)
    assert (delta.draft_ms, delta.wire_ms, delta.queue_ms, delta.verify_ms) == (2, 0.3, 1, 4)
    assert sequence.arrivals == []
    assert sequence.last_arrival_us == 9_000


def test_several_messages_add_up_and_the_last_one_waits():
    sequence = make()
    arrive(sequence, 10, now_us=6_000, wire_us=100, draft_us=1_000)
    arrive(sequence, 11, 12, now_us=8_500, wire_us=400, draft_us=2_000)
    delta = verify(sequence, 4, 10, 11, 12, 13)
    assert (delta.draft_ms, delta.wire_ms, delta.queue_ms) == (3, 0.4, 1.5)


def test_a_message_that_arrived_during_the_pass_never_waited():
    sequence = make()
    arrive(sequence, 10, now_us=10_500)
    assert verify(sequence, 4, 10, 11).queue_ms == 0


def test_only_what_was_verified_counts():
    sequence = make()
    arrive(sequence, 10, now_us=6_000, draft_us=1_000)
    arrive(sequence, 11, now_us=7_000, draft_us=1_000)
    arrive(sequence, 12, 13, now_us=8_000, draft_us=1_000)
    delta = verify(sequence, 1, 10, 11)
    assert (delta.draft_ms, delta.queue_ms) == (1, 4)
    assert [a.end for a in sequence.arrivals] == [7]
    assert verify(sequence, 4, 12, 13, 14).queue_ms == 2


def test_half_a_message():
    """A message that reaches beyond the pass is kept for the rest of its proposals."""
    sequence = make()
    arrive(sequence, 10, 11, 12, now_us=8_000, draft_us=3_000)
    assert verify(sequence, 1, 10, 11).draft_ms == 3
    assert sequence.arrivals == [Arrival(6, 8_000, 0, 3_000)]
    assert verify(sequence, 4, 12, 13).draft_ms == 3
    assert sequence.arrivals == []


def test_a_correction_forgets_what_it_dropped():
    sequence = make()
    arrive(sequence, 10, 11, now_us=8_000)
    arrive(sequence, 12, now_us=9_000)
    verify(sequence, 2, 20, 0, 0)
    assert sequence.arrivals == []


def test_arrivals_are_bounded_by_the_window():
    sequence = make()
    for token_id in range(10, 26):
        arrive(sequence, token_id, now_us=token_id)
    assert len(sequence.arrivals) == sequence.session.window_len == 16
    verify(sequence, 0, 10)
    assert len(sequence.arrivals) == 15


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
