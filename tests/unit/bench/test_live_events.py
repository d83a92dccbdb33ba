"""Server-sent events to chunks, however the network cuts them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.bench import events
from paceline.bench.events import Chunk, EventReader, StreamError, UsageCounts


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}


def one_round(accepted: int, proposed: int, k: int) -> dict[str, Any]:
    return {"round": 0, "accepted": accepted, "proposed": proposed, "num_speculative_tokens": k}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "speculation": {"rounds": 2, "proposed": 4, "accepted": 2},
    },
}
STREAM = b"".join(
    [
        event(chat("")),
        b": a comment\n\nevent: message\n",
        event(chat("Grü", speculation={"rounds": [one_round(1, 2, 2)]})),
        event(chat("\u00dfe", speculation={"rounds": [one_round(0, 2, 3), one_round(0, 0, 3)]})),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        event(USAGE),
        event(b"[DONE]"),
    ]
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, len(STREAM)])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_stream_in_pieces_of_any_size(size: int, line_end: bytes) -> None:
    data, reader, chunks = STREAM.replace(b"\n", line_end), EventReader(), []
    for first in range(0, len(data), size):
        chunks += reader.feed(data[first : first + size])
    assert reader.is_done
    assert chunks == [
        Chunk(),
        Chunk("Grü", 2, 2, 1, 1, [2]),
        Chunk("ße", 2, 2, 0, 1, [3, 3]),
        Chunk(finish_reason="stop"),
        Chunk(usage=UsageCounts(4, 5, (2, 4, 2))),
    ]


def test_without_rounds_a_chunk_with_text_is_one_token() -> None:
    """As other servers stream; the count of tokens then comes with the usage."""
    body = {"choices": [{"index": 0, "text": "a"}], "usage": None}
    nothing = {"choices": [{"index": 0, "text": ""}]}
    found = list(EventReader().feed(event(body) + event(nothing)))
    assert [chunk.num_tokens for chunk in found] == [1, 0]
    usage = {"choices": [], "usage": {"completion_tokens": 1}}
    (chunk,) = EventReader().feed(event(usage))
    assert chunk.usage == UsageCounts(1, 0, None)


def test_nothing_counts_after_the_end() -> None:
    assert list(EventReader().feed(event(b"[DONE]") + event(chat("more")))) == []


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (event({"error": {"message": "the target died", "code": "target_lost"}}), "target_lost"),
        (event({"error": {"message": "no code", "code": None}}), "stream_error"),
        (event({"error": "just words"}), "stream_error"),
        (event(b"{no json"), "malformed"),
        (event([1]), "malformed"),
        (event(b"7"), "malformed"),
        (event({"choices": [7]}), "malformed"),
        (event({"choices": [{"delta": "text"}]}), "malformed"),
        (event({"choices": [], "usage": {"prompt_tokens": 1}}), "malformed"),
        (event(chat("a", speculation={"rounds": [{"accepted": 1}]})), "malformed"),
    ],
)
def test_what_is_no_answer_is_an_error_with_a_code(data: bytes, code: str) -> None:
    with pytest.raises(StreamError) as caught:
        list(EventReader().feed(data))
    assert caught.value.code == code


def test_a_line_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 100)
    reader = EventReader()
    assert list(reader.feed(b"data: " + b"x" * 90)) == []
    with pytest.raises(StreamError):
        list(reader.feed(b"x" * 90))


def test_an_endless_code_is_cut() -> None:
    with pytest.raises(StreamError) as caught:
        list(EventReader().feed(event({"error": {"message": "", "code": "x" * 1000}})))
    assert len(caught.value.code) == events.MAX_CODE_CHARS
