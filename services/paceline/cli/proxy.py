"""Runs in Serve's HTTP proxy before it listens: gives its connections our limits.

Serve offers no option for them, only a function of ours to call (PROXY_ENV names it), and no way
to hand it a configuration but the environment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.config import AppConfig

CALLBACK_ENV = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
WRITE_TIMEOUT_ENV = "PACELINE_WRITE_TIMEOUT_S"


def proxy_env(apps: Sequence[AppConfig]) -> dict[str, str]:
    """For Ray's processes, before they start. Applications share the proxy: the shortest counts."""
    write_timeout_s = min(app.gateway.write_timeout_s for app in apps)
    return {CALLBACK_ENV: f"{__name__}:install", WRITE_TIMEOUT_ENV: repr(write_timeout_s)}


def install() -> list[Any]:
    """What uvicorn takes when nobody chooses a protocol, as Serve does not. No middleware."""
    from uvicorn.config import HTTP_PROTOCOLS

    from paceline.gateway.connection import BoundedConnection, ConnectionLimits

    limits = ConnectionLimits()
    if write_timeout_s := os.environ.get(WRITE_TIMEOUT_ENV):
        limits = replace(limits, write_timeout_s=float(write_timeout_s))
    BoundedConnection.limits = limits
    HTTP_PROTOCOLS["auto"] = f"{BoundedConnection.__module__}:{BoundedConnection.__name__}"
    return []
