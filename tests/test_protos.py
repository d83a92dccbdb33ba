"""The checked-in generated code is what the compiler writes, and the wire keeps its promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROTO = "paceline/rpc/v1/speculation.proto"
GENERATED = "paceline/rpc/v1"
BASELINE = "protos/v1.binpb"

# What `make protos` runs from the root, with the virtual environment's bin first on PATH (protoc
# looks there for protoc-gen-mypy_grpc). Only the output folder differs here.
PROTOC = [
    sys.executable,
    "-m",
    "grpc_tools.protoc",
    "-Iprotos",
    "--python_out={out}",
    "--pyi_out={out}",
    "--grpc_python_out={out}",
    "--mypy_grpc_out={out}",
    PROTO,
]
BIN = Path(sys.executable).parent


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(str(BIN / "buf"), *arguments)


def generated_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / GENERATED).glob("*_pb2*")}


def test_generated_code_is_current(tmp_path: Path) -> None:
    done = run(*(argument.format(out=tmp_path) for argument in PROTOC))
    assert done.returncode == 0, done.stderr
    fresh = generated_files(tmp_path)
    assert sorted(fresh) == [
        "speculation_pb2.py",
        "speculation_pb2.pyi",
        "speculation_pb2_grpc.py",
        "speculation_pb2_grpc.pyi",
    ]
    assert fresh == generated_files(ROOT / "services"), "run `make protos`"


def test_lint() -> None:
    done = buf("lint", "protos")
    assert (done.returncode, done.stdout) == (0, "")


def test_wire_is_compatible_with_the_baseline() -> None:
    done = buf("breaking", "protos", "--against", BASELINE)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "breaks"),
    [
        ("uint32 have_len = 3;", "uint32 have_len = 3;\n  // New.\n  uint32 extra = 4;", False),
        ("uint32 have_len = 3;", "string have_len = 3;", True),
        ("uint32 have_len = 3;", "uint32 have_len = 4;", True),
        ("BUSY = 2;", "FULL = 2;", True),
    ],
    ids=["added", "retyped", "renumbered", "renamed"],
)
def test_breaking_check_has_teeth(tmp_path: Path, old: str, new: str, breaks: bool) -> None:
    changed = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", changed)
    text = (changed / PROTO).read_text()
    assert text.count(old) == 1
    (changed / PROTO).write_text(text.replace(old, new))
    done = buf("breaking", str(changed), "--against", BASELINE)
    assert (done.returncode != 0) == breaks, done.stdout + done.stderr


def test_every_member_of_our_enums_has_a_number() -> None:
    from paceline.protocol.messages import CloseReason, OpenStatus
    from paceline.rpc import enums
    from paceline.sampling.params import VerificationMode

    for table, numbers, kind in (
        (enums.MODES, enums.MODE_NUMBERS, VerificationMode),
        (enums.OPEN_STATUSES, enums.OPEN_STATUS_NUMBERS, OpenStatus),
        (enums.CLOSE_REASONS, enums.CLOSE_REASON_NUMBERS, CloseReason),
    ):
        assert set(table.values()) == set(kind)
        assert 0 not in table
        assert {number: member for member, number in numbers.items()} == table
