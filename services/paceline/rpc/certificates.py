"""The certificates of a host: which files there are, and whether they are any good.

One CA signs them all; the role of a certificate is a DNS name in its SAN that no network resolves,
so addresses may change and a target's certificate is none for a draft. Knows no gRPC. What is
wrong is a `ConfigError` that names the file, because gRPC would only say "handshake failed".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from paceline.errors import ConfigError

CA_FILE = "ca.pem"
_FIX = "`paceline certs` makes a matching set"
# Unreadable bytes, an algorithm that is not supported, a passphrase that is missing.
_PARSE_ERRORS = (ValueError, TypeError, UnsupportedAlgorithm)


class Role(StrEnum):
    """What a certificate is for."""

    TARGET = "target"
    DRAFT = "draft"

    @property
    def dns_name(self) -> str:
        """The SAN that says so; .internal is reserved for private names."""
        return f"{self}.paceline.internal"

    @property
    def certificate_file(self) -> str:
        return f"{self}.pem"

    @property
    def key_file(self) -> str:
        return f"{self}-key.pem"

    @property
    def files(self) -> tuple[str, str, str]:
        """All that a host of this role needs."""
        return (CA_FILE, self.certificate_file, self.key_file)

    @property
    def usage(self) -> x509.ObjectIdentifier:
        """Drafts dial targets: a target is the TLS server."""
        is_server = self is Role.TARGET
        return ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class Identity:
    """What a host shows and whom it trusts, as PEM; checked. The key stays out of `repr`."""

    ca: bytes
    chain: bytes
    key: bytes
    expires: datetime

    def __repr__(self) -> str:
        return f"Identity(expires={self.expires})"


def read_identity(folder: Path, role: Role, now: datetime) -> Identity:
    """The files of `role` in `folder`. Raises ConfigError for the first thing that is wrong."""
    paths = [folder / name for name in role.files]
    ca_pem, chain_pem, key_pem = (_read(path, role) for path in paths)
    ca_path, chain_path, key_path = paths
    authorities = _certificates(ca_path, ca_pem)
    chain = _certificates(chain_path, chain_pem)
    _check_key(chain[0], chain_path, key_pem, key_path)
    _check_role(chain[0], chain_path, role)
    _check_chain(chain, chain_path, authorities, ca_path, now)
    return Identity(ca_pem, chain_pem, key_pem, chain[0].not_valid_after_utc)


def role_misfit(dns_names: Iterable[str], role: Role) -> str | None:
    """Why a certificate with these names is none of `role`, None when it is one."""
    names = set(dns_names)
    for other in Role:
        if other is not role and other.dns_name in names:
            return f"its certificate is for a {other}, not for a {role}"
    if role.dns_name not in names:
        return f"its certificate is not for a {role}: it lacks the DNS name {role.dns_name}"
    return None


def _read(path: Path, role: Role) -> bytes:
    """The file's bytes. A key may be read by a group (that of a mounted Kubernetes secret), but
    not by everybody."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror}): a {role} needs {', '.join(role.files)} in "
            f"rpc.tls_dir; {_FIX}"
        ) from error
    if path.name == role.key_file and mode & stat.S_IRWXO:
        raise ConfigError(f"everybody on this machine may use {path}: run `chmod 600 {path}`")
    return data


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except _PARSE_ERRORS as error:
        raise ConfigError(f"{path} holds no PEM certificate: {_FIX}") from error


def _check_key(leaf: x509.Certificate, chain_path: Path, key_pem: bytes, key_path: Path) -> None:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except _PARSE_ERRORS as error:
        raise ConfigError(f"{key_path} holds no PEM key without a passphrase: {_FIX}") from error
    if _public_bytes(key.public_key()) != _public_bytes(leaf.public_key()):
        raise ConfigError(f"{key_path} is not the key of {chain_path}: {_FIX}")


def _public_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _check_role(leaf: x509.Certificate, path: Path, role: Role) -> None:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        sentence = role_misfit(names.get_values_for_type(x509.DNSName), role)
    except x509.ExtensionNotFound:
        sentence = role_misfit((), role)
    if sentence is not None:
        raise ConfigError(f"{path} cannot be used by a {role}: {sentence}; {_FIX}")
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # good for everything
    if role.usage not in usages:
        raise ConfigError(
            f"{path} cannot be used by a {role}: its extended key usage does not allow it; {_FIX}"
        )


def _check_chain(
    chain: Sequence[x509.Certificate],
    chain_path: Path,
    authorities: Sequence[x509.Certificate],
    ca_path: Path,
    now: datetime,
) -> None:
    """Each certificate is signed by the next, and the last by a CA of the file."""
    issuers = [[one] for one in chain[1:]] + [list(authorities)]
    for certificate, candidates in zip(chain, issuers, strict=True):
        _check_time(certificate, chain_path, now)
        signers = [one for one in candidates if _is_signed_by(certificate, one)]
        if not signers:
            raise ConfigError(f"{chain_path} is not signed by a CA in {ca_path}: {_FIX}")
    _check_time(max(signers, key=lambda one: one.not_valid_after_utc), ca_path, now)


def _is_signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (*_PARSE_ERRORS, InvalidSignature):
        return False
    return True


def _check_time(certificate: x509.Certificate, path: Path, now: datetime) -> None:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise ConfigError(f"{path} has expired on {end:%Y-%m-%d %H:%M} UTC: {_FIX}")
    if now < begin:
        raise ConfigError(
            f"{path} is not valid before {begin:%Y-%m-%d %H:%M} UTC: check this machine's clock"
        )
