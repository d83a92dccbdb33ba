"""Writes down where proposals were rejected, for `paceline distill` and the like to learn from.

One JSON object a line: the hash of the context (u64, in hexadecimal: that of `TokenLog`, so that
whoever has the text can find the place in it), which token the target took instead, and the 16
most likely tokens of that place with their raw log-probabilities. Token ids only; the context
itself only where the configuration allows it. It sits between the driver and the client: it asks
for log-probabilities and takes them out again where the client did not want them, so passes,
sessions and drafts know nothing of it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any
from zlib import crc32

from paceline.config.rejection_log import RejectionLogConfig
from paceline.generation import GenerateRequest, RoundDelta, TokenLogprobs, TokenOrigin
from paceline.protocol.token_log import TokenLog
from paceline.target.intake import living_outputs
from paceline.tracing.json_lines import remove_oldest

logger = logging.getLogger(__name__)

NUM_TOP = 16
CLOSE_TIMEOUT_S = 3.0
MAX_HOST_CHARS = 64

Generate = Callable[[GenerateRequest], AsyncGenerator[RoundDelta | None, None]]


def host_part(name: str) -> str:
    """Process ids are the same in many containers, and their files are copied together."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[-MAX_HOST_CHARS:] or "host"


class LineFile:
    """A bounded queue, a thread and a file `<folder>/rejections-<host>-<pid>.jsonl`; at `max_bytes`
    that becomes `rejections-<host>-<pid>.1.jsonl`, in place of an older one. Raises OSError where
    it cannot. Files of processes that are gone make room as traces do.

    A full queue or a full disk costs lines (`num_dropped`), never anything else.
    """

    def __init__(self, folder: Path, max_bytes: int, max_queue_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        host = host_part(socket.gethostname())
        remove_oldest(folder, "rejections", host)
        stem = f"rejections-{host}-{os.getpid()}"
        self.path, self._old_path = folder / f"{stem}.jsonl", folder / f"{stem}.1.jsonl"
        self._file = self._open()
        self._max_bytes = max_bytes
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(max_queue_size)
        self._is_closed = False
        self.num_written = 0
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="paceline-rejections", daemon=True)
        self._thread.start()

    def put(self, line: dict[str, Any]) -> None:
        """Never waits."""
        try:
            if self._is_closed:
                raise queue.Full
            self._queue.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """What waits is written, for so long at most. Blocks meanwhile."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                self.num_written += 1
            except OSError as error:
                if not self.num_dropped:
                    logger.warning("a rejection cannot be written to %s: %s", self.path, error)
                self.num_dropped += 1
        self._file.close()

    def _write(self, line: bytes) -> None:
        length = self._file.tell()
        if length and length + len(line) > self._max_bytes:
            if self.path.exists():  # not where the new file could not be opened
                self.path.replace(self._old_path)  # first: if this fails, the old file goes on
            old, self._file = self._file, self._open()
            old.close()
            length = 0
        if self._file.write(line) != len(line):
            self._file.truncate(length)  # half a line would spoil the next
            self._file.seek(length)
            raise OSError(f"no room for {len(line)} bytes")

    def _open(self) -> FileIO:
        """Others on this machine have no business in it: ids can be turned into text. Without a
        buffer, so that what does not fit on the disk is not tried again. It may be of a process
        before us, with the same id, whose machine went down within a line."""
        number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with suppress(OSError):  # a full disk: only the next line is lost
            length = os.fstat(number).st_size
            if length and os.pread(number, 1, length - 1) != b"\n":
                os.write(number, b"\n")
        return FileIO(number, "ab")


def open_rejection_log(config: RejectionLogConfig, model_id: str) -> RejectionLog | None:
    """None while it is off. A folder that cannot be written costs the log, never the replica."""
    if not config.file_dir or not config.sample_ratio:
        return None
    folder = Path(config.file_dir).expanduser()
    try:
        file = LineFile(folder, config.max_file_bytes, config.max_queue_size)
    except OSError as error:
        logger.warning("no rejection log in %s: %s", folder, error)
        return None
    return RejectionLog(file, config, model_id)


class RejectionLog:
    """Of one target process."""

    def __init__(self, file: LineFile, config: RejectionLogConfig, model_id: str) -> None:
        self.file = file
        self._config = config
        self._model_id = model_id

    def is_chosen(self, request: GenerateRequest) -> bool:
        """By its id, so that every try of a request is treated alike. Nobody's traffic in the
        background (audits) is: it would count twice."""
        share = crc32(request.request_id.encode()) / 2**32
        return share < self._config.sample_ratio and not request.is_background

    async def watch(
        self, request: GenerateRequest, generate: Generate
    ) -> AsyncGenerator[RoundDelta | None, None]:
        """The deltas of `generate(request)`, as if nobody watched."""
        if not self.is_chosen(request):
            async with aclosing(generate(request)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        wanted = request.num_logprobs
        asking = replace(request, num_logprobs=max(NUM_TOP, wanted or 0))
        texts: dict[int, TokenLog] = {}
        async with aclosing(generate(asking)) as deltas:
            async for delta in deltas:
                if delta is not None:
                    self._look(request, texts, delta)
                    delta = replace(delta, logprobs=as_wanted(delta.logprobs, wanted))
                yield delta

    def _look(
        self, request: GenerateRequest, texts: dict[int, TokenLog], delta: RoundDelta
    ) -> None:
        if not texts:
            prompt = TokenLog(request.prompt_token_ids)
            for choice, output in living_outputs(request).items():
                texts[choice] = prompt.copy()
                texts[choice].extend(output)
        text = texts[delta.choice]
        text.extend(delta.token_ids)
        is_rejection = delta.origins[-1:] == (TokenOrigin.RECOVERED,)
        if is_rejection and len(delta.logprobs) == len(delta.token_ids):
            self.file.put(self._line(request, text, delta))

    def _line(self, request: GenerateRequest, text: TokenLog, delta: RoundDelta) -> dict[str, Any]:
        place = len(text) - 1
        entry = delta.logprobs[-1]
        line: dict[str, Any] = {
            "model": self._model_id,
            "adapter": request.adapter,
            "source": delta.source,
            "temperature": request.sampling.temperature,
            "context_hash": f"{text.hash_at(place):016x}",
            "context_len": place,
            "prompt_len": len(request.prompt_token_ids),
            "num_accepted": delta.num_accepted_tokens,
            "token_id": entry.token_id,
            "logprob": round(entry.logprob, 4),
            "top": [[token_id, round(logprob, 4)] for token_id, logprob in entry.top[:NUM_TOP]],
        }
        if self._config.context_tokens:
            first = max(0, place - self._config.context_tokens)
            line["context"] = list(text.slice(first, place))
        return line


def rejection_counts(log: RejectionLog | None) -> dict[str, int]:
    """For a replica's statistics."""
    return {
        "num_logged_rejections": 0 if log is None else log.file.num_written,
        "num_dropped_rejections": 0 if log is None else log.file.num_dropped,
    }


def as_wanted(logprobs: tuple[TokenLogprobs, ...], wanted: int | None) -> tuple[TokenLogprobs, ...]:
    """What the client would have got without us."""
    if wanted is None:
        return ()
    return tuple(replace(each, top=each.top[:wanted]) for each in logprobs)
