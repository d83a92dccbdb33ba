"""How a stream between a draft and a target ends.

PacelineError
 +-- HandshakeRefused   one side will not work with the other; the sentence says why
 +-- StreamLost         the peer, or the way to it, is gone; nothing more will arrive
      +-- StreamClosed  the same, but orderly: one side said Bye
"""

from __future__ import annotations

from paceline.errors import PacelineError


class HandshakeRefused(PacelineError):
    """Dialling again changes nothing until one side is restarted, or has room."""


class StreamLost(PacelineError):
    """The stream ended without a Bye."""


class StreamClosed(StreamLost):
    """The stream ended with a Bye."""
