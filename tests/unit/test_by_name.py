"""What crosses a handle between two releases: fewer, more and reordered fields."""

from __future__ import annotations

import copy
import pickle
from dataclasses import MISSING, fields, make_dataclass, replace
from types import ModuleType
from typing import Any

import pytest

from paceline import generation
from paceline.by_name import by_name
from paceline.generation import (
    GenerateRequest,
    Resumption,
    RoundDelta,
    SpeculationRequest,
    TokenLogprobs,
    TokenOrigin,
)
from paceline.sampling import params
from paceline.sampling.params import SamplingParams, VerificationMode

REQUEST = GenerateRequest(
    "r",
    (1, 2),
    9,
    SamplingParams(temperature=0.5, seed=7, logit_bias=((3, 1.0),)),
    (5,),
    SpeculationRequest(max_tokens=3, mode=VerificationMode.BLOCK),
    resumption=Resumption(1, ((4,), None)),
    n=2,
    traceparent="00-" + "a" * 32,
    is_background=True,
)
DELTA = RoundDelta(
    3,
    (1, 2),
    (TokenOrigin.ACCEPTED, TokenOrigin.BONUS),
    1,
    1,
    4,
    wall_ms=2.5,
    finish_reason="stop",
    logprobs=(TokenLogprobs(1, -0.5, 1, ((1, -0.5),)),),
)
VALUES = (REQUEST, REQUEST.sampling, REQUEST.speculation, REQUEST.resumption, DELTA)
VALUES += DELTA.logprobs  # type: ignore[assignment]
NEW = "what_comes_next"


def other_release(cls: type, names: list[str]) -> type:
    """`cls` with these fields, in this order."""
    spec = [(name, object) for name in names]
    made = by_name(make_dataclass(cls.__name__, spec, frozen=True, slots=True))
    made.__module__ = cls.__module__
    return made


def sent_by(monkeypatch: pytest.MonkeyPatch, value: object, names: list[str]) -> object:
    """What we read of the pickle that a release with such fields makes."""
    cls = type(value)
    module: ModuleType = params if cls is SamplingParams else generation
    other = other_release(cls, names)
    with monkeypatch.context() as patch:
        patch.setattr(module, cls.__name__, other)
        data = pickle.dumps(other(*(getattr(value, name, "new") for name in names)))
    return pickle.loads(data)  # noqa: S301 - our own


def names_of(value: object) -> list[str]:
    return [field.name for field in fields(value)]  # type: ignore[arg-type]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
class TestAnotherRelease:
    def test_the_same(self, value: object) -> None:
        assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301 - our own
        assert copy.deepcopy(value) == value

    def test_with_reordered_fields(self, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
        assert sent_by(monkeypatch, value, names_of(value)[::-1]) == value

    def test_with_more_fields(self, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
        assert sent_by(monkeypatch, value, [NEW, *names_of(value)]) == value

    def test_with_fewer_fields(self, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
        """An older one lacks what has a default; here the first of these is gone, or all are."""
        whole: Any = value
        defaults = {f.name: f.default for f in fields(whole) if f.default is not MISSING}
        for gone in (list(defaults)[:1], list(defaults)):
            kept = [name for name in names_of(value) if name not in gone]
            expected = replace(whole, **{name: defaults[name] for name in gone})
            if len(kept) > 1:
                assert sent_by(monkeypatch, value, kept) == expected


def test_what_has_no_default_must_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="a RoundDelta came without token_ids"):
        sent_by(monkeypatch, DELTA, ["round", "origins"])


def test_an_old_gateway_and_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no background: nobody who reads it fails."""
    old = [name for name in names_of(REQUEST) if name not in ("is_background", "http_request_id")]
    read = sent_by(monkeypatch, REQUEST, old)
    assert isinstance(read, GenerateRequest)
    assert (read.is_background, read.http_request_id, read.trace_id) == (False, "", "a" * 32)
