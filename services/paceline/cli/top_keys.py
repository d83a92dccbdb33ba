"""The key that ends `paceline top`. Without a terminal to read from there is none, and no mode of
it changes; Ctrl-C stays what it is. No thread: whoever waits reads."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIT = b"qQ"
_READ_BYTES = 1024

# Wait so many seconds; True: the key came, or the terminal has gone.
Pause = Callable[[float], bool]


@contextmanager
def quit_key(sleep: Callable[[float], None]) -> Iterator[Pause]:
    """The terminal's modes return at the end, whatever ends the block."""

    def only_sleep(seconds: float) -> bool:
        sleep(seconds)
        return False

    if not sys.stdin.isatty():
        yield only_sleep
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield lambda seconds: _is_quit_within(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


def _is_quit_within(terminal: int, seconds: float) -> bool:
    """Other keys are read, and mean nothing."""
    deadline = time.monotonic() + seconds
    while True:
        readable, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return False
        keys = os.read(terminal, _READ_BYTES)
        if not keys or any(key in QUIT for key in keys):
            return True
