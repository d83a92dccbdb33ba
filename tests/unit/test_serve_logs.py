"""Lines of ours and of Serve in Serve's files, whatever Serve does to its handlers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import pytest

from paceline.config import LoggingConfig
from paceline.serve_logs import attach_as

ServeFile = Callable[[Path], None]
OURS, SERVES = logging.getLogger("paceline"), logging.getLogger("ray.serve")
# As Serve marks its line per call.
CALL = {"serve_access_log": True, "request_id": "r1"}


def without_mark(record: logging.LogRecord) -> bool:
    """As Serve does it in each handler."""
    record.__dict__.pop("serve_access_log", None)
    return True


@pytest.fixture
def serve_file() -> Iterator[Callable[[Path], None]]:
    """Serve's own set-up: a file behind a buffer of one line."""
    kept = [(x, x.level, x.propagate, x.handlers[:]) for x in (OURS, SERVES)]
    with contextlib.ExitStack() as files:

        def begin(path: Path) -> None:
            file = logging.FileHandler(path)
            files.callback(file.close)
            file.setFormatter(logging.Formatter("Serve's own: %(message)s"))
            buffer = MemoryHandler(1, target=file)
            buffer.addFilter(without_mark)
            SERVES.handlers = [buffer]
            files.callback(buffer.close)
            SERVES.propagate = False

        yield begin
    for logger, level, propagate, handlers in kept:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def parsed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_come_out_alike(serve_file: ServeFile, tmp_path: Path) -> None:
    serve_file(tmp_path / "a.log")
    attach_as(LoggingConfig(format="json"), "TargetReplica", "t#1")
    logging.getLogger("paceline.target.driver").info("ours")
    SERVES.warning("Serve's", extra={"request_id": "r1"})
    lines = parsed(tmp_path / "a.log")
    assert [(x["logger"], x["message"], x["request_id"]) for x in lines] == [
        ("paceline.target.driver", "ours", ""),
        ("ray.serve", "Serve's", "r1"),
    ]
    assert {(x["deployment"], x["replica"]) for x in lines} == {("TargetReplica", "t#1")}


def test_new_handlers_of_serve_are_taken_over(serve_file: ServeFile, tmp_path: Path) -> None:
    """Its logging_config changed in a running replica."""
    serve_file(tmp_path / "a.log")
    attach_as(LoggingConfig(format="json"), "D", "d#1")
    serve_file(tmp_path / "b.log")
    OURS.info("ours")
    SERVES.info("Serve's")
    assert (tmp_path / "a.log").read_text() == ""
    assert [line["message"] for line in parsed(tmp_path / "b.log")] == ["ours", "Serve's"]


def test_attached_twice_is_as_once(serve_file: ServeFile, tmp_path: Path) -> None:
    serve_file(tmp_path / "a.log")
    attach_as(LoggingConfig(), "D", "d#1")
    attach_as(LoggingConfig(format="json"), "D", "d#2")
    OURS.info("ours")
    SERVES.info("Serve's")
    assert [line["replica"] for line in parsed(tmp_path / "a.log")] == ["d#2", "d#2"]


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["call", "debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_levels(level: Any, shown: list[str], serve_file: ServeFile, tmp_path: Path) -> None:
    """Serve's line per call is for debugging: heartbeats are calls."""
    serve_file(tmp_path / "a.log")
    attach_as(LoggingConfig(format="json", level=level), "D", "d#1")
    for logger in (OURS, SERVES):
        SERVES.info("call", extra=CALL)
        for name in ("debug", "info", "warning", "error"):
            logger.log(logging.getLevelNamesMapping()[name.upper()], name)
        found = [line["message"] for line in parsed(tmp_path / "a.log")]
        assert found == shown * (1 + (logger is SERVES))


def test_text_is_the_default(serve_file: ServeFile, tmp_path: Path) -> None:
    serve_file(tmp_path / "a.log")
    attach_as(LoggingConfig(), "D", "d#1")
    OURS.info("a\nb")
    (line,) = (tmp_path / "a.log").read_text().splitlines()
    assert line.endswith(" INFO paceline: a\\nb replica=d#1")


@pytest.mark.parametrize("wrong", [{"format": "xml"}, {"level": "trace"}, {"format": True}])
def test_other_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"format|level"):
        LoggingConfig(**wrong)
