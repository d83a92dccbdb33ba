"""Certificate folders for tests: what `paceline certs` makes, and what it never would."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.config import RpcConfig
from tests.rpc import wire

ANY_USAGE = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
TARGET_NAME, DRAFT_NAME = "target.paceline.internal", "draft.paceline.internal"


class Authority:
    """A CA that signs whatever it is asked to."""

    def __init__(self, name: str = "CA") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self.name, self.key.public_key(), timedelta(days=2))
        builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
        self.certificate = builder.sign(self.key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        *names: str,
        usages: tuple[x509.ObjectIdentifier, ...] = ANY_USAGE,
        lifetime: timedelta = timedelta(days=1),
        begin: timedelta = timedelta(hours=-2),
    ) -> tuple[bytes, bytes]:
        """(certificate, key) with these DNS names, valid from `begin` after now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "host")])
        builder = self._builder(subject, key.public_key(), lifetime, begin)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if names:
            san = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(san, critical=False)
        pem = builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return pem, key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def _builder(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        lifetime: timedelta,
        begin: timedelta = timedelta(hours=-2),
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begin)
            .not_valid_after(now + begin + lifetime)
        )


def write(folder: Path, role: str, ca: bytes, pair: tuple[bytes, bytes]) -> Path:
    """The three files of a host of `role`."""
    folder.mkdir(exist_ok=True)
    key = folder / f"{role}-key.pem"
    for path, data in (
        (folder / "ca.pem", ca),
        (folder / f"{role}.pem", pair[0]),
        (key, pair[1]),
    ):
        path.write_bytes(data)
    key.chmod(0o600)
    return folder


def both_roles(folder: Path, ca: Authority) -> RpcConfig:
    """A configuration under which a good target and a good draft find their files."""
    write(folder, "target", ca.pem, ca.issue(TARGET_NAME))
    write(folder, "draft", ca.pem, ca.issue(DRAFT_NAME))
    return configured(folder)


def configured(folder: Path | None) -> RpcConfig:
    return wire.CONFIG.model_copy(update={"tls_dir": str(folder) if folder else ""})
