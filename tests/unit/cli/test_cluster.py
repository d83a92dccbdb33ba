"""The parts of starting a service that need no Ray."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from paceline.cli import cluster
from paceline.errors import ConfigError


def test_a_busy_port_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = f"cannot listen on 127.0.0.1:{port} .*choose another with --port"
        with pytest.raises(ConfigError, match=message):
            cluster.check_port_is_free("127.0.0.1", port)
    cluster.check_port_is_free("127.0.0.1", port)


def test_a_free_port_is_free() -> None:
    cluster.check_port_is_free("127.0.0.1", cluster.free_port("127.0.0.1"))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
    ],
)
def test_the_url_is_one_that_this_machine_reaches(host: str, url: str) -> None:
    assert cluster.base_url(host, 80) == url


def test_a_token_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cluster.TOKEN_ENV:
        monkeypatch.delenv(name, raising=False)
    cluster._choose_token()
    made = os.environ["RAY_AUTH_TOKEN"]
    assert len(bytes.fromhex(made)) == 32
    cluster._choose_token()
    assert os.environ["RAY_AUTH_TOKEN"] == made
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/some/file")
    cluster._choose_token()
    assert "RAY_AUTH_TOKEN" not in os.environ


TRACEBACK = """Deploying app 'paceline' failed with exception:
Traceback (most recent call last):
  File "x.py", line 1, in f
ModuleNotFoundError: No module named 'nowhere'
"""


def test_the_reason_is_the_exception_of_a_traceback() -> None:
    expected = "ModuleNotFoundError: No module named 'nowhere'"
    assert cluster.reason(["", TRACEBACK]) == expected
    assert cluster.reason(["The deployment failed to start 3 times.\nMore"]) == (
        "The deployment failed to start 3 times."
    )
    assert cluster.reason([]) == "no reason given"


def send_and_wait(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    signal.pause()  # until the handler has run


@pytest.mark.parametrize("number", cluster.STOP_SIGNALS)
def test_stop_signals_unwind_and_the_old_handlers_return(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), cluster._stop_signals_interrupt():
        send_and_wait(number)
    assert signal.getsignal(number) == before


def test_signals_during_the_clean_up_change_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it off
    try:
        with cluster._signals_ignored():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
