"""What replicas log, and how: `logging`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.section import Section


class LoggingConfig(Section):
    """The log lines of every replica, in the files and on the stderr that Serve gives it."""

    format: Literal["text", "json"] = Field(
        "text", description="log lines of replicas: text, or one JSON object a line"
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="least severe line that replicas log; debug has Serve's line per call, too",
    )
