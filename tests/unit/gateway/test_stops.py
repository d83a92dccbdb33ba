"""Where a choice ends besides its length: stop ids, stop strings, the first tokens, why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.gateway.text import TextStream
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import RoundDelta, TokenOrigin
from paceline.methods import ProposalSource

RoundOf = Callable[..., RoundDelta]
EventsOf = Callable[[str], list[Any]]
ACCEPTED = TokenOrigin.ACCEPTED
letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive_stop(text: str, stop_strings: list[str], min_tokens: int) -> tuple[str, str | None]:
    """The text before the stop string that ends first after so many characters, and that one."""
    for end in range(min_tokens + 1, len(text) + 1):
        found = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(letters, stops, st.integers(0, 12), st.booleans())
def test_stops_equal_their_naive_twin(
    text: str, stop_strings: list[str], min_tokens: int, includes_stop: bool
) -> None:
    """A character is a token here. No stop string ends within the first ones."""
    stream = TextStream(ToyTokenizer(), stop_strings, min_tokens, includes_stop)
    out = ""
    for token_id in text.encode():
        out += "".join(s.text for s in stream.push(token_id, TokenOrigin.PLAIN))
        if stream.is_stopped:
            break
    else:
        out += "".join(s.text for s in stream.finish())
    expected, stop = naive_stop(text, stop_strings, min_tokens)
    assert stream.stop == stop
    assert out == expected + ((stop or "") if includes_stop else "")


def test_text_that_was_held_back_keeps_its_source() -> None:
    """The target's own tokens have none."""
    stream = TextStream(ToyTokenizer(), ["bcd"])
    steps: tuple[tuple[str, TokenOrigin, ProposalSource, Any], ...] = (
        ("b", ACCEPTED, "suffix", []),
        ("c", ACCEPTED, "medusa", []),
        ("x", TokenOrigin.RECOVERED, "medusa", [("b", "suffix"), ("c", "medusa"), ("x", "")]),
        ("y", ACCEPTED, "ngram", [("y", "ngram")]),
    )
    for char, origin, source, shown in steps:
        segments = stream.push(ord(char), origin, source)
        assert [(segment.text, segment.source) for segment in segments] == shown


# (rounds, fields, text, finish_reason, stop_reason, completion tokens)
ENDS = [
    pytest.param([("aXbXc", "length")], {"stop": "X"}, "a", "stop", "X", 2, id="string"),
    pytest.param([("ab\x00", "stop")], {}, "ab", "stop", None, 3, id="EOS"),
    pytest.param([("abc", "length")], {}, "abc", "length", None, 3, id="length"),
    pytest.param([("abc", "stop")], {"stop_token_ids": [99]}, "ab", "stop", 99, 3, id="id"),
    pytest.param([("abc", "length")], {"stop_token_ids": [99]}, "abc", "length", None, 3,
                 id="an id that the target did not stop at"),
    pytest.param([("ab\x00", "stop")], {"stop_token_ids": [99]}, "ab", "stop", None, 3,
                 id="EOS and not the id"),
    pytest.param([("aXc", "stop")], {"stop_token_ids": [99], "stop": "X"}, "a", "stop", "X", 2,
                 id="string before id"),
    pytest.param([("aXbXc", "length")], {"stop": "X", "include_stop_str_in_output": True},
                 "aX", "stop", "X", 2, id="string included"),
    pytest.param([("abc", "stop")], {"stop_token_ids": [99], "include_stop_str_in_output": True},
                 "abc", "stop", 99, 3, id="id included"),
    pytest.param([((97, 256), "stop")], {"include_stop_str_in_output": True},
                 "a", "stop", None, 2, id="a control token has no text to include"),
    pytest.param([("aXbXc", "length")], {"stop": "X", "min_tokens": 2}, "aXb", "stop", "X", 4,
                 id="a stop within the first tokens ends nothing"),
    pytest.param([("aX", None), ("bXc", "length")], {"stop": "X", "min_tokens": 1},
                 "a", "stop", "X", 2, id="the first token after them does"),
    pytest.param([("aXYb", "length")], {"stop": "XY", "min_tokens": 2}, "a", "stop", "XY", 3,
                 id="it may begin within them"),
    pytest.param([("aXX", "length")], {"stop": "XX", "min_tokens": 3}, "aXX", "length", None, 3,
                 id="not after the end either"),
    pytest.param([("XXXX", "length")], {"stop": "XX", "min_tokens": 2}, "X", "stop", "XX", 3,
                 id="overlapping"),
    pytest.param([(b"ab\xf0", "length")], {"stop": "\ufffd", "min_tokens": 3},
                 "ab\ufffd", "length", None, 3, id="half a character of the first tokens"),
    pytest.param([(b"ab\xf0", "length")], {"stop": "\ufffd", "min_tokens": 2},
                 "ab", "stop", "\ufffd", 3, id="half a character after them"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "fields", "text", "finish_reason", "stop_reason", "num_tokens"), ENDS
)
async def test_every_end(
    rounds: Any, fields: dict[str, Any], text: str, finish_reason: str, stop_reason: Any,
    num_tokens: int, harness: Any, round_of: RoundOf, events_of: EventsOf,
) -> None:  # fmt: skip
    harness.targets.script = [round_of(t, end, i) for i, (t, end) in enumerate(rounds)]
    for ask in (harness.complete, harness.chat):
        whole = (await ask(**fields)).json()
        (choice,) = whole["choices"]
        assert choice.get("text", choice.get("message", {}).get("content")) == text
        assert choice["finish_reason"] == finish_reason
        assert choice["stop_reason"] == stop_reason
        assert type(choice["stop_reason"]) is type(stop_reason)
        assert whole["usage"]["completion_tokens"] == num_tokens

        chunks = events_of((await ask(**fields, stream=True)).text)[:-1]
        choices = [chunk["choices"][0] for chunk in chunks]
        shown = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
        assert "".join(shown) == text
        assert choices[-1]["finish_reason"] == finish_reason
        assert choices[-1]["stop_reason"] == stop_reason
    assert await harness.is_idle()
