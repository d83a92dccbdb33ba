"""A replica's log lines on their way into the files and the stderr that Ray Serve gives it.

Serve makes, rotates and shows those files, and logs to "ray.serve" itself; what comes out of them,
Serve's own lines included, looks as `logging` in the configuration says.
"""

from __future__ import annotations

import logging

from ray import serve

from paceline.config.logging import LoggingConfig
from paceline.logs import ContextFilter, JsonFormatter, TextFormatter

OURS, SERVES = "paceline", "ray.serve"
_FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


def attach(config: LoggingConfig) -> None:
    """Call it first thing in a deployment's constructor."""
    replica = serve.get_replica_context()
    attach_as(config, replica.deployment, replica.replica_tag)


def attach_as(config: LoggingConfig, deployment: str, replica: str) -> None:
    """Send what the package logs to the handlers of "ray.serve", whichever they are then."""
    level = logging.getLevelNamesMapping()[config.level.upper()]
    formatter = _FORMATTERS[config.format](deployment, replica)
    logging.getLogger(SERVES).setLevel(level)
    ours = logging.getLogger(OURS)
    ours.setLevel(level)
    ours.propagate = False
    to_serve = _ToServe(formatter, shows_calls=level <= logging.DEBUG)
    ours.handlers = [to_serve]
    to_serve.dress()


class _ToServe(logging.Handler):
    def __init__(self, formatter: logging.Formatter, shows_calls: bool) -> None:
        super().__init__()
        self._line_formatter = formatter
        self._filter = _ServeFilter(shows_calls)

    def emit(self, record: logging.LogRecord) -> None:
        self.dress()
        logging.getLogger(SERVES).callHandlers(record)

    def dress(self) -> None:
        """Serve makes new handlers when its own logging_config changes."""
        for handler in logging.getLogger(SERVES).handlers:
            if self._filter not in handler.filters:
                # First: one of Serve's own takes away what says that a line is one per call.
                rest = [one for one in handler.filters if not isinstance(one, _ServeFilter)]
                handler.filters[:] = [self._filter, *rest]
                handler.setFormatter(self._line_formatter)
                # Serve's file is behind a buffer of lines.
                behind = getattr(handler, "target", None)
                if isinstance(behind, logging.Handler):
                    behind.setFormatter(self._line_formatter)


class _ServeFilter(ContextFilter):
    """Drops Serve's line per call, which says less than ours, and for heartbeats nothing."""

    def __init__(self, shows_calls: bool) -> None:
        super().__init__()
        self._shows_calls = shows_calls

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "serve_access_log", False) and not self._shows_calls:
            return False
        return super().filter(record)
