"""Serve's `user_config` at a replica: checked, then taken, without a restart.

What is wrong in it raises while the replica starts: a deployment that was just described wrongly
does not come up, and says why. Later it is logged and the values before stay: Serve would replace
every replica whose `reconfigure` raises, all at once, by others that cannot start either. Knows no
particular knob.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

Base = TypeVar("Base", bound=BaseModel)


class Knobs(Protocol[Base]):
    """A model of `user_config`, such as `LiveTargetConfig`."""

    def apply(self, base: Base, /) -> Base:
        """Raises ValidationError."""


class LiveConfig(Generic[Base]):
    """`error`: why the last `user_config` was not taken; empty when it was."""

    def __init__(
        self,
        deployment: str,
        base: Base,
        parse: Callable[[Any], Knobs[Base]],
        take: Callable[[Base], None],
    ) -> None:
        self._deployment = deployment
        self._base = base
        self._parse = parse
        self._take = take
        self._has_started = False
        self.error = ""

    def apply(self, user_config: Any) -> None:
        """The first call belongs to the start: it raises ConfigError. None: what `args` say."""
        is_start, self._has_started = not self._has_started, True
        try:
            config = self._parse({} if user_config is None else user_config).apply(self._base)
        except ValidationError as error:
            self.error = f"user_config of {self._deployment}: {_problems(error)}"
            if is_start:
                raise ConfigError(self.error) from error
            logger.error("%s; the values before stay in force", self.error)
            return
        self.error = ""
        self._take(config)
        if not is_start:
            logger.info("user_config of %s taken: %s", self._deployment, user_config)


def _problems(error: ValidationError) -> str:
    said = []
    for item in error.errors():
        path = ".".join(map(str, item["loc"]))
        what = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            said.append(f"unknown key {path}")
        else:
            said.append(f"{path}: {what}" if path else what)
    return "; ".join(said)
