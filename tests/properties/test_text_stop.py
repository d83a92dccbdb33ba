"""Stop strings and origins do not depend on how text was cut into tokens and rounds."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.config import GatewayConfig
from paceline.gateway.assembler import Assembler, RoundText
from paceline.gateway.openai import CompletionBody
from paceline.gateway.plan import Planner
from paceline.gateway.responses import whole_body
from paceline.gateway.sse import ChunkBuilder
from paceline.gateway.text import Segment, StopStringFilter, TextStream
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import FinishReason, RoundDelta, TokenOrigin

TOY = ToyTokenizer()
letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
origins = st.sampled_from(TokenOrigin)


def naive_stop(text: str, stop_strings: list[str]) -> tuple[str, int | None]:
    """The text before the first completed stop string, and where that one ends."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stop_strings if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], end
    return text, None


def joined(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@given(st.lists(letters, max_size=12), stops)
def test_filter_equals_naive_twin(chunks: list[str], stop_strings: list[str]) -> None:
    stop_filter = StopStringFilter(stop_strings)
    out = ""
    for index, chunk in enumerate(chunks):
        out += joined(stop_filter.push(Segment(chunk, TokenOrigin.PLAIN)))
        seen = "".join(chunks[: index + 1])
        expected, end = naive_stop(seen, stop_strings)
        assert stop_filter.is_stopped == (end is not None)
        if end is not None:
            assert out == expected
        else:
            # Exactly the longest suffix that may still become a stop string is held back.
            held = max(
                (n for stop in stop_strings for n in range(len(stop)) if seen.endswith(stop[:n])),
                default=0,
            )
            assert out == seen[: len(seen) - held]
    out += joined(stop_filter.finish())
    assert out == naive_stop("".join(chunks), stop_strings)[0]


@given(st.lists(st.tuples(st.sampled_from("abé😀"), origins), max_size=30), stops)
def test_every_character_keeps_the_origin_of_its_token(
    written: list[tuple[str, TokenOrigin]], stop_strings: list[str]
) -> None:
    """The byte that completes a character gives it its origin."""
    stream = TextStream(TOY, stop_strings)
    segments: list[Segment] = []
    for char, origin in written:
        *head, last = char.encode()
        for byte in head:
            segments += stream.push(byte, TokenOrigin.PLAIN)
        segments += stream.push(last, origin)
    if not stream.is_stopped:
        segments += stream.finish()
    got = [(char, segment.origin) for segment in segments for char in segment.text]
    text = "".join(char for char, _ in written)
    assert got == written[: len(naive_stop(text, stop_strings)[0])]


def deltas(token_ids: list[int], cuts: set[int], finish_reason: FinishReason) -> list[RoundDelta]:
    """The ids cut into rounds before the given indices; the last round ends the sequence."""
    borders = [0, *sorted(cut for cut in cuts if 0 < cut < len(token_ids)), len(token_ids)]
    rounds = []
    for number, (start, end) in enumerate(pairwise(borders)):
        ids = tuple(token_ids[start:end])
        is_last = end == len(token_ids)
        rounds.append(
            RoundDelta(
                number,
                ids,
                (TokenOrigin.ACCEPTED,) * len(ids),
                finish_reason=finish_reason if is_last else None,
            )
        )
    return rounds


def assemble(
    rounds: list[RoundDelta], stop_strings: list[str]
) -> tuple[Assembler, list[RoundText]]:
    assembler = Assembler(TOY, stop_strings, num_prompt_tokens=3)
    items = []
    for delta in rounds:
        items.append(assembler.receive_round(delta))
        if assembler.finish_reason:
            break
    return assembler, items


bodies = st.binary(min_size=1, max_size=30).map(list) | letters.filter(bool).map(
    lambda text: list(text.encode())
)


@given(bodies, st.sets(st.integers(1, 30)), st.sampled_from(["stop", "length"]), stops)
def test_answer_does_not_depend_on_rounds(
    token_ids: list[int], cuts: set[int], finish_reason: FinishReason, stop_strings: list[str]
) -> None:
    one, items_one = assemble(deltas(token_ids, set(), finish_reason), stop_strings)
    many, items_many = assemble(deltas(token_ids, cuts, finish_reason), stop_strings)
    assert "".join(i.text for i in items_many) == "".join(i.text for i in items_one)
    assert many.finish_reason == one.finish_reason
    assert many.usage.num_completion_tokens == one.usage.num_completion_tokens

    written = token_ids[:-1] if finish_reason == "stop" else token_ids
    text, end = naive_stop(TOY.decode(written), stop_strings)
    assert "".join(i.text for i in items_one) == text
    assert one.finish_reason == ("stop" if end is not None else finish_reason)
    if end is None:
        assert one.usage.num_completion_tokens == len(token_ids)


@given(
    bodies,
    st.sets(st.integers(1, 30)),
    st.booleans(),
    stops,
)
def test_stream_says_what_the_whole_answer_says(
    token_ids: list[int], cuts: set[int], include_rounds: bool, stop_strings: list[str]
) -> None:
    body = CompletionBody.model_validate(
        {
            "model": "toy",
            "prompt": "abc",
            "stop": stop_strings,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"include_rounds": include_rounds},
        }
    )
    plans = Planner(GatewayConfig(), TOY, 64).plans(body, "cmpl-1", [0])
    assembler, items = assemble(deltas(token_ids, cuts, "length"), stop_strings)
    chunks = ChunkBuilder(plans, 1, [assembler.usage])
    raw = b"".join(chunks.round(0, item) for item in items)
    raw += chunks.end()
    events = raw.decode().removesuffix("\n\n").split("\n\n")
    assert [event for event in events if event == "data: [DONE]"] == events[-1:]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    whole = whole_body(plans, 1, [items], assembler.usage)
    text = "".join(choice["text"] for chunk in parsed for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"]
    assert parsed[-1]["usage"] == whole["usage"]
    assert parsed[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    if include_rounds:
        pieces = [p for chunk in parsed[:-2] for p in chunk["speculation"]["pieces"]]
        assert "".join(piece["text"] for piece in pieces) == text
        assert pieces == whole["speculation"]["pieces"]
