"""`paceline certs` on its own folder: what it writes, what it refuses, that it works."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.errors import ConfigError
from paceline.rpc.certificates import Role, read_identity

FILES = ["ca-key.pem", "ca.pem", "draft-key.pem", "draft.pem", "target-key.pem", "target.pem"]


def certs(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["certs", str(folder), *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert certs(tmp_path / "tls").exit_code == 0
    return tmp_path / "tls"


def test_both_roles_can_use_what_it_makes(folder: Path) -> None:
    now = datetime.now(UTC)
    for role in Role:
        left = read_identity(folder, role, now).expires - now
        assert timedelta(days=364) < left < timedelta(days=366)


def test_keys_are_private(folder: Path) -> None:
    assert sorted(contents(folder)) == FILES  # no leftovers
    for path in folder.glob("*-key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_it_says_what_goes_where(tmp_path: Path) -> None:
    result = certs(tmp_path / "tls", "--days", "7")
    end = datetime.now(UTC) + timedelta(days=7)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "on every host of a target: ca.pem, target.pem, target-key.pem",
        "on every host of a draft: ca.pem, draft.pem, draft-key.pem",
        "on none of them: ca-key.pem (keep it offline; --renew needs it)",
        f"in the Serve YAML, under args: rpc: {{tls_dir: {tmp_path / 'tls'}}}",
        f"valid until {end:%Y-%m-%d}",
    ]


def test_what_is_there_is_kept(folder: Path) -> None:
    before = contents(folder)
    result = certs(folder)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {folder} has ca-key.pem, ca.pem, draft-key.pem, ")
    assert len(result.stderr.splitlines()) == 1
    assert contents(folder) == before
    (folder / "ca-key.pem").unlink()
    assert certs(folder).exit_code == 1  # one of the others is enough


def test_force_replaces_everything(folder: Path) -> None:
    before = contents(folder)
    assert certs(folder, "--force").exit_code == 0
    after = contents(folder)
    assert all(before[name] != after[name] for name in FILES)


def test_renew_keeps_the_ca(folder: Path) -> None:
    before = contents(folder)
    assert certs(folder, "--renew", "--days", "30").exit_code == 0
    after = contents(folder)
    assert [name for name in FILES if before[name] == after[name]] == ["ca-key.pem", "ca.pem"]
    now = datetime.now(UTC)
    assert read_identity(folder, Role.TARGET, now).expires < now + timedelta(days=31)


def test_renew_without_a_ca(folder: Path, tmp_path: Path) -> None:
    (folder / "ca-key.pem").unlink()
    result = certs(folder, "--renew")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: cannot read {folder / 'ca-key.pem'} (No such file")
    (folder / "ca-key.pem").write_bytes((folder / "draft-key.pem").read_bytes())
    assert "ca-key.pem is not the key of" in certs(folder, "--renew").stderr
    (folder / "ca-key.pem").write_bytes(b"nonsense")
    assert "is no CA of `paceline certs`" in certs(folder, "--renew").stderr


def test_two_installations_do_not_trust_each_other(folder: Path, tmp_path: Path) -> None:
    assert certs(tmp_path / "other").exit_code == 0
    (folder / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="is not signed by a CA in"):
        read_identity(folder, Role.DRAFT, datetime.now(UTC))


def test_the_ca_signs_hosts_and_no_other_ca(folder: Path) -> None:
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    leaf = x509.load_pem_x509_certificate((folder / "target.pem").read_bytes())
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize("days", ["0", "3651", "x"])
def test_days_are_bounded(days: str, tmp_path: Path) -> None:
    assert certs(tmp_path / "tls", "--days", days).exit_code == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    result = certs(tmp_path / "file" / "tls")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: cannot write to {tmp_path / 'file' / 'tls'}: ")
