"""`paceline top` on a real terminal (a pty): what ends it, and the terminal afterwards."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from paceline.cli.top_keys import quit_key
from tests.unit.cli.toy_service import gateway, serving, two_targets_two_drafts

TIMEOUT_S = 30.0
LOCAL_MODES = 3
# So that Ctrl-C, typed there, is a signal.
WITH_TERMINAL = (
    "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " runpy.run_module('paceline.cli.main', run_name='__main__')"
)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """(what the user has, what the program has)"""
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


def is_line_by_line(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[LOCAL_MODES] & termios.ICANON)


def read_until(user: int, words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        seen += os.read(user, 1 << 16)
    return seen


@contextmanager
def running(ends: tuple[int, int], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WITH_TERMINAL, "top", *arguments]
    _, program = ends
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(
        command, stdin=program, stdout=program, stderr=program, env=env, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("keys", [b"q", b"\x1b[Ax Q", b"\x03"], ids=["q", "Q after others", "^C"])
def test_what_ends_it(terminal: tuple[int, int], keys: bytes) -> None:
    user, program = terminal
    before = termios.tcgetattr(program)
    assert is_line_by_line(program)
    with (
        serving(gateway(two_targets_two_drafts())) as url,
        # nobody waits so long: the key ends the pause
        running(terminal, "--interval", "3600", "--url", url) as process,
    ):
        read_until(user, b"served by")
        assert not is_line_by_line(program)
        os.write(user, keys)
        assert process.wait(TIMEOUT_S) == 0
    assert termios.tcgetattr(program) == before


@contextmanager
def stdin_from(monkeypatch: pytest.MonkeyPatch, file: int) -> Iterator[None]:
    with open(file, closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield


def test_modes_return_after_a_failure(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, program = terminal
    before = termios.tcgetattr(program)

    def failing(pause: Callable[[float], bool]) -> None:
        assert not is_line_by_line(program)
        assert not pause(0.0)
        raise RuntimeError

    failure = pytest.raises(RuntimeError)
    with stdin_from(monkeypatch, program), failure, quit_key(lambda seconds: None) as pause:
        failing(pause)
    assert termios.tcgetattr(program) == before


def test_only_its_key_ends_it(terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    user, program = terminal
    with stdin_from(monkeypatch, program), quit_key(lambda seconds: None) as pause:
        os.write(user, b"x\x1b[A\n\xff")
        assert not pause(0.01)
        os.write(user, b"xq")
        assert pause(TIMEOUT_S)
        assert not pause(0.0), "it was read"


def test_without_a_terminal_it_only_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("q"))
    slept: list[float] = []
    with quit_key(slept.append) as pause:
        assert not pause(2.0)
    assert slept == [2.0]
    assert sys.stdin.read() == "q"
