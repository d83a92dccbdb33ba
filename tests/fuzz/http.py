"""`python -m tests.fuzz.http --num 100000 --seed 0`: hostile requests against the real gateway.

The real ASGI app, service, tokenizer, scheduler, toy target and toy draft in one process; only the
sockets are missing. Every answer must be one of `STATUSES`, never a 500; an error has OpenAI's
shape and echoes next to nothing; a 200 is well formed; afterwards nothing is left.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import random
import resource
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from paceline.config import ApiKeyConfig, GatewayConfig, ModelConfig, SpeculationConfig
from paceline.engine.loader import load_engine
from paceline.errors import RequestError
from paceline.gateway.api import build_api
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta
from paceline.testing.loopback import Loopback
from tests.fuzz.bodies import CHAT, DETOKENIZE, KEY, TEXT, TOKENIZE, BodyFuzzer, HttpCase

STATUSES = frozenset({200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 503})
MAX_MODEL_LEN = 40
MAX_BODY_BYTES = 16 << 10
MAX_ERROR_CHARS = 400
ERROR_FIELDS = {"message", "type", "param", "code"}
# Words that would show how we are built.
FORBIDDEN = ("Traceback", 'File "', "pydantic", "ValidationError", "type=", "input_value", "http")
BATCH = 500
TIMEOUT_S = 60.0
NOW_S = 1_700_000_000


class LoopbackStream:
    """One request on the toy target; steps it as far as its own rounds need."""

    def __init__(self, loopback: Loopback, request: GenerateRequest) -> None:
        self._loopback = loopback
        self._request = request
        self.session_ids = range(0)
        self.is_over = False

    async def __aiter__(self) -> AsyncIterator[RoundDelta]:
        try:
            self.session_ids, run = self._loopback.add(self._request)
        except RequestError:
            self.is_over = True
            raise
        num_read, open_choices = 0, set(range(self._request.n))
        while open_choices:
            while num_read == len(run.deltas):
                assert self._loopback.step(), "a request that never ends"
            delta = run.deltas[num_read]
            num_read += 1
            if delta.finish_reason is not None:
                open_choices.discard(delta.choice)
            await asyncio.sleep(0)
            yield delta
        self.is_over = True

    def cancel(self) -> None:
        pass


class LoopbackTargets:
    """A TargetClient over one toy target, with or without a toy draft, in this thread."""

    def __init__(self, has_draft: bool, max_model_len: int = MAX_MODEL_LEN) -> None:
        model = ModelConfig(max_model_len=max_model_len, num_kv_blocks=256)
        draft = model.model_copy(update={"toy_error_rate": 0.2})
        self.engine = load_engine(model)
        draft_engine = load_engine(draft) if has_draft else None
        self.loopback = Loopback(self.engine, draft_engine, SpeculationConfig())
        self._streams: dict[str, LoopbackStream] = {}

    def generate(self, request: GenerateRequest) -> LoopbackStream:
        stream = LoopbackStream(self.loopback, request)
        open_ones = {name: old for name, old in self._streams.items() if not old.is_over}
        self._streams = open_ones | {request.request_id: stream}
        return stream

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        stream = self._streams.get(request_id)
        for index, session_id in enumerate(stream.session_ids if stream else ()):
            if choice in (None, index):
                self.loopback.scheduler.abort(session_id)
        if stream is not None and choice is None:
            stream.is_over = True

    async def ready(self) -> bool:
        return True

    def check_clean(self) -> None:
        while self.loopback.step():
            pass
        assert self.engine.stats().num_sequences == 0, "the target holds sequences"
        assert len(self.loopback.table) == 0, "the draft holds sequences"


@dataclass
class Answer:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Tally:
    num_bodies: int = 0
    num_streams: int = 0
    num_tokenizations: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    digest: int = 0


class Gateway:
    """The app, driven by ASGI messages. `log` must stay free of errors."""

    def __init__(self, has_keys: bool, has_draft: bool) -> None:
        keys = (
            ApiKeyConfig(
                name="fuzz",
                sha256=hashlib.sha256(KEY.encode()).hexdigest(),
                max_requests_per_minute=1 << 30,
            ),
        )
        self.targets = LoopbackTargets(has_draft)
        numbers = iter(range(1 << 60))
        self.service = GatewayService(
            GatewayConfig(max_body_bytes=MAX_BODY_BYTES, api_keys=keys if has_keys else ()),
            [ServedModel("toy", ToyTokenizer(), self.targets, MAX_MODEL_LEN)],
            clock=lambda: NOW_S,
            random_hex=lambda: f"{next(numbers):x}",
            random_seed=lambda: 7,
        )
        self.app = build_api(self.service)

    async def ask(self, case: HttpCase) -> Answer:
        answer, left = Answer(), list(case.chunks) or [b""]
        never = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not left:
                await never.wait()
            chunk = left.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(left)}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert not answer.status, "two answers"
                answer.status = message["status"]
                answer.headers = dict(message["headers"])
            else:
                answer.body += message.get("body", b"")

        async with asyncio.timeout(TIMEOUT_S):
            await self.app(_scope(case), receive, send)
        return answer

    async def check_clean(self) -> None:
        await self.service.drain()
        assert self.service.num_in_progress == 0, "requests are still in progress"
        self.targets.check_clean()
        leftover = asyncio.all_tasks() - {asyncio.current_task()}
        assert not leftover, f"tasks are left: {leftover}"


def _gateway(batch: int) -> Gateway:
    return Gateway(has_keys=batch % 4 == 3, has_draft=batch % 4 == 0)


def _scope(case: HttpCase) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": case.method,
        "scheme": "http",
        "path": case.path,
        "raw_path": case.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": case.headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


class LogCheck(logging.Handler):
    """No request may make an ERROR line, and so no traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_answer(case: HttpCase, answer: Answer, tally: Tally) -> None:
    assert answer.status in STATUSES, f"status {answer.status}: {answer.body[:300]!r}"
    tally.statuses[answer.status] += 1
    if case.method == "HEAD" and answer.status == 200:
        return
    if answer.status != 200:
        error = check_error(answer)
        tally.codes[str(error["code"])] += 1
        return
    if answer.headers[b"content-type"].startswith(b"text/event-stream"):
        check_stream(answer.body)
        tally.num_streams += 1
    elif case.path in (TEXT, CHAT):
        check_whole(json.loads(answer.body), case.path)
    elif case.path in (TOKENIZE, DETOKENIZE):
        check_tokens(json.loads(answer.body), case.path)
        tally.num_tokenizations += 1
    elif answer.headers[b"content-type"] == b"application/json":
        assert isinstance(json.loads(answer.body), dict)
    else:
        assert case.path in ("/", "/docs", "/metrics")
        assert answer.body


def check_error(answer: Answer) -> dict[str, Any]:
    """OpenAI's shape exactly, one short sentence, nothing of ours."""
    assert answer.headers[b"content-type"] == b"application/json"
    body = json.loads(answer.body)
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == ERROR_FIELDS, error
    message, param = error["message"], error["param"]
    assert isinstance(message, str)
    assert 0 < len(message) <= MAX_ERROR_CHARS, len(message)
    assert message.isprintable(), message
    assert param is None or (isinstance(param, str) and len(param) <= 64), param
    assert error["type"]
    assert isinstance(error["code"], str), error
    for word in FORBIDDEN:
        assert word not in message, message
    longest = max(map(len, message.split()))
    assert longest <= 200, message
    if answer.status in (429, 503):
        assert b"retry-after" in answer.headers
    return error


def check_whole(body: dict[str, Any], path: str) -> None:
    assert body["object"] == ("chat.completion" if path == CHAT else "text_completion")
    assert [choice["index"] for choice in body["choices"]] == [*range(len(body["choices"]))]
    for choice in body["choices"]:
        assert choice["finish_reason"] in ("stop", "length"), choice
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert isinstance(text, str)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["total_tokens"] <= MAX_MODEL_LEN * len(body["choices"])


def check_tokens(body: dict[str, Any], path: str) -> None:
    if path == DETOKENIZE:
        assert list(body) == ["prompt"]
        assert isinstance(body["prompt"], str)
        return
    assert set(body) == {"count", "max_model_len", "tokens", "token_strs"}
    assert body["count"] == len(body["tokens"])
    assert all(type(token_id) is int for token_id in body["tokens"])
    assert body["token_strs"] is None or len(body["token_strs"]) == body["count"]


def check_stream(raw: bytes) -> None:
    """Events, each choice ended once, [DONE] last; no error inside."""
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-200:]
    ends: Counter[int] = Counter()
    for event in raw.decode().removesuffix("\n\n").split("\n\n")[:-1]:
        chunk = json.loads(event.removeprefix("data: "))
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            ends[choice["index"]] += choice["finish_reason"] is not None
    assert ends
    assert set(ends.values()) == {1}, ends


async def _fuzz(seed: int, num_bodies: int, only: int | None) -> Tally:
    tally, log = Tally(), LogCheck()
    logging.getLogger().addHandler(log)
    num_batches = -(-num_bodies // BATCH)
    for batch in range(num_batches) if only is None else (only,):
        rng = random.Random(f"{seed}:{batch}")
        gateway, fuzzer = _gateway(batch), BodyFuzzer(rng)
        size = BATCH if only is not None else min(BATCH, num_bodies - batch * BATCH)
        case = HttpCase()
        try:
            for _ in range(size):
                case = fuzzer.next()
                answer = await gateway.ask(case)
                check_answer(case, answer, tally)
                assert not log.lines, f"logged errors: {log.lines[:3]}"
                tally.digest = zlib.crc32(b"%d" % answer.status + answer.body, tally.digest)
            await gateway.check_clean()
        except BaseException:
            print(f"replay: python -m tests.fuzz.http --seed {seed} --batch {batch}")
            raw = b"".join(case.chunks)
            print(f"the request: {case.method} {case.path} {case.headers} {raw[:600]!r}")
            raise
        tally.num_bodies += size
    logging.getLogger().removeHandler(log)
    return tally


def fuzz(seed: int, num_bodies: int, only: int | None = None) -> Tally:
    """Raises what is wrong, after the line that brings it back."""
    return asyncio.run(_fuzz(seed, num_bodies, only))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=100_000, help="HTTP requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, help="run this batch only")
    options = parser.parse_args()
    began = time.perf_counter()
    tally = fuzz(options.seed, options.num, options.batch)
    seconds = time.perf_counter() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"seed {options.seed}: {tally.num_bodies} HTTP requests in {seconds:.0f} s,")
    print(f"  {tally.num_bodies / seconds:.0f} requests/s, digest {tally.digest:08x}")
    print(f"  peak {peak_mib:.0f} MiB, {tally.num_streams} of the 200s were streams")
    print("  statuses:", ", ".join(f"{s}: {n}" for s, n in sorted(tally.statuses.items())))
    print("  codes:", ", ".join(f"{code} {n}" for code, n in tally.codes.most_common()))


if __name__ == "__main__":
    main()
