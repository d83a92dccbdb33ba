"""Mutual TLS for the stream between a draft and a target, when `rpc.tls_dir` names a folder.

Both ends show a certificate of the same CA. The draft has gRPC compare the target's role (its SAN)
in the handshake; the target compares the draft's when a call arrives, as gRPC's server checks no
names. Certificates are only looked at when a connection begins: a stream that lives is left alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import grpc

from paceline.config import RpcConfig
from paceline.errors import ConfigError
from paceline.rpc.certificates import Identity, Role, read_identity, role_misfit

logger = logging.getLogger(__name__)

PEER_DNS = "peer_dns"  # gRPC's name for the DNS names in the peer's SAN
Stamp = tuple[tuple[int, int, int], ...]


class ServerTls:
    """A target's credentials, read again at a handshake when a file has changed.

    Files that do not fit each other (somebody is replacing them right now) change nothing: the
    last good ones serve until they do. Raises ConfigError when there are none to begin with.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp = self._look()  # of the files that are in use
        self._last_problem = ""
        identity = read_identity(folder, Role.TARGET, datetime.now(UTC))
        self.credentials = grpc.dynamic_ssl_server_credentials(
            _server_configuration(identity),
            self._fetch,  # type: ignore[arg-type]  # None is allowed, the stubs leave it out
            require_client_authentication=True,
        )
        logger.info("mutual TLS with %s, valid until %s", folder, identity.expires)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, on one of its threads, before every handshake; None: no news."""
        stamp = self._look()
        if stamp == self._stamp:
            return None
        try:
            identity = read_identity(self._folder, Role.TARGET, datetime.now(UTC))
        except ConfigError as error:
            if str(error) != self._last_problem:
                logger.error("the certificates stay as they were: %s", error)
            self._last_problem = str(error)
            return None
        self._stamp, self._last_problem = stamp, ""
        logger.info("new certificates from %s, valid until %s", self._folder, identity.expires)
        return _server_configuration(identity)

    def _look(self) -> Stamp:
        """What changes when a file does; empty while one is missing."""
        try:
            found = [os.stat(self._folder / name) for name in Role.TARGET.files]
        except OSError:
            return ()
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)


def server_tls(config: RpcConfig) -> ServerTls | None:
    """None without `rpc.tls_dir`."""
    return ServerTls(Path(config.tls_dir)) if config.tls_dir else None


def check_draft_tls(config: RpcConfig) -> None:
    """Raise ConfigError when this draft could never dial: better at its start than for ever."""
    if config.tls_dir:
        read_identity(Path(config.tls_dir), Role.DRAFT, datetime.now(UTC))


def open_channel(
    address: str, config: RpcConfig, options: list[tuple[str, int | str]]
) -> grpc.aio.Channel:
    """To a target; the files are read each time. Raises ConfigError."""
    if not config.tls_dir:
        return grpc.aio.insecure_channel(address, options=options)
    identity = read_identity(Path(config.tls_dir), Role.DRAFT, datetime.now(UTC))
    credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.chain)
    role = ("grpc.ssl_target_name_override", Role.TARGET.dns_name)
    return grpc.aio.secure_channel(address, credentials, options=[*options, role])


def peer_misfit(auth_context: Mapping[str, Iterable[bytes]]) -> str | None:
    """Why the peer of this connection is no draft of ours, None when it is one."""
    names = (name.decode("ascii", "replace") for name in auth_context.get(PEER_DNS, ()))
    return role_misfit(names, Role.DRAFT)


def is_refusal(reason: str) -> bool:
    """Whether a connection ended because one side does not trust the other, for certain."""
    lowered = reason.lower()
    return reason.startswith("PERMISSION_DENIED") or any(
        sign in lowered for sign in ("tls handshake failed", "verification check failed")
    )


def explain(reason: str, config: RpcConfig) -> str:
    """A draft's failure to connect, with what to look at when TLS may be the cause.

    A target that refuses us in the TLS handshake just hangs up; why is in its own log.
    """
    is_failed_handshake = is_refusal(reason) and not reason.startswith("PERMISSION_DENIED")
    if not is_failed_handshake and "Socket closed" not in reason:
        return reason
    if not config.tls_dir:
        return f"{reason} (this draft speaks plaintext: set rpc.tls_dir if the target has it)"
    return (
        f"{reason} (this draft speaks TLS: the target needs rpc.tls_dir, too, and both need valid "
        "certificates of one CA)"
    )


def _server_configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.chain)], root_certificates=identity.ca
    )
