"""`paceline key`: a new API key, shown once, and the configuration lines that admit it."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from pydantic import ValidationError

from paceline.config import ApiKeyConfig
from paceline.errors import ConfigError

PREFIX = "sk-paceline-"
# 256 bits: nobody guesses it, so a fast hash is enough to keep it.
NUM_RANDOM_BYTES = 32


@dataclass(frozen=True, slots=True)
class NewKey:
    """Whoever prints this object by accident shows only the hash."""

    secret: str = field(repr=False)
    config: ApiKeyConfig

    @property
    def yaml(self) -> str:
        """What goes under `applications[].args.gateway` of a Serve YAML. Never the key."""
        # Quoted: a name such as 007 or yes must stay a word.
        return f'api_keys:\n  - name: "{self.config.name}"\n    sha256: "{self.config.sha256}"'


def new_key(name: str) -> NewKey:
    """Raises ConfigError for a name that the configuration would refuse."""
    secret = PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)
    try:
        config = ApiKeyConfig(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest())
    except ValidationError:
        raise ConfigError(
            "a key's name has 1 to 64 letters, digits, dots, dashes and underscores, a letter or "
            "digit first"
        ) from None
    return NewKey(secret, config)
