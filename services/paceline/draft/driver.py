"""Moves bytes and time between targets' streams, the draft table and the engine thread.

No decisions about tokens here: `DraftTable` and its sessions make them. One decode step serves
all sequences of all targets.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable

from paceline.config import DraftConfig, RpcConfig
from paceline.draft.steps import step_item, work_result
from paceline.draft.traces import DraftTracer
from paceline.engine.base import EngineBroken, OutOfBlocks
from paceline.engine.worker import EngineWorker
from paceline.pass_loop import PassLoop
from paceline.protocol.draft_table import SUPPORTED_MODES, DraftTable, PassItem
from paceline.protocol.messages import (
    PROTOCOL_VERSION,
    DraftMessage,
    Drain,
    Hello,
    Verdict,
    Welcome,
)
from paceline.rpc.backoff import Backoff
from paceline.rpc.client import dial
from paceline.rpc.errors import HandshakeRefused, StreamLost
from paceline.rpc.stream import DraftStream
from paceline.rpc.tls import check_draft_tls
from paceline.tracing.guard import SpanGuard
from paceline.tracing.spans import Tracer

logger = logging.getLogger(__name__)


class DraftDriver:
    """One draft replica without Ray. `set_targets` says whom to dial; it re-dials with backoff."""

    def __init__(
        self,
        worker: EngineWorker,
        config: DraftConfig,
        rpc: RpcConfig,
        replica_id: str,
        boot_id: str,
        tracer: Tracer | None = None,
    ) -> None:
        self.worker = worker
        self._config = config
        self._rpc = rpc
        info = worker.info
        self.table = DraftTable(
            max_sessions=config.max_sessions,
            max_len=info.max_model_len,
            session_idle_us=int(config.session_idle_s * 1e6),
            num_blocks=info.num_blocks,
            block_size=info.block_size,
        )
        self.hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            boot_id=boot_id,
            replica_id=replica_id,
            model_id=info.model_id,
            vocab_size=info.vocab_size,
            tokenizer_hash=info.tokenizer_hash,
            max_model_len=info.max_model_len,
            max_sessions=config.max_sessions,
            modes=SUPPORTED_MODES,
        )
        self._tracer = None if tracer is None else DraftTracer(tracer, replica_id)
        self._guard = SpanGuard()
        self._streams: dict[int, DraftStream] = {}
        self._links: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()  # cancelled links that still say Bye
        self._connected: set[str] = set()
        self._next_link_id = 1
        self._is_over = False
        self._has_left = asyncio.Event()  # while it drains: no target counts on it any more
        # When the last pass ended, None when there was nothing to do since.
        self._busy_until_us: int | None = None
        self._loop = PassLoop("draft", self._turn, self._leave)

    async def start(self) -> None:
        """Raises ConfigError when `rpc.tls_dir` has no certificate for a draft."""
        check_draft_tls(self._rpc)
        self._loop.start()

    async def drain(self) -> None:
        """Before `stop`: ask the targets to move, and serve on until none counts on this draft,
        at most for `draft.drain_timeout_s`."""
        self.table.is_draining = True
        self.set_targets(self._connected)
        for stream in self._streams.values():
            stream.send(Drain())
        self._check_left()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._has_left.wait()
        except TimeoutError:
            logger.info("%d sequences stayed to the end of the drain", len(self.table))

    def _check_left(self) -> None:
        if self.table.is_draining and len(self.table) == 0:
            self._has_left.set()

    async def stop(self) -> None:
        for stream in self._streams.values():
            stream.close("the draft is shutting down")
        self.set_targets(())
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._loop.stop()
        self.worker.close()

    async def __aenter__(self) -> DraftDriver:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def check_health(self) -> None:
        """Raises when the pass loop has ended."""
        self._loop.check_health()

    @property
    def connected(self) -> tuple[str, ...]:
        """Addresses of the targets with a live stream."""
        return tuple(sorted(self._connected))

    # -- links ------------------------------------------------------------------------------

    def set_targets(self, addresses: Iterable[str]) -> None:
        """Have one stream to each of `addresses` and to no other; none once passes have ended."""
        wanted = set() if self._is_over else set(addresses)
        for address in self._links.keys() - wanted:
            task = self._links.pop(address)
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        for address in wanted - self._links.keys():
            task = asyncio.create_task(self._keep_link(address), name=f"paceline-link-{address}")
            self._links[address] = task

    async def _keep_link(self, address: str) -> None:
        backoff = Backoff(self._rpc.redial_min_s, self._rpc.redial_max_s, random.random)
        while not self.table.is_draining:
            try:
                link = dial(address, self._rpc, self.hello, self.worker.now_us)
                async with link as (welcome, stream):
                    backoff.reset()
                    logger.info("drafting for target %s at %s", welcome.replica_id, address)
                    await self._serve_target(address, welcome, stream)
            except HandshakeRefused as refused:
                logger.error("target %s refused this draft: %s", address, refused)
            except StreamLost as lost:
                logger.info("no stream to target %s: %s", address, lost)
            except Exception:
                # Our bug, on one link: the others, and the next try, must not suffer.
                logger.exception("the link to target %s failed", address)
            await asyncio.sleep(backoff.next_s())

    async def _serve_target(self, address: str, welcome: Welcome, stream: DraftStream) -> None:
        link_id, self._next_link_id = self._next_link_id, self._next_link_id + 1
        self._streams[link_id] = stream
        self._connected.add(address)
        if self._tracer is not None:
            self._tracer.attach(link_id, stream.clock, welcome)
        try:
            while True:
                for message in await stream.receive():
                    now_us = self.worker.now_us()
                    for answer in self.table.receive(link_id, message, now_us):
                        stream.send(answer)
                    if self._tracer is not None and isinstance(message, Verdict):
                        with self._guard:
                            self._tracer.receive(link_id, message, now_us)
                self._check_left()
                self._loop.wake()
        finally:
            self._connected.discard(address)
            del self._streams[link_id]
            self.table.lose_link(link_id)
            if self._tracer is not None:
                self._tracer.detach(link_id)
            self._check_left()
            self._loop.wake()

    def _leave(self) -> None:
        """No more passes: hang up, so that targets look for another draft at once."""
        self._is_over = True
        for stream in self._streams.values():
            stream.close("the draft has stopped")
        self.set_targets(())

    def _send(self, link_id: int, message: DraftMessage) -> None:
        stream = self._streams.get(link_id)
        if stream is not None:
            stream.send(message)

    # -- passes -----------------------------------------------------------------------------

    async def _turn(self) -> None:
        for link_id, close in self.table.expire(self.worker.now_us()):
            self._send(link_id, close)
        self._check_left()
        items = self.table.begin_pass(self._config.max_rows_per_pass)
        if items or self.table.has_released:
            await self._pass(items)
        else:
            self._busy_until_us = None
            await self._loop.wait(self._config.session_idle_s / 4)

    async def _pass(self, items: list[PassItem]) -> None:
        try:
            steps = [step_item(item) for item in items]
            done = await self.worker.run(self.table.take_released(), steps)
            outcomes = [work_result(result) for result in done.results]
            last_us, self._busy_until_us = self._busy_until_us, done.ended_us
            cycle_us = None if last_us is None else done.ended_us - last_us
            draft_us = done.ended_us - done.started_us
            self.table.end_pass(items, outcomes, draft_us, cycle_us, done.started_us)
        except OutOfBlocks:
            self.table.cancel_pass(items)
            evicted = self.table.evict_newest()
            if evicted is not None:
                self._send(*evicted)
            return
        except EngineBroken:
            raise  # ends the pass loop: this replica must be replaced
        except Exception:
            # One bad batch must not end the replica.
            logger.exception("a draft pass over %d sequences failed", len(items))
            for link_id, close in self.table.fail_pass(items):
                self._send(link_id, close)
            await self.worker.probe()  # ends the pass loop, too, if nothing works any more
            return
        for link_id, drafts in self.table.take_drafts(self.worker.now_us()).items():
            for draft in drafts:
                self._send(link_id, draft)
        if self._tracer is not None:  # the proposals are on their way
            with self._guard:
                self._tracer.end_pass(items, done.started_us, done.ended_us)
