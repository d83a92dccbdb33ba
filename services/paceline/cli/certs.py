"""`paceline certs`: a CA for one installation and a certificate for each role. For small setups.

Whoever has a CA already lets it sign certificates with the same names (`rpc.certificates.Role`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paceline.cli.console import out
from paceline.errors import ConfigError
from paceline.rpc.certificates import CA_FILE, Role

CA_KEY_FILE = "ca-key.pem"
CA_DAYS = 3650  # --renew makes new certificates under it for so long
CLOCK_SLACK = timedelta(hours=1)  # hosts whose clocks are behind accept a new certificate, too
PUBLIC, PRIVATE = 0o644, 0o600

Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def certs(folder: Path, days: int, *, force: bool, renew: bool) -> None:
    """Write the files and say what goes where. `renew` keeps the CA that is there."""
    now = datetime.now(UTC)
    files: dict[str, bytes] = {}
    if renew:
        authority = _load_authority(folder, now)
    else:
        _refuse_overwriting(folder, force)
        authority = _make_authority(now, max(days, CA_DAYS))
        files |= {CA_KEY_FILE: _key_pem(authority[1]), CA_FILE: _pem(authority[0])}
    for role in Role:
        certificate, key = _make_leaf(authority, role, now, days)
        files |= {role.key_file: _key_pem(key), role.certificate_file: _pem(certificate)}
    _write(folder, files)
    _explain(folder, certificate.not_valid_after_utc)


def _refuse_overwriting(folder: Path, force: bool) -> None:
    names = {CA_KEY_FILE, *(name for role in Role for name in role.files)}
    there = sorted(name for name in names if (folder / name).exists())
    if there and not force:
        raise ConfigError(
            f"{folder} has {', '.join(there)} already: --renew keeps its CA and makes new "
            "certificates, --force replaces everything"
        )


def _make_authority(now: datetime, days: int) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"Paceline CA {x509.random_serial_number():x}"[:40]  # another CA has another name
    usage = _key_usage(is_authority=True)
    builder = _builder(name, name, key, now, now + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return builder.sign(key, hashes.SHA256()), key


def _make_leaf(
    authority: Authority, role: Role, now: datetime, days: int
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    ca, ca_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(is_authority=False), True),
        (x509.ExtendedKeyUsage([role.usage]), False),
        (x509.SubjectAlternativeName([x509.DNSName(role.dns_name)]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    ]
    issuer = str(ca.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    end = min(now + timedelta(days=days), ca.not_valid_after_utc)
    builder = _builder(f"paceline {role}", issuer, key, now, end)
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(ca_key, hashes.SHA256()), key


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SLACK)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _load_authority(folder: Path, now: datetime) -> Authority:
    try:
        ca = x509.load_pem_x509_certificate((folder / CA_FILE).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY_FILE).read_bytes(), None)
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename} ({error.strerror}): --renew needs {CA_FILE} and "
            f"{CA_KEY_FILE}; without it a new CA is made"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the CA in {folder} is no CA of `paceline certs`: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise ConfigError(f"{folder / CA_KEY_FILE} is not the key of {folder / CA_FILE}")
    if now > ca.not_valid_after_utc:
        raise ConfigError(f"{folder / CA_FILE} has expired: --force makes a new one")
    return ca, key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Each file appears whole, and a key is never readable by others, not for a moment."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in files.items():
            part = folder / f".{name}.part"
            part.unlink(missing_ok=True)
            mode = PRIVATE if name.endswith("-key.pem") else PUBLIC
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            part.replace(folder / name)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error


def _explain(folder: Path, expires: datetime) -> None:
    for role in Role:
        out.print(f"on every host of a {role}: {', '.join(role.files)}", markup=False)
    out.print(
        f"on none of them: {CA_KEY_FILE} (keep it offline; --renew needs it)\n"
        f"in the Serve YAML, under args: rpc: {{tls_dir: {folder.resolve()}}}\n"
        f"valid until {expires:%Y-%m-%d}",
        markup=False,
    )
