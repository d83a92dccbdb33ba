"""What `rpc.tls_dir` must hold: each fault has a sentence that names the file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.rpc.certificates import Role, read_identity, role_misfit
from tests.rpc import authority as a

NOW = datetime.now(UTC)
CA = a.Authority()
OTHER = a.Authority("other")
GOOD = CA.issue(a.DRAFT_NAME)
Spoil = Callable[[Path], object]


def test_good_files(tmp_path: Path) -> None:
    identity = read_identity(a.write(tmp_path, "draft", CA.pem, GOOD), Role.DRAFT, NOW)
    assert (identity.ca, identity.chain, identity.key) == (CA.pem, *GOOD)
    assert timedelta(hours=21) < identity.expires - NOW < timedelta(hours=23)
    assert "KEY" not in repr(identity)


def test_ca_file_may_hold_an_old_and_a_new_ca(tmp_path: Path) -> None:
    """That is how a CA is replaced without a gap."""
    folder = a.write(tmp_path, "draft", OTHER.pem + CA.pem, GOOD)
    assert read_identity(folder, Role.DRAFT, NOW).ca == OTHER.pem + CA.pem


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o440])
def test_a_group_may_read_a_key(mode: int, tmp_path: Path) -> None:
    folder = a.write(tmp_path, "draft", CA.pem, GOOD)
    (folder / "draft-key.pem").chmod(mode)
    read_identity(folder, Role.DRAFT, NOW)


def replaced(name: str, data: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(data)


def as_folder(folder: Path) -> None:
    (folder / "draft.pem").unlink()
    (folder / "draft.pem").mkdir()


FAULTS: dict[str, tuple[Spoil, str]] = {
    "no ca": (lambda f: (f / "ca.pem").unlink(), r"cannot read .*/ca\.pem \(No such file"),
    "no key": (
        lambda f: (f / "draft-key.pem").unlink(),
        r"cannot read .*/draft-key\.pem \(No such file or directory\): a draft needs ca\.pem, "
        r"draft\.pem, draft-key\.pem in rpc\.tls_dir; `paceline certs` makes a matching set",
    ),
    "a folder": (as_folder, r"cannot read .*/draft\.pem \(Is a directory\)"),
    "everybody reads": (
        lambda f: (f / "draft-key.pem").chmod(0o604),
        r"everybody on this machine may use .*/draft-key\.pem: run `chmod 600 ",
    ),
    "everybody writes": (lambda f: (f / "draft-key.pem").chmod(0o602), "everybody on this"),
    "ca is no pem": (replaced("ca.pem", b"\xff"), r"/ca\.pem holds no PEM certificate"),
    "empty": (replaced("draft.pem", b""), r"/draft\.pem holds no PEM certificate"),
    "key is no key": (replaced("draft-key.pem", CA.pem), r"/draft-key\.pem holds no PEM key"),
    "other key": (
        replaced("draft-key.pem", CA.issue(a.DRAFT_NAME)[1]),
        r"/draft-key\.pem is not the key of .*/draft\.pem: `paceline certs`",
    ),
    "other ca": (
        replaced("ca.pem", OTHER.pem),
        r"/draft\.pem is not signed by a CA in .*/ca\.pem",
    ),
    "same name, other key": (
        replaced("ca.pem", a.Authority().pem),
        r"/draft\.pem is not signed by a CA in .*/ca\.pem",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_its_file(fault: str, tmp_path: Path) -> None:
    spoil, sentence = FAULTS[fault]
    folder = a.write(tmp_path, "draft", CA.pem, GOOD)
    spoil(folder)
    with pytest.raises(ConfigError, match=sentence):
        read_identity(folder, Role.DRAFT, NOW)


@pytest.mark.parametrize(
    ("later", "sentence"),
    [
        (timedelta(hours=23), r"/draft\.pem has expired on 20\d\d-\d\d-\d\d \d\d:\d\d UTC"),
        (timedelta(hours=-3), r"/draft\.pem is not valid before .*: check this machine's clock"),
    ],
)
def test_time(later: timedelta, sentence: str, tmp_path: Path) -> None:
    folder = a.write(tmp_path, "draft", CA.pem, GOOD)
    with pytest.raises(ConfigError, match=sentence):
        read_identity(folder, Role.DRAFT, NOW + later)


def test_an_expired_ca(tmp_path: Path) -> None:
    pair = CA.issue(a.DRAFT_NAME, lifetime=timedelta(days=9))
    folder = a.write(tmp_path, "draft", CA.pem, pair)
    with pytest.raises(ConfigError, match=r"/ca\.pem has expired"):
        read_identity(folder, Role.DRAFT, NOW + timedelta(days=5))


@pytest.mark.parametrize(
    ("names", "usages", "sentence"),
    [
        ((a.TARGET_NAME,), a.ANY_USAGE, "cannot be used by a draft: its certificate is for a tar"),
        ((a.DRAFT_NAME, a.TARGET_NAME), a.ANY_USAGE, "its certificate is for a target"),
        (("host",), a.ANY_USAGE, r"it lacks the DNS name draft\.paceline\.internal"),
        ((), a.ANY_USAGE, r"it lacks the DNS name draft\.paceline\.internal"),
        ((a.DRAFT_NAME,), a.ANY_USAGE[:1], "its extended key usage does not allow it"),
    ],
    ids=["target", "both", "host", "none", "usage"],
)
def test_our_own_role_is_checked(
    names: tuple[str, ...], usages: tuple[object, ...], sentence: str, tmp_path: Path
) -> None:
    pair = CA.issue(*names, usages=usages)  # type: ignore[arg-type]
    folder = a.write(tmp_path, "draft", CA.pem, pair)
    with pytest.raises(ConfigError, match=sentence):
        read_identity(folder, Role.DRAFT, NOW)


def test_role_names_are_compared_whole() -> None:
    assert role_misfit([a.DRAFT_NAME, "more"], Role.DRAFT) is None
    assert role_misfit(["*.paceline.internal", f"x.{a.DRAFT_NAME}"], Role.DRAFT) is not None
