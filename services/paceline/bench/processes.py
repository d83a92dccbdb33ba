"""Helpers of the benchmark in processes of their own: one JSON line asks, one answers.

A helper ends when its standard input does, so none outlives the benchmark, however that ends. It
knows nothing of what is asked: `serve` calls a handler by the name in the line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)

# A start with imports on a busy machine; no other answer takes nearly as long.
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20

Answer = dict[str, Any]
Handler = Callable[..., Awaitable[Answer]]


class HelperError(RuntimeError):
    """A helper died, did not answer, or failed at what it was asked."""


class Helper:
    """The benchmark's end."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self._module = module
        self._process = process

    async def ask(self, what: str, **arguments: object) -> Answer:
        """Raises HelperError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"ask": what, **arguments}).encode() + b"\n")
            await stdin.drain()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                line = await stdout.readline()
        except (ConnectionError, TimeoutError) as error:
            raise HelperError(f"{self._module} did not answer {what!r}: {error!r}") from error
        if not line:
            raise HelperError(f"{self._module} ended at {what!r}; see its messages above")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise HelperError(f"{self._module} failed at {what!r}: {answer['error']}")
        return answer

    async def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def helper(module: str) -> AsyncIterator[Helper]:
    """`python -m module`, which calls `serve`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )
    child = Helper(module, process)
    try:
        yield child
    finally:
        await child.stop()


async def serve(handlers: Mapping[str, Handler]) -> None:
    """The helper's end: answer lines until there are no more."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        question = json.loads(line)
        try:
            answer = await handlers[question.pop("ask")](**question)
        except Exception as error:
            # The edge of this process: the asker must hear of it, and raises.
            logger.exception("failed at a question of the benchmark")
            answer = {"error": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
