"""Log-probabilities in answers: every token once, exact bytes, streamed like whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.generation import RoundDelta, TokenLogprobs, TokenOrigin

Score = Callable[..., RoundDelta]
EventsOf = Callable[[str], list[Any]]
EMOJI = "😀".encode()


def chat_token(byte: int, logprob: float) -> dict[str, Any]:
    text = bytes([byte]).decode("utf-8", errors="replace")
    return {"token": text, "logprob": logprob, "bytes": [byte]}


def chat_entry(byte: int, num_top: int) -> dict[str, Any]:
    top = [chat_token((byte + step) % 256, -0.25 * step - 0.125) for step in range(num_top)]
    return chat_token(byte, -byte / 64) | {"top_logprobs": top}


async def test_chat_shape(harness: Any, score: Score) -> None:
    harness.targets.script = [score(b"", "a"), score(b"", b"b\x00", "stop", 1)]
    answer = (await harness.chat(logprobs=True, top_logprobs=2)).json()
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -97 / 64,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.125, "bytes": [97]},
                    {"token": "b", "logprob": -0.375, "bytes": [98]},
                ],
            },
            chat_entry(98, 2),
            chat_entry(0, 2),
        ],
        "refusal": None,
    }
    assert answer["usage"]["completion_tokens"] == 3
    plain = (await harness.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert plain == [chat_entry(byte, 0) for byte in b"ab\x00"]
    assert (await harness.chat()).json()["choices"][0]["logprobs"] is None


async def test_completion_shape(harness: Any, score: Score) -> None:
    """The chosen token is in its table even where it is none of the top ones."""
    scored = (
        TokenLogprobs(97, -2.0, 3, ((98, -0.5), (99, -1.0))),
        TokenLogprobs(98, -0.5, 1, ((98, -0.5), (97, -2.0))),
    )
    harness.targets.script = [
        RoundDelta(0, (97, 98), (TokenOrigin.PLAIN,) * 2, finish_reason="length", logprobs=scored)
    ]
    for num_top, tables in (
        (2, [{"b": -0.5, "c": -1.0, "a": -2.0}, {"b": -0.5, "a": -2.0}]),
        (1, [{"b": -0.5, "a": -2.0}, {"b": -0.5}]),
        (0, [{"a": -2.0}, {"b": -0.5}]),
    ):
        answer = (await harness.complete(logprobs=num_top)).json()
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["a", "b"],
            "token_logprobs": [-2.0, -0.5],
            "top_logprobs": tables,
            "text_offset": [0, 1],
        }


async def test_what_cannot_occur_is_a_number(harness: Any, score: Score) -> None:
    scored = TokenLogprobs(97, -math.inf, 257, ((98, -0.5), (99, -1e9)))
    harness.targets.script = [
        RoundDelta(0, (97,), (TokenOrigin.PLAIN,), finish_reason="length", logprobs=(scored,))
    ]
    answer = (await harness.chat(logprobs=True, top_logprobs=2)).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0
    assert [item["logprob"] for item in entry["top_logprobs"]] == [-0.5, -9999.0]


async def test_half_characters_keep_their_bytes(harness: Any, score: Score) -> None:
    text = "a😀é".encode()
    harness.targets.script = [
        score(b"", text[:3]), score(b"", text[3:6], None, 1), score(b"", text[6:], "length", 2),
    ]  # fmt: skip
    answer = (await harness.chat(logprobs=True, top_logprobs=1)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == text
    assert answer["choices"][0]["message"]["content"] == "a😀é"
    assert [entry["token"] for entry in content] == ["a"] + ["\ufffd"] * 6

    logprobs = (await harness.complete(logprobs=3)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", *(f"bytes:\\x{byte:02x}" for byte in text[1:])]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 2]
    # No two half characters share a key.
    assert all(len(table) >= 3 for table in logprobs["top_logprobs"])


# (rounds, stop, number of completion tokens)
ENDS = [
    pytest.param([("abc", None), ("de", "length")], None, 5, id="length"),
    pytest.param([("abc", None), (b"d\x00", "stop")], None, 5, id="EOS"),
    pytest.param([("abE", None), ("NDcd", None)], "END", 5, id="stop string over two rounds"),
    pytest.param([("abE", None), ("N", None), ("x", "length")], "END", 5, id="held back"),
    pytest.param([(EMOJI[:2], None), (EMOJI[2:], "length")], None, 4, id="half an emoji each"),
    pytest.param([("", None), ("ab", None), ("", "length")], None, 2, id="empty rounds"),
    pytest.param([("END", "length")], "END", 3, id="nothing but the stop"),
]


def joined(parts: list[Any]) -> Any:
    """Streamed log-probabilities put together as a client does."""
    parts = [part for part in parts if part is not None]
    together: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            together[name] = together.get(name, []) + value if value is not None else None
    return together


@pytest.mark.parametrize("include_rounds", [False, True])
@pytest.mark.parametrize(("rounds", "stop", "num_tokens"), ENDS)
async def test_streamed_like_whole(
    rounds: Any, stop: Any, num_tokens: int, include_rounds: bool,
    harness: Any, score: Score, events_of: EventsOf,
) -> None:  # fmt: skip
    harness.targets.script = [score(b"hi", t, end, i) for i, (t, end) in enumerate(rounds)]
    extra = {"stop": stop, "speculation": {"include_rounds": include_rounds}}
    for ask, fields in (
        (harness.complete, {"logprobs": 2}),
        (harness.complete, {"logprobs": 2, "echo": True}),
        (harness.chat, {"logprobs": True, "top_logprobs": 2}),
    ):
        whole = (await ask(**fields, **extra)).json()
        shown = whole["choices"][0]["logprobs"]
        *chunks, done = events_of((await ask(**fields, **extra, stream=True)).text)
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert joined([choice["logprobs"] for choice in choices]) == shown
        key = "tokens" if "text" in choices[0] else "content"
        num_echoed = 2 if "echo" in fields else 0
        assert len(shown[key]) == num_tokens + num_echoed
        assert whole["usage"]["completion_tokens"] == num_tokens
        if key == "tokens":
            assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
            assert {len(shown[name]) for name in shown} == {num_tokens + num_echoed}


async def test_a_round_without_text_shows_its_logprobs(
    harness: Any, score: Score, events_of: EventsOf
) -> None:
    harness.targets.script = [score(b"", EMOJI[:2]), score(b"", EMOJI[2:], "length", 1)]
    chunks = events_of((await harness.complete(logprobs=0, stream=True)).text)
    first, second, last, _ = (chunk["choices"][0] if chunk != "[DONE]" else 0 for chunk in chunks)
    assert (first["text"], len(first["logprobs"]["tokens"])) == ("", 2)
    assert (second["text"], len(second["logprobs"]["tokens"])) == ("😀", 2)
    assert (last["text"], last["logprobs"]) == ("", None)


async def test_echo(harness: Any, score: Score, events_of: EventsOf) -> None:
    harness.targets.script = [score(b"h\xc3\xa9", "ab", "length")]
    answer = (await harness.complete("hé", echo=True, logprobs=1)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "héab"
    assert choice["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "a", "b"],
        "token_logprobs": [None, -0xC3 / 64, -0xA9 / 64, -97 / 64, -98 / 64],
        "top_logprobs": [
            None, {"bytes:\\xc3": -0.125}, {"bytes:\\xa9": -0.125}, {"a": -0.125}, {"b": -0.125},
        ],
        "text_offset": [0, 1, 1, 2, 3],
    }  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 2

    plain = (await harness.complete("hé", echo=True)).json()["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("héab", None)
    ids = (await harness.complete([104, 256, 195, 169], echo=True)).json()["choices"][0]
    assert ids["text"] == "héab"
    chunks = events_of((await harness.complete("hé", echo=True, stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["hé", "ab", ""]


async def test_a_stop_string_in_the_prompt_ends_nothing(harness: Any, score: Score) -> None:
    harness.targets.script = [score(b"END", "Dab", "length")]
    (choice,) = (await harness.complete("END", echo=True, stop="END")).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ENDDab", "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_a_prompt_alone(
    stream: bool, harness: Any, score: Score, events_of: EventsOf
) -> None:
    """The target has to make one token; nobody sees it, whatever it is."""
    for end in ("length", "stop"):
        harness.targets.script = [score(b"abc", b"\x00", end)]
        answer = await harness.complete("abc", max_tokens=0, echo=True, logprobs=0, stream=stream)
        assert harness.targets.requests[-1].max_tokens == 1
        if stream:
            shown, last = (chunk["choices"][0] for chunk in events_of(answer.text)[:-1])
            assert (last["text"], last["finish_reason"]) == ("", "length")
        else:
            (shown,) = answer.json()["choices"]
            assert shown["finish_reason"] == "length"
            assert answer.json()["usage"]["completion_tokens"] == 0
        assert shown["text"] == "abc"
        assert shown["logprobs"]["tokens"] == ["a", "b", "c"]
        assert shown["logprobs"]["token_logprobs"] == [None, -98 / 64, -99 / 64]
    assert harness.targets.aborts == []
    assert await harness.is_idle()


async def test_prompt_logprobs(harness: Any, score: Score) -> None:
    """vLLM's shape; the token itself first, equals share a rank."""
    tied = TokenLogprobs(98, -0.5, 1, ((97, -0.5), (98, -0.5), (99, -1.0)))
    low = TokenLogprobs(99, -7.0, 9, ((97, -0.5), (98, -1.0), (100, -1.5)))
    harness.targets.script = [
        RoundDelta(
            0, (97,), (TokenOrigin.PLAIN,), finish_reason="length", prompt_logprobs=(tied, low)
        )
    ]
    answer = (await harness.complete("abc", prompt_logprobs=2)).json()
    expected = [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
        {
            "99": {"logprob": -7.0, "rank": 9, "decoded_token": "c"},
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        },
    ]
    assert answer["choices"][0]["prompt_logprobs"] == expected
    assert answer["choices"][0]["logprobs"] is None
    alone = (await harness.complete("abc", prompt_logprobs=0)).json()
    assert [list(table or ()) for table in alone["choices"][0]["prompt_logprobs"]] == [
        [], ["98"], ["99"],
    ]  # fmt: skip

    prompt = b"user: hi\nassistant: "
    harness.targets.script = [score(prompt, "x", "length")]
    chat = (await harness.chat(prompt_logprobs=1)).json()
    assert len(chat["prompt_logprobs"]) == len(prompt)
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in (await harness.chat()).json()


async def test_echo_and_prompt_logprobs_have_their_own_widths(harness: Any, score: Score) -> None:
    harness.targets.script = [score(b"ab", "c", "length")]
    for num_echo, num_prompt in ((1, 3), (3, 1)):
        fields = {"echo": True, "logprobs": num_echo, "prompt_logprobs": num_prompt}
        (choice,) = (await harness.complete("ab", **fields)).json()["choices"]
        assert len(choice["logprobs"]["top_logprobs"][1]) == num_echo
        assert len(choice["prompt_logprobs"][1]) == num_prompt


async def test_a_prompt_of_one_token_has_no_law(harness: Any, score: Score) -> None:
    harness.targets.script = [score(b"a", "b", "length")]
    fields = {"echo": True, "logprobs": 1, "prompt_logprobs": 1}
    (choice,) = (await harness.complete("a", **fields)).json()["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None, -98 / 64]


async def test_a_target_that_forgets_them_is_a_bug(harness: Any, round_of: Any) -> None:
    harness.targets.script = [round_of("ab", "length")]
    for fields in ({"logprobs": 1}, {"prompt_logprobs": 1}):
        assert (await harness.complete(**fields)).status_code == 500
    assert await harness.is_idle()
