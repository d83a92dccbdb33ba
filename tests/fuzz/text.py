"""`python -m tests.fuzz.text --num 200000 --seed 0`: stop strings, detokenizers, chat templates.

Cutting a text while it is written equals cutting it afterwards; decoding token by token equals
decoding at once, without half a character on the way; what a user writes never becomes a control
token. With `--model` on the tokenizer of smollm2-135m as well, which must have been fetched.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import Any

from paceline import models
from paceline.errors import RequestError
from paceline.gateway.chat import ChatMessage
from paceline.gateway.text import IncrementalDetokenizer, Segment, StopStringFilter, TextStream
from paceline.gateway.tokenizer import ToyTokenizer, load_tokenizer
from paceline.generation import TokenOrigin

ALPHABETS = (
    "ab",
    "aab",
    "abc \n",
    "aé😀",
    "\u200d👩👧a",
    "<|>im_endstart",
    "\ufffdé\x00",
    "的日本語a",
)
BROKEN = "\ufffd"
ROLES = ("user", "assistant", "system")


def _text(rng: random.Random, max_chars: int) -> str:
    alphabet = rng.choice(ALPHABETS)
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(max_chars)))


def _stops(rng: random.Random, text: str) -> list[str]:
    """Some occur in the text, some nearly do."""
    stops = []
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        if text and rng.random() < 0.7:
            start = rng.randrange(len(text))
            stop = text[start : start + rng.choice((1, 2, 3, 9))]
            stop += rng.choice(("", "", "a", "é"))
        else:
            stop = _text(rng, 6) or "a"
        stops.append(stop)
    return stops


def cut_at_stop(text: str, stops: list[str], includes_stop: bool) -> tuple[str, bool]:
    """By the definition: the stop string that is complete first, the longest of several."""
    ends = [(text.find(stop) + len(stop), len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, False
    end = min(end for end, _ in ends)
    longest = max(length for at, length in ends if at == end)
    return text[: end if includes_stop else end - longest], True


def fuzz_stops(rng: random.Random) -> str:
    text = _text(rng, rng.choice((8, 60, 400)))
    stops, includes_stop = _stops(rng, text), rng.random() < 0.3
    stop_filter = StopStringFilter(stops, includes_stop)
    out, at = "", 0
    while at < len(text) and not stop_filter.is_stopped:
        size = rng.choice((0, 1, 1, 2, 7, 50))
        segment = Segment(text[at : at + size], TokenOrigin.PLAIN)
        out += "".join(part.text for part in stop_filter.push(segment))
        at += size
    is_stopped = stop_filter.is_stopped
    out += "".join(part.text for part in stop_filter.finish())
    assert (out, is_stopped) == cut_at_stop(text, stops, includes_stop), (text, stops)
    return "stopped" if is_stopped else "not stopped"


def _token_ids(rng: random.Random, tokenizer: Any) -> list[int]:
    """Any ids: text, bytes of characters cut anywhere, control tokens, ids beyond the end."""
    size = tokenizer.vocab_size
    kind = rng.randrange(4)
    if kind == 0:
        return list(tokenizer.encode(_text(rng, 80)))
    ids = [rng.randrange(size) for _ in range(rng.choice((1, 9, 60)))]
    if kind == 1:
        return ids
    if kind == 2:
        return [rng.choice(ids) for _ in range(60)]
    cut = list(tokenizer.encode(_text(rng, 30)))
    return cut[rng.randrange(1 + len(cut)) :] + ids[:5] + cut[: rng.randrange(1 + len(cut))]


def fuzz_tokens(rng: random.Random, tokenizer: Any) -> str:
    token_ids = _token_ids(rng, tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    rest = detokenizer.finish()
    plain = [token_id for token_id in token_ids if not tokenizer.is_special(token_id)]
    whole = tokenizer.decode(plain) if plain else ""
    assert "".join(pieces) + rest == whole, token_ids
    if BROKEN not in whole:
        assert not any(BROKEN in piece for piece in pieces), token_ids
    for piece in pieces:
        piece.encode()  # no half of a surrogate pair
    stops = _stops(rng, whole)
    stream = TextStream(tokenizer, stops)
    out = ""
    for token_id in token_ids:
        out += "".join(part.text for part in stream.push(token_id, TokenOrigin.PLAIN))
        if stream.is_stopped:
            break
    if not stream.is_stopped:
        out += "".join(part.text for part in stream.finish())
    if BROKEN not in whole:
        assert (out, stream.is_stopped) == cut_at_stop(whole, stops, False), (token_ids, stops)
    return "broken characters" if BROKEN in whole else "whole characters"


def fuzz_chat(rng: random.Random, tokenizer: Any) -> str:
    """Content with control tokens spelt out gives as many control tokens as plain content."""
    specials = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "{{ 7 * 7 }}", "{% raw %}", "\x00"]
    messages, plain = [], []
    for _ in range(rng.choice((1, 1, 2, 5))):
        content = _text(rng, 30)
        for _ in range(rng.choice((0, 1, 3))):
            at = rng.randrange(len(content) + 1)
            content = content[:at] + rng.choice(specials) + content[at:]
        role = rng.choice(ROLES)
        messages.append(ChatMessage(role, content))
        plain.append(ChatMessage(role, "x"))
    try:
        token_ids = tokenizer.encode_chat(messages)
    except RequestError:
        return "refused"
    expected = sum(map(tokenizer.is_special, tokenizer.encode_chat(plain)))
    assert sum(map(tokenizer.is_special, token_ids)) == expected, messages
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids)
    assert token_ids == tokenizer.encode_chat(messages)
    return "encoded"


def fuzz(seed: int, num: int, tokenizers: dict[str, Any], only: int | None = None) -> Counter[str]:
    """A third each of stop strings, token streams and chats."""
    outcomes: Counter[str] = Counter()
    for case in range(num) if only is None else (only,):
        rng = random.Random(f"{seed}:{case}")
        name = rng.choice(list(tokenizers))
        try:
            if case % 3 == 0:
                outcomes[f"stops: {fuzz_stops(rng)}"] += 1
            elif case % 3 == 1:
                outcomes[f"{name} tokens: {fuzz_tokens(rng, tokenizers[name])}"] += 1
            else:
                outcomes[f"{name} chats: {fuzz_chat(rng, tokenizers[name])}"] += 1
        except BaseException:
            print(f"replay: python -m tests.fuzz.text --seed {seed} --case {case}")
            raise
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case only")
    parser.add_argument("--model", action="store_true", help="smollm2-135m's tokenizer as well")
    options = parser.parse_args()
    tokenizers: dict[str, Any] = {"toy": ToyTokenizer()}
    if options.model:
        tokenizers["smollm2-135m"] = load_tokenizer(str(models.resolve("smollm2-135m")))
    began = time.perf_counter()
    outcomes = fuzz(options.seed, options.num, tokenizers, options.case)
    seconds = time.perf_counter() - began
    print(f"seed {options.seed}: {outcomes.total()} cases in {seconds:.0f} s")
    for outcome, number in sorted(outcomes.items()):
        print(f"  {number:8} {outcome}")


if __name__ == "__main__":
    main()
