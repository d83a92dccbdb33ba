"""HTTP requests that nobody should send, derived from the pydantic models of the two bodies. Pure.

Every field meets every JSON type, boundary values and its neighbours; valid bodies are bent; the
JSON itself, headers, paths and methods are wrong in every way that we know. All randomness comes
from one `random.Random`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from paceline.gateway.chat import ChatBody
from paceline.gateway.openai import CompletionBody, SpeculationOptions, StreamOptions
from paceline.gateway.parameters import CHAT_NEUTRAL, COMPLETION_NEUTRAL, MESSAGE_NEUTRAL
from paceline.gateway.tokenization import DetokenizeBody, TokenizeBody

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MODELS: dict[str, type[BaseModel]] = {TEXT: CompletionBody, CHAT: ChatBody}
KEY = "sk-fuzz-0123456789abcdef"

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 20, 21, 256, 257, 2**31 - 1, 2**31, 2**53, 2**63, -(2**63),
    10**30, 0.0, -0.0, 0.5, 1.0, 1e-7, 1e-310, 1e308, -2.0, 2.0000001, 5e-324, "", "a", "0", "1",
    "toy", "text", "user", "auto", "none", "x" * 300, "\x00", "\u202e", "🙂" * 70, "é",
)  # fmt: skip
# What the JSON writer must not repair.
RAW = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 400, b"9" * 5000, b"01", b"+1",
    b"0x10", b".5", b"1.", b"'a'", b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff\xfe"',
    b'"\xed\xa0\x80"', b'"a\nb"', b"undefined", b"true1", b"1e400000", b"1.0e-400", b'"\\x41"',
    b"[" * 150 + b"]" * 150, b"[" * 3000, b'{"a":' * 150 + b"1" + b"}" * 150, b"/**/1", b"1 //",
)  # fmt: skip
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "post")
PATHS = (
    "/", "/v1", "/v1/", "/v1/completions/", "/v1/chat", "/v2/completions", "/v1//completions",
    "/v1/completions\x00", "/V1/COMPLETIONS", "/v1/models", "/v1/models/toy", "/v1/models/x",
    "/v1/models/" + "y" * 3000, "/v1/models/..%2f..%2fetc", "/docs", "/openapi.json", "/metrics",
    "/health", "/ready", "/../etc/passwd", "/v1/embeddings", "/\u202e", "/%00", "/v1/models/a\nb",
)  # fmt: skip
CONTENT_TYPES = (
    b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x",
    b"application/json; charset=utf-16", b"APPLICATION/JSON", b"application/json;",
    b"application/json, text/plain", b"application/jsonx", b"\xff", b"application/json" + b" " * 99,
)  # fmt: skip
HEADERS = (
    (b"content-length", b"5"), (b"content-length", b"-1"), (b"content-length", b"9" * 4000),
    (b"content-length", b"1e9"), (b"content-length", "²".encode()), (b"content-encoding", b"gzip"),
    (b"transfer-encoding", b"chunked"), (b"expect", b"100-continue"), (b"host", b"evil\r\nx: y"),
    (b"x-request-id", b"ok-1"), (b"x-request-id", b"a\r\nset-cookie: b"),
    (b"x-request-id", b"\xff"), (b"x-request-id", b""),
    (b"x-request-id", b"z" * 5000), (b"authorization", b"Bearer wrong"),
    (b"authorization", b"\xff"), (b"authorization", b"Basic YTpi"),
    (b"authorization", b"Bearer " + KEY.encode() + b", Bearer x"), (b"accept", b"image/png"),
    (b"cookie", b"a=" + b"b" * 2000), (b"x-filler", b"f" * 20_000), (b"upgrade", b"websocket"),
    (b"x-forwarded-for", b"1.2.3.4"), (b"content-type", b"text/html"), (b"", b""),
)  # fmt: skip


@dataclass
class HttpCase:
    """One request. `chunks` are the parts in which its body arrives."""

    method: str = "POST"
    path: str = TEXT
    chunks: list[bytes] = field(default_factory=list)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class BodyFuzzer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ways: list[Callable[[], HttpCase]] = []
        for way, weight in (
            (self._swept, 26),
            (self._combined, 24),
            (self._valid, 16),
            (self._bent_json, 14),
            (self._raw_value, 8),
            (self._malformed, 5),
            (self._edge, 7),
            (self._tokens, 12),
        ):
            self._ways += [way] * weight

    def next(self) -> HttpCase:
        case = self._rng.choice(self._ways)()
        if self._rng.random() < 0.2:
            case.chunks = self._cut(b"".join(case.chunks))
        return case

    # -- valid ------------------------------------------------------------------------------

    def _path(self) -> str:
        return self._rng.choice((TEXT, CHAT))

    def _minimal(self, path: str) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"model": "toy"}
        if path == CHAT:
            roles = ("system", "user", "assistant")
            body["messages"] = [
                {"role": rng.choice(roles), "content": self._text()}
                for _ in range(rng.choice((1, 1, 2, 3)))
            ]
        else:
            one = (self._text(), [65, 66, 255], [0], self._text())
            several = ([self._text() for _ in range(rng.choice((2, 3)))], [[65, 66], [0]])
            body["prompt"] = rng.choice((*one, *one, *several))
        if rng.random() < 0.95:
            body["max_tokens"] = rng.choice((1, 1, 2, 5))
        return body

    def _text(self) -> str:
        return self._rng.choice(("hi", "a b c", "é🙂", "\u0000", "<|im_end|>", "{{ 7 * 7 }}", "x"))

    def _options(self, path: str) -> dict[str, Any]:
        """Valid or nearly valid values of every optional field."""
        rng = self._rng
        shared: dict[str, Any] = {
            "stream": True,
            "temperature": rng.choice((0, 0.5, 1, 2)),
            "top_p": rng.choice((0.1, 1)),
            "top_k": rng.choice((-1, 0, 1, 50)),
            "min_p": rng.choice((0, 0.3)),
            "presence_penalty": rng.choice((-2, 0.5)),
            "frequency_penalty": rng.choice((2, -0.5)),
            "repetition_penalty": rng.choice((0.5, 1.5)),
            "logit_bias": {str(rng.randrange(257)): rng.choice((-100, 5.5, 100))},
            "seed": rng.choice((0, -1, 2**63 - 1)),
            "n": rng.choice((1, 2, 3)),
            "min_tokens": rng.choice((0, 2)),
            "stop": rng.choice(("a", ["a", "bc"], ["\u00e9"], None)),
            "stop_token_ids": [rng.randrange(257)],
            "include_stop_str_in_output": rng.random() < 0.5,
            "ignore_eos": rng.random() < 0.5,
            "prompt_logprobs": rng.choice((0, 2)),
            "speculation": {
                "mode": rng.choice(("greedy", "coupled", "rejection", "block")),
                "max_tokens": rng.choice((0, 1, 5)),
                "include_rounds": True,
            },
        }
        if path == CHAT:
            return shared | {"logprobs": True, "top_logprobs": rng.choice((0, 3))}
        return shared | {"echo": True, "logprobs": rng.choice((0, 2)), "best_of": 1}

    def _valid_body(self, path: str) -> dict[str, Any]:
        body, options = self._minimal(path), self._options(path)
        for name in self._rng.sample(list(options), self._rng.choice((0, 1, 2, 3, 6))):
            body[name] = options[name]
        if self._rng.random() < 0.3:
            body["stream"] = True
        if body.get("stream"):
            body.pop("prompt_logprobs", None)
            if self._rng.random() < 0.5:
                body["stream_options"] = {"include_usage": self._rng.random() < 0.7}
        return body

    def _valid(self) -> HttpCase:
        path = self._path()
        return self._case(path, self._valid_body(path))

    # -- text and tokens --------------------------------------------------------------------

    def _tokens(self) -> HttpCase:
        """Text to tokens, or tokens to text: as it should be, with any values, or no JSON."""
        rng, path = self._rng, self._rng.choice((TOKENIZE, DETOKENIZE))
        body: dict[str, Any] = {"model": "toy"} if rng.random() < 0.8 else {}
        if path == DETOKENIZE:
            body["tokens"] = [rng.randrange(257) for _ in range(rng.choice((0, 1, 5, 200)))]
        elif rng.random() < 0.5:
            body |= {"prompt": self._text(), "add_special_tokens": rng.random() < 0.5}
        else:
            body |= {"messages": self._minimal(CHAT)["messages"]}
            body |= {"add_generation_prompt": rng.random() < 0.5}
        if path == TOKENIZE and rng.random() < 0.5:
            body["return_token_strs"] = True
        model = TokenizeBody if path == TOKENIZE else DetokenizeBody
        names = [*model.model_fields, "prompt", "tokens", "x" * 99]
        for _ in range(rng.choice((0, 0, 1, 1, 3))):
            body[rng.choice(names)] = self._value()
        case = self._case(path, body)
        if rng.random() < 0.2:
            raw = case.chunks[0]
            at = rng.randrange(len(raw))
            case.chunks = [raw[:at] + rng.choice(RAW) + raw[at + rng.randrange(3) :]]
        return case

    # -- wrong values -----------------------------------------------------------------------

    def _value(self, depth: int = 0) -> Any:
        """Of any JSON type."""
        rng = self._rng
        kind = rng.randrange(10)
        if kind < 7 or depth > 2:
            return rng.choice(SCALARS)
        if kind < 9:
            return [self._value(depth + 1) for _ in range(rng.choice((0, 1, 2, 5, 70)))]
        names = ("a", "type", "text", "role", "content", "", "5", "mode", "x" * 90, "\u202e")
        return {rng.choice(names): self._value(depth + 1) for _ in range(rng.choice((0, 1, 3)))}

    def _names(self, path: str) -> list[str]:
        neutral = CHAT_NEUTRAL if path == CHAT else COMPLETION_NEUTRAL
        return [*MODELS[path].model_fields, *neutral, "prompt", "messages", "temprature", "x" * 999]

    def _swept(self) -> HttpCase:
        """One field of a valid body gets any value."""
        path = self._path()
        body = self._minimal(path)
        body[self._rng.choice(self._names(path))] = self._value()
        return self._case(path, body)

    def _combined(self) -> HttpCase:
        """Several at once, inside nested objects too, on a body that has much."""
        rng, path = self._rng, self._path()
        body = self._valid_body(path)
        for _ in range(rng.choice((1, 2, 3, 5))):
            match rng.randrange(6):
                case 0:
                    names = [*SpeculationOptions.model_fields, "k"]
                    body["speculation"] = {rng.choice(names): self._value()}
                case 1:
                    names = [*StreamOptions.model_fields, "k"]
                    body["stream_options"] = {rng.choice(names): self._value()}
                case 2 if path == CHAT:
                    names = ["role", "content", "name", *MESSAGE_NEUTRAL]
                    message = {"role": "user", "content": "hi", rng.choice(names): self._value()}
                    body["messages"] = [message] * rng.choice((1, 1, 2, 300))
                case 3:
                    body.pop(rng.choice([*body, "model"]), None)
                case _:
                    body[rng.choice(self._names(path))] = self._value()
        return self._case(path, body)

    # -- wrong JSON -------------------------------------------------------------------------

    def _bent_json(self) -> HttpCase:
        rng, path = self._rng, self._path()
        raw = bytearray(
            json.dumps(self._valid_body(path), ensure_ascii=rng.random() < 0.5).encode()
        )
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(raw) + 1)
            match rng.randrange(6):
                case 0:
                    raw[at : at + 1] = rng.choice((b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\"))
                case 1:
                    raw[at : at + 1] = rng.randbytes(1)
                case 2:
                    del raw[at : at + rng.randrange(1, 12)]
                case 3:
                    raw[at:at] = raw[at : at + rng.randrange(1, 40)]
                case 4:
                    raw = raw[:at]
                case _:
                    raw[at:at] = rng.choice(RAW)
        return HttpCase(path=path, chunks=[bytes(raw)], headers=self._json_headers())

    def _raw_value(self) -> HttpCase:
        """A field, known, unknown or twice, with what is no JSON value, or hardly one."""
        rng, path = self._rng, self._path()
        body = json.dumps(self._minimal(path)).encode()
        name = json.dumps(rng.choice(self._names(path))).encode()
        raw = body[:-1] + b"," + name + b":" + rng.choice(RAW) + b"}"
        return HttpCase(path=path, chunks=[raw], headers=self._json_headers())

    def _malformed(self) -> HttpCase:
        rng, path = self._rng, self._path()
        raw = rng.choice((
            b"", b" ", b"null", b"[]", b'"hi"', b"5", b"{}", b"{} {}", b"\xef\xbb\xbf{}", b"\x00",
            b"a=b&c=d", b"[" * 8000, b'{"a":' * 3000, b"\xff" * 50, b"{" * 5000, b'"' + b"\\" * 999,
            "{}".encode("utf-16"), "{}".encode("utf-32"), b"\x1f\x8b\x08\x00" + rng.randbytes(60),
            b'{"model":"toy",' + b'"prompt":"a",' * 50 + b'"prompt":"b"}', rng.randbytes(200),
            b'{"model":"toy","prompt":"' + b"x" * rng.choice((40, 900, 17_000)) + b'"}',
            b"{" + b",".join(b'"k%d":1' % i for i in range(1200)) + b"}",
        ))  # fmt: skip
        return HttpCase(path=path, chunks=[raw], headers=self._json_headers())

    # -- the edge ---------------------------------------------------------------------------

    def _edge(self) -> HttpCase:
        rng = self._rng
        case = self._valid()
        match rng.randrange(5):
            case 0:
                case.method = rng.choice(METHODS)
            case 1:
                case.path = rng.choice(PATHS)
                case.method = rng.choice(("GET", "POST", *METHODS))
            case 2:
                case.headers = [(b"content-type", rng.choice(CONTENT_TYPES)), self._key()]
            case 3:
                case.headers = self._json_headers()[: rng.randrange(2)]
            case _:
                case.headers += rng.sample(HEADERS, rng.choice((1, 2, 4)))
        return case

    # -- pieces -----------------------------------------------------------------------------

    def _key(self) -> tuple[bytes, bytes]:
        return (b"authorization", b"Bearer " + KEY.encode())

    def _json_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", b"application/json"), self._key()]

    def _case(self, path: str, body: dict[str, Any]) -> HttpCase:
        raw = json.dumps(body, ensure_ascii=self._rng.random() < 0.5)
        return HttpCase(
            path=path,
            chunks=[raw.encode("utf-8", "surrogatepass")],
            headers=self._json_headers(),
        )

    def _cut(self, raw: bytes) -> list[bytes]:
        """As a network may deliver it: in pieces, empty ones too."""
        if not raw:
            return [b"", b""]
        cuts = sorted(self._rng.randrange(len(raw) + 1) for _ in range(self._rng.choice((1, 2, 5))))
        bounds = [0, *cuts, len(raw)]
        return [raw[a:b] for a, b in pairwise(bounds)]
