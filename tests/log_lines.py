"""What the package logs in a block, as a replica would write it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.logs import ContextFilter, JsonFormatter, TextFormatter


class Lines(logging.Handler):
    """Every record in both formats."""

    def __init__(self) -> None:
        super().__init__()
        self._as_json = JsonFormatter("Gateway", "gw#1")
        self._as_text = TextFormatter("Gateway", "gw#1")
        self.raw: list[str] = []
        self.text: list[str] = []
        self.addFilter(ContextFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.raw.append(self._as_json.format(record))
        self.text.append(self._as_text.format(record))

    @property
    def everything(self) -> str:
        return "\n".join(self.raw + self.text)

    def parsed(self, *levels: str) -> list[dict[str, Any]]:
        """Of all levels when none is named."""
        lines = [json.loads(line) for line in self.raw]
        return [line for line in lines if not levels or line["level"] in levels]

    def of_requests(self) -> list[dict[str, Any]]:
        """The lines that gateways write when a request has ended."""
        return [line for line in self.parsed() if line["logger"].endswith("gateway.request_log")]


@contextmanager
def recorded(level: int = logging.DEBUG) -> Iterator[Lines]:
    lines, logger = Lines(), logging.getLogger("paceline")
    level_before = logger.level
    logger.addHandler(lines)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level_before)
