"""The vocabulary: frozen values, and which side may say what."""

import copy
import dataclasses
from typing import get_args

import pytest

from paceline.protocol import messages
from paceline.protocol.messages import (
    Bye,
    CloseReason,
    CloseSession,
    DraftMessage,
    DraftTokens,
    Drain,
    Hello,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
    Ping,
    Pong,
    TargetMessage,
    Verdict,
    Welcome,
)
from paceline.sampling.params import SamplingParams, VerificationMode

GREEDY = SamplingParams(temperature=0)
EXAMPLES = [
    Hello(1, "b", "d", "toy", 64, "h", 512, 8, (VerificationMode.GREEDY,)),
    Welcome(1, "b", "t", "toy", 64, "h"),
    OpenSession(1, 1, 2, (5, 6), GREEDY, VerificationMode.GREEDY, 18),
    Opened(1, 1, OpenStatus.OK),
    DraftTokens(1, 1, 2, 0, (7, 8), 0),
    Verdict(1, 1, 2, (7, 9), 1, 20, 1),
    Nack(1, 1, 2),
    CloseSession(1, 1, CloseReason.FINISHED),
    Ping(1),
    Pong(1, 2),
    Drain(),
    Bye("done"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_messages_are_frozen_values(message):
    assert message == dataclasses.replace(message)
    assert copy.deepcopy(message) == message
    assert hash(message) == hash(dataclasses.replace(message))
    for field in dataclasses.fields(message):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, None)


def test_sides():
    both = {Nack, CloseSession, Ping, Pong, Drain, Bye}
    assert set(get_args(DraftMessage)) - both == {Hello, Opened, DraftTokens}
    assert set(get_args(TargetMessage)) - both == {Welcome, OpenSession, Verdict}
    assert both <= set(get_args(DraftMessage)) & set(get_args(TargetMessage))
    assert {type(m) for m in EXAMPLES} == set(get_args(DraftMessage)) | set(get_args(TargetMessage))


def test_optional_fields_say_nothing():
    assert DraftTokens(1, 1, 2, 0, (), 0).draft_us == 0
    assert Verdict(1, 1, 2, (7,), 0, 20, 1).trace_context == b""
    assert Ping(1) == Ping(1, num_sessions=0, queue_len=0)
    assert Bye().reason == ""


def test_constants_of_the_wire():
    assert messages.PROTOCOL_VERSION == 1
    assert messages.TRACE_CONTEXT_BYTES == 25
    assert [str(s) for s in OpenStatus] == ["ok", "busy", "unsupported"]
    assert [str(r) for r in CloseReason] == [
        "finished",
        "aborted",
        "replaced",
        "unknown",
        "protocol",
    ]
