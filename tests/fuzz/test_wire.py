"""The share of `python -m tests.fuzz.wire` that every run affords, and that it can fail."""

from __future__ import annotations

import random

import pytest

from paceline.protocol.target_session import TargetSession
from paceline.rpc import codec
from tests.fuzz import wire
from tests.fuzz.wire import Tally, fuzz, fuzz_episode


@pytest.fixture
def fresh_seed(record_property: pytest.RecordProperty) -> int:
    """Another one each run; a failure prints the line that brings it back."""
    seed = random.SystemRandom().randrange(1 << 32)
    record_property("seed", seed)
    return seed


def test_fuzzed_messages_change_no_text(fresh_seed: int) -> None:
    tally = fuzz(fresh_seed, 8_000)
    assert tally.num_messages == 8_000
    assert tally.num_texts > 20
    assert tally.num_accepted_tokens > 100
    assert tally.num_refused > 800


def test_fuzzed_messages_reach_what_they_shall() -> None:
    """With a seed of its own: some of these are rare, so a fresh one may miss them."""
    tally = fuzz(0, 8_000)
    assert min(tally.at_desk[event] for event in ("kept", "remote_error", "unknown_session")) > 5
    kinds = {"Verdict", "OpenSession", "DraftTokens", "Opened", "Nack", "CloseSession"}
    assert kinds <= tally.seen.keys()


def test_an_episode_is_its_seed() -> None:
    """Through the codec alone and through streams."""
    for episode in (0, 9):
        first, second = Tally(), Tally()
        fuzz_episode(5, episode, 300, first)
        fuzz_episode(5, episode, 300, second)
        assert first == second
        assert first.digest != 0


def test_a_codec_that_raises_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the checksum were not looked at and protobuf's own error came through."""

    def careless(outer: object, frame_type: type, data: bytes, limits: object) -> object:
        return frame_type.FromString(wire.pb.SpeculateRequest.FromString(data).body)

    monkeypatch.setattr(codec, "_unseal", careless)
    with pytest.raises(Exception, match="parsing"):
        fuzz(1, 2000)
    assert "replay: python -m tests.fuzz.wire --seed 1 --episode 0" in capsys.readouterr().out


def test_a_session_that_trusts_its_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if what a draft proposes were never compared with what the target draws."""
    commit = TargetSession.commit

    def trusting(self: TargetSession, acceptance: object, path: object = None) -> object:
        count = 0 if self._verifying is None else len(self._verifying.token_ids)
        return commit(self, type(acceptance)(count, acceptance.next_token_id), path)

    monkeypatch.setattr(TargetSession, "commit", trusting)
    with pytest.raises(AssertionError, match="changed"):
        fuzz(1, 5000)
