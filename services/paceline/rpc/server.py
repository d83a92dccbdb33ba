"""The target's end: a grpc.aio server on the current loop that hands out established streams.

Knows no session: `on_stream` is told of every draft that shook hands, and owns its stream until
it returns. A draft that breaks a rule costs itself its stream and nobody else anything.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from paceline.config import RpcConfig
from paceline.errors import ConfigError
from paceline.protocol.messages import Hello, Welcome
from paceline.rpc.codec import target_codec
from paceline.rpc.endpoint import CALL_ERRORS, METHOD, SERVICE, server_options
from paceline.rpc.errors import StreamLost
from paceline.rpc.handshake import misfit
from paceline.rpc.limits import WireLimits
from paceline.rpc.stream import CLOSE_GRACE_S, TargetStream, TransportError
from paceline.rpc.tls import ServerTls, peer_misfit, server_tls

logger = logging.getLogger(__name__)

OnStream = Callable[[Hello, TargetStream], Awaitable[None]]
Context = grpc.aio.ServicerContext[bytes, bytes]
Status = tuple[grpc.StatusCode, str]

OK: Status = (grpc.StatusCode.OK, "")
# Calls that may wait for their Hello; one more ends the oldest, so that a draft that speaks at
# once gets in past any number of callers that never do.
MAX_HANDSHAKES = 64
# Calls beyond that which may be ending at the same time; more are refused by gRPC itself.
MAX_ENDING = 64


class _Refused(Exception):
    """This Hello will not do; the text goes to the peer."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class _ContextTransport:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        try:
            data: object = await self._context.read()  # bytes, or EOF, which the stubs leave out
        except CALL_ERRORS as error:
            raise TransportError(f"reading from the draft failed: {error}") from error
        return data if isinstance(data, bytes) else None

    async def write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except CALL_ERRORS as error:
            raise TransportError(f"writing to the draft failed: {error}") from error

    async def finish_writing(self) -> None:
        """A server finishes by returning from its handler."""


class SpeculationServer:
    """`await start()`, `await stop(grace_s)`. Drafts must fit `welcome`."""

    def __init__(
        self,
        config: RpcConfig,
        host: str,
        port_min: int,
        port_max: int,
        welcome: Welcome,
        on_stream: OnStream,
    ) -> None:
        self._config = config
        self._host = host
        self._ports = range(port_min, port_max + 1)
        self._welcome = welcome
        self._on_stream = on_stream
        self._codec = target_codec(WireLimits.from_config(config, welcome.vocab_size))
        self._server: grpc.aio.Server | None = None
        self._tls: ServerTls | None = None
        self._port = 0
        self._streams: dict[asyncio.Task[Status], TargetStream] = {}  # also before their Hello
        self._waiting: dict[TargetStream, None] = {}  # for their Hello, the oldest first
        self._num_established = 0  # Invariant: 0 <= _num_established <= max_streams.

    @property
    def address(self) -> str:
        """address:port as bound; for a wildcard host the caller knows the node's own address."""
        return _join(self._host, self._port)

    @property
    def port(self) -> int:
        return self._port

    @property
    def num_streams(self) -> int:
        """Drafts that shook hands and are still connected."""
        return self._num_established

    async def start(self) -> None:
        """Bind the first free port of the range. Raises ConfigError when there is none, and for
        certificates that are missing or unusable."""
        self._tls = server_tls(self._config)
        family, self._host = await _resolve(self._host)
        server = grpc.aio.server(
            options=server_options(self._config),
            maximum_concurrent_rpcs=self._config.max_streams + MAX_HANDSHAKES + MAX_ENDING,
        )
        # Bytes in, bytes out: the codec parses, so that garbage is counted like any other offence
        # instead of failing inside gRPC.
        handler: grpc.RpcMethodHandler[bytes, bytes]
        handler = grpc.stream_stream_rpc_method_handler(self._speculate)
        generic = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        server.add_generic_rpc_handlers((generic,))
        self._port = self._bind(server, family)
        await server.start()
        self._server = server
        logger.info("speculation server listens on %s", self.address)

    async def stop(self, grace_s: float) -> None:
        """Refuse new streams, say Bye on the others, and end what is left after the grace."""
        if self._server is None:
            return
        server, self._server = self._server, None
        for stream in self._streams.values():
            stream.close("the target is stopping")
        await server.stop(grace_s)
        leftover = set(self._streams)
        if leftover:
            await asyncio.wait(leftover, timeout=CLOSE_GRACE_S)
        for task in leftover:
            task.cancel()
        if leftover:
            await asyncio.wait(leftover)

    def _bind(self, server: grpc.aio.Server, family: int) -> int:
        for port in self._ports:
            # Ask the kernel first: gRPC logs an error for every busy port.
            problem = _bind_problem(family, self._host, port)
            if problem == errno.EADDRINUSE:
                continue
            if problem is not None:
                raise ConfigError(
                    f"cannot listen on {_join(self._host, port)} ({os.strerror(problem)}): change "
                    "target.host or target.port_min..port_max"
                )
            try:
                return self._add_port(server, _join(self._host, port))
            except RuntimeError:  # somebody was faster
                continue
        raise ConfigError(
            f"no free port in {self._ports.start}..{self._ports.stop - 1} on {self._host}: "
            "widen target.port_min..port_max"
        )

    def _add_port(self, server: grpc.aio.Server, address: str) -> int:
        if self._tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._tls.credentials)

    async def _speculate(self, _requests: Any, context: Context) -> None:
        if self._tls is not None:
            sentence = peer_misfit(context.auth_context())
            if sentence is not None:
                logger.warning("refused a peer at %s: %s", context.peer(), sentence)
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, sentence)
        stream = TargetStream(_ContextTransport(context), self._codec, self._config, dials=False)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._serve(stream), name="speculate")
            self._streams[task] = stream
            task.add_done_callback(lambda _: self._streams.pop(task))
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                # gRPC's way to say that the draft hung up, or that the server's grace is over.
                # The owner learns it from its stream and ends by itself.
                stream.lose("the draft hung up without a Bye")
                await asyncio.wait({task})
                raise
        code, details = task.result()
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details)

    async def _serve(self, stream: TargetStream) -> Status:
        try:
            async with stream:
                hello = await self._shake_hands(stream)
                try:
                    await self._on_stream(hello, stream)
                finally:
                    self._num_established -= 1
        except _Refused as refused:
            logger.warning("refused a draft: %s", refused)
            return refused.code, str(refused)
        except StreamLost:
            pass  # the stream remembers it
        except Exception:
            # The edge of the process: one stream's bug must not reach the peer or the others.
            logger.exception("a stream failed")
            return grpc.StatusCode.INTERNAL, "internal error"
        if type(stream.end) is StreamLost:
            return grpc.StatusCode.ABORTED, str(stream.end)
        return OK

    async def _shake_hands(self, stream: TargetStream) -> Hello:
        """The Hello; from here on the stream counts. Raises _Refused after saying Bye."""
        try:
            hello = self._check_hello(await self._first_message(stream))
        except _Refused as refused:
            stream.close(str(refused))
            raise
        self._num_established += 1
        stream.send(self._welcome)
        stream.establish()
        return hello

    async def _first_message(self, stream: TargetStream) -> object:
        self._waiting[stream] = None
        if len(self._waiting) > MAX_HANDSHAKES:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.lose(f"no Hello yet, and {MAX_HANDSHAKES} newer calls wait for theirs")
        try:
            return await stream.receive_first()
        finally:
            self._waiting.pop(stream, None)

    def _check_hello(self, hello: object) -> Hello:
        if not isinstance(hello, Hello):
            raise _Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the first message must be a Hello, got {type(hello).__name__}",
            )
        sentence = misfit(hello, self._welcome)
        if sentence is not None:
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        if self._num_established >= self._config.max_streams:
            raise _Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this target is full: it serves {self._num_established} drafts",
            )
        return hello


async def _resolve(host: str) -> tuple[int, str]:
    """(family, numeric address) of a host of this machine. Raises ConfigError."""
    fix = "name an address of this machine, or 0.0.0.0 for all of them"
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"target.host {host!r} cannot be resolved ({reason}): {fix}") from error
    problem: int | None = None
    for family, _, _, _, socket_address in found:
        address = str(socket_address[0])
        problem = _bind_problem(family, address, 0)
        if problem is None:
            return family, address
    reason = os.strerror(problem or errno.EADDRNOTAVAIL)
    raise ConfigError(f"cannot listen on target.host {host!r} ({reason}): {fix}")


def _bind_problem(family: int, address: str, port: int) -> int | None:
    """The errno of listening there, None when it works; port 0 asks about the address alone."""
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        return error.errno or errno.EINVAL
    return None


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
