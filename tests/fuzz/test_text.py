"""The share of `python -m tests.fuzz.text` that every run affords, and that it can fail."""

from __future__ import annotations

import random

import pytest

from paceline import models
from paceline.gateway.text import StopStringFilter
from paceline.gateway.tokenizer import ToyTokenizer, load_tokenizer
from tests.fuzz.text import fuzz

TOY = {"toy": ToyTokenizer()}


def test_texts_do_not_depend_on_how_they_come() -> None:
    outcomes = fuzz(random.SystemRandom().randrange(1 << 32), 4000, TOY)
    assert outcomes.total() == 4000
    assert outcomes["stops: stopped"] > 100
    assert outcomes["stops: not stopped"] > 100
    assert outcomes["toy tokens: whole characters"] > 100
    assert outcomes["toy tokens: broken characters"] > 100


@pytest.mark.model
def test_texts_of_a_real_tokenizer() -> None:
    real = {"real": load_tokenizer(str(models.resolve("smollm2-135m")))}
    outcomes = fuzz(random.SystemRandom().randrange(1 << 32), 1500, real)
    assert outcomes["real chats: encoded"] > 100
    assert outcomes["real tokens: whole characters"] > 50


def test_a_filter_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a stop string were only looked for inside of one piece."""
    push = StopStringFilter.push

    def forgetful(self: StopStringFilter, segment: object, can_stop: bool = True) -> object:
        return [*push(self, segment, can_stop), *([] if self.is_stopped else self.finish())]

    monkeypatch.setattr(StopStringFilter, "push", forgetful)
    with pytest.raises(AssertionError):
        fuzz(1, 2000, TOY)
