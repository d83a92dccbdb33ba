"""What a client reads: whole and streamed answers, usage, speculation, every mix of ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.generation import RoundDelta, SpeculationRequest, TokenOrigin
from paceline.sampling.params import SamplingParams, VerificationMode

ACC, REC, BON = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS
RoundOf = Callable[..., RoundDelta]
EventsOf = Callable[[str], list[Any]]

ROUNDS = {
    "wall_ms": 13.5, "draft_ms": 1.5, "wire_out_ms": 0.25, "window_ms": 1.0, "queue_ms": 0.125,
    "verify_ms": 9.0, "sample_ms": 0.5, "wire_back_ms": 0.375, "rewind_ms": 0.75,
}  # fmt: skip


def spoken(round_of: RoundOf) -> list[RoundDelta]:
    """Three rounds: two accepted and a recovered one, all four accepted and a bonus, EOS."""
    return [
        round_of(
            "abc", None, 0, [ACC, ACC, REC], num_draft_tokens=4, num_accepted_tokens=2,
            num_speculative_tokens=4, source="suffix", **ROUNDS,
        ),
        round_of(
            "defgh", None, 1, [ACC] * 4 + [BON], num_draft_tokens=4, num_accepted_tokens=4,
            num_speculative_tokens=4, source="medusa",
        ),
        round_of(b"i\x00", "stop", 2, [ACC, REC], num_draft_tokens=4, num_accepted_tokens=1,
            num_speculative_tokens=4, source="ngram",
        ),
    ]  # fmt: skip


USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 10,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 0},
    "speculation": {
        "rounds": 3,
        "proposed": 12,
        "accepted": 7,
        "acceptance_rate": 0.583333,
        "mean_accepted_length": 3.333333,
    },
}


async def test_whole_completion(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = spoken(round_of)
    answer = await harness.complete()
    assert answer.status_code == 200
    assert answer.json() == {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "toy",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "text": "abcdefghi",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": USAGE,
    }
    assert harness.targets.aborts == []
    assert harness.targets.streams[0].is_exhausted
    assert await harness.is_idle()


async def test_whole_chat(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = spoken(round_of)
    answer = (await harness.chat()).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"] == "chatcmpl-0"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abcdefghi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    # "user: hi\nassistant: "
    assert answer["usage"] == USAGE | {"prompt_tokens": 20, "total_tokens": 30}


async def test_streamed_chat(harness: Any, round_of: RoundOf, events_of: EventsOf) -> None:
    harness.targets.script = spoken(round_of)
    answer = await harness.chat(stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]"
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 6
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "abc"},
        {"content": "defgh"},
        {"content": "i"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None, None, None, None, "stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 5
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == USAGE | {"prompt_tokens": 20, "total_tokens": 30}
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-0"}


async def test_streamed_completion(harness: Any, round_of: RoundOf, events_of: EventsOf) -> None:
    harness.targets.script = spoken(round_of)
    *chunks, done = events_of((await harness.complete(stream=True)).text)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["abc", "defgh", "i", ""]
    assert all("usage" not in chunk and "speculation" not in chunk for chunk in chunks)


async def test_rounds_and_origins_on_request(
    harness: Any, round_of: RoundOf, events_of: EventsOf
) -> None:
    harness.targets.script = spoken(round_of)
    speculation = {"include_rounds": True}
    whole = (await harness.complete(speculation=speculation)).json()
    assert whole["speculation"]["rounds"][0] == {
        "round": 0, "source": "suffix", "num_speculative_tokens": 4, "proposed": 4, "accepted": 2,
        **ROUNDS, "wire_ms": 0.25,
    }  # fmt: skip
    assert whole["speculation"]["pieces"] == [
        {"text": "ab", "origin": "accepted", "source": "suffix"},
        {"text": "c", "origin": "recovered", "source": ""},
        {"text": "defg", "origin": "accepted", "source": "medusa"},
        {"text": "h", "origin": "bonus", "source": ""},
        {"text": "i", "origin": "accepted", "source": "ngram"},
    ]
    streamed = await harness.complete(speculation=speculation, stream=True)
    chunks = events_of(streamed.text)[:3]
    for key in ("rounds", "pieces"):
        together = [item for chunk in chunks for item in chunk["speculation"][key]]
        assert together == whole["speculation"][key]


async def test_pieces_of_two_sources_stay_two(harness: Any, round_of: RoundOf) -> None:
    """What was held back for a stop string comes out with later rounds'."""
    harness.targets.script = [
        round_of("a", None, 0, [ACC], source="suffix"),
        round_of("b", None, 1, [ACC], source="medusa"),
        round_of("x", "length", 2, [ACC], source="medusa"),
    ]
    whole = (await harness.complete(stop="abc", speculation={"include_rounds": True})).json()
    assert whole["speculation"]["pieces"] == [
        {"text": "a", "origin": "accepted", "source": "suffix"},
        {"text": "bx", "origin": "accepted", "source": "medusa"},
    ]


async def test_silent_rounds_show_only_when_asked(
    harness: Any, round_of: RoundOf, events_of: EventsOf
) -> None:
    """Half an emoji in each of two rounds: one text event, or two with rounds."""
    emoji = "😀".encode()
    harness.targets.script = [
        round_of(emoji[:2], None, 0, [ACC, REC]),
        round_of(emoji[2:], "length", 1, [ACC, BON]),
    ]
    plain = events_of((await harness.complete(stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in plain[:-1]] == ["😀", ""]
    answer = await harness.complete(stream=True, speculation={"include_rounds": True})
    shown = events_of(answer.text)
    assert [chunk["choices"][0]["text"] for chunk in shown[:-1]] == ["", "😀", ""]
    assert shown[1]["speculation"]["pieces"] == [{"text": "😀", "origin": "bonus", "source": ""}]


# (rounds, stop, text, finish_reason, completion_tokens); a round is (text, finish_reason)
ENDS = [
    pytest.param([("hello END tail", None), ("x", "length")], "END", "hello ", "stop", 9, id="cut"),
    pytest.param([("hello END", "length")], "END", "hello ", "stop", 9, id="peers 21: both"),
    pytest.param([("helloENDxy", "length")], "END", "hello", "stop", 8, id="peers 21: stop first"),
    pytest.param([("oENDefgh", None), ("x", "stop")], "END", "o", "stop", 4, id="peers 22: early"),
    pytest.param([("abE", None), ("N", None), ("Dcd", None)], "END", "ab", "stop", 5, id="split"),
    pytest.param([("abE", None), ("N", "length")], "END", "abEN", "length", 4, id="unfinished"),
    pytest.param([("abEN\x00", "stop")], "END", "abEN", "stop", 5, id="EOS while held back"),
    pytest.param([("abEND\x00", "stop")], "END", "ab", "stop", 5, id="stop string before EOS"),
    pytest.param([("x\x00", "stop")], None, "x", "stop", 2, id="peers 24: EOS counts, no text"),
    pytest.param([("\x00", "stop")], None, "", "stop", 1, id="EOS at once"),
    pytest.param([("A", "stop")], None, "", "stop", 1, id="another stop id has no text either"),
    pytest.param([("xyz", "length")], None, "xyz", "length", 3, id="length"),
    pytest.param([("aXbYc", "length")], ["Y", "X"], "a", "stop", 2, id="earliest of two"),
    pytest.param([("xabz", "length")], ["xabz", "ab"], "x", "stop", 3, id="completed first wins"),
    pytest.param([("xaby", "length")], ["b", "ab"], "x", "stop", 3, id="longest of one end"),
    pytest.param([("END", "length")], "END", "", "stop", 3, id="nothing before the stop"),
    pytest.param([("EEND!", "length")], "END", "E", "stop", 4, id="false start"),
    pytest.param([("\n\n", None), ("\n", "length")], "\n\n\n", "", "stop", 3, id="line breaks"),
    pytest.param([("é😀", "length")], "😀", "é", "stop", 6, id="stop of four bytes"),
    pytest.param([(b"ok\xf0\x9f", "length")], None, "ok\ufffd", "length", 4, id="half an emoji"),
    pytest.param([(b"ok\xf0", None), (b"\x9f\x00", "stop")], None, "ok\ufffd", "stop", 5, id="EOS"),
    pytest.param([("", None), ("ab", None), ("", "length")], None, "ab", "length", 2, id="empty"),
]  # fmt: skip


@pytest.mark.parametrize(("rounds", "stop", "text", "finish_reason", "num_tokens"), ENDS)
async def test_every_end(
    rounds: Any, stop: Any, text: str, finish_reason: str, num_tokens: int,
    harness: Any, round_of: RoundOf, events_of: EventsOf,
) -> None:  # fmt: skip
    """Streamed and whole say the same, and the target is told unless it ended by itself."""
    harness.targets.script = [round_of(t, end, i) for i, (t, end) in enumerate(rounds)]
    whole = (await harness.complete(stop=stop)).json()
    assert whole["choices"][0]["text"] == text
    assert whole["choices"][0]["finish_reason"] == finish_reason
    assert whole["usage"]["completion_tokens"] == num_tokens

    answer = await harness.complete(stop=stop, stream=True, stream_options={"include_usage": True})
    assert answer.text.count("[DONE]") == 1
    *chunks, usage, done = events_of(answer.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"][0]["finish_reason"] == finish_reason
    assert usage["usage"] == whole["usage"]

    num_rounds = whole["usage"]["speculation"]["rounds"]
    was_cut = rounds[num_rounds - 1][1] is None
    assert [stream.num_cancels for stream in harness.targets.streams] == [int(was_cut)] * 2
    assert harness.targets.aborts == (["cmpl-0", "cmpl-1"] if was_cut else [])
    assert await harness.is_idle()


async def test_request_reaches_the_target_as_asked(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("x", "length")]
    await harness.complete(
        "abc", temperature=0.5, top_p=0.9, top_k=7, seed=-1, max_tokens=5, ignore_eos=True,
        speculation={
            "method": "off", "max_tokens": 3, "mode": "coupled", "lookahead": "fixed",
        },
    )  # fmt: skip
    await harness.complete("abc", temperature=0, top_k=-1, seed=None, max_tokens=None)
    asked, default = harness.targets.requests
    assert asked.request_id == "cmpl-0"
    assert asked.prompt_token_ids == (97, 98, 99)
    assert asked.max_tokens == 5
    assert asked.sampling == SamplingParams(0.5, 0.9, 7, 2**64 - 1)
    assert asked.speculation == SpeculationRequest("off", 3, VerificationMode.COUPLED, "fixed")
    assert asked.ignore_eos
    assert default.max_tokens == 16
    assert default.sampling == SamplingParams(0.0, 1.0, 0, 77)
    assert default.speculation == SpeculationRequest()


async def test_cached_prompt_tokens_are_told(
    harness: Any, round_of: RoundOf, events_of: EventsOf
) -> None:
    """Only the first round says how many; a later one has nothing to add."""
    harness.targets.script = [
        round_of("a", num_cached_tokens=1),
        round_of("b", "length", 1, num_cached_tokens=2),
    ]
    whole = (await harness.complete()).json()
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    answer = await harness.complete(stream=True, stream_options={"include_usage": True})
    assert events_of(answer.text)[-2]["usage"] == whole["usage"]


async def test_models(harness: Any) -> None:
    model = {
        "id": "toy", "object": "model", "created": 1_700_000_000, "owned_by": "paceline",
        "root": "toy", "parent": None, "max_model_len": 64,
        "speculation_methods": ["model", "ngram", "suffix", "hybrid", "auto", "off"],
        "refused_speculation_methods": {"medusa": "this model has no Medusa heads"},
    }  # fmt: skip
    assert (await harness.get("/v1/models")).json() == {"object": "list", "data": [model]}
    assert (await harness.get("/v1/models/toy")).json() == model
    missing = await harness.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
