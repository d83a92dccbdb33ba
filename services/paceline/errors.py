"""Every exception that Paceline raises on purpose.

PacelineError
 +-- ConfigError            the configuration or a model folder cannot be served; says the fix
 +-- ProtocolError
 |    +-- LocalProtocolError    our own code broke a rule: a bug, fails loudly
 |    +-- RemoteProtocolError   a peer broke a rule: costs the peer its stream or session
 +-- RequestError           a client's request cannot be honoured; carries its HTTP answer
      +-- ContextLengthError    prompt (+ max_tokens) does not fit the model
      +-- OverloadedError       a named limit is reached; retry later
      +-- AuthenticationError   no key, or one that is not known here

This module does not know HTTP frameworks, gRPC or Ray.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(PacelineError):
    """The configuration, or a model it names, cannot be served."""


class ProtocolError(PacelineError):
    """A rule of the draft/target protocol was broken."""


class LocalProtocolError(ProtocolError):
    """We broke the rule: a bug in Paceline."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rule."""


class RequestError(PacelineError):
    """A client's request cannot be honoured.

    `status` is an HTTP status, `param` the offending request field if there is one, `code` a
    stable machine-readable word, `retry_after_s` seconds for a Retry-After header; `limit` names
    the limit that was reached where its code stands for several: metrics count it, no client
    sees it.
    Arguments are positional so that the exception survives pickling between Ray processes.
    """

    default_status = 400
    default_type = "invalid_request_error"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: int | None = None,
        limit: str = "",
    ) -> None:
        super().__init__(message, param, code, status, retry_after_s, limit)
        self.message = message
        self.param = param
        self.code = code
        self.status = self.default_status if status is None else status
        self.retry_after_s = retry_after_s
        self.limit = limit
        self.type = self.default_type

    def __str__(self) -> str:
        return self.message


class ContextLengthError(RequestError):
    """The prompt, or prompt + max_tokens, exceeds the model's context."""


class OverloadedError(RequestError):
    """A named limit on work in progress is reached; nothing was started."""

    default_status = 429
    default_type = "overloaded_error"


class AuthenticationError(RequestError):
    """The request needs an API key that is known here."""

    default_status = 401
