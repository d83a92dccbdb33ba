"""Who asks, and how much one API key's holder may ask for.

A key is known by its SHA-256 only: it is random and long, so a slow hash would add nothing. Limits
are those of one gateway process: N gateways let a key have N times as much. Knows no body, no
target and no route but the public ones; the clock is an argument.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.config import ApiKeyConfig
from paceline.errors import AuthenticationError, OverloadedError, RequestError
from paceline.gateway.places import Places
from paceline.metrics.gateway_catalog import KEY_MAX_CONCURRENT

# What load balancers ask without a key, and what is the same wherever Paceline runs: pages and
# their files, which ask for the key themselves.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/version", "/", "/docs", "/openapi.json"})
PUBLIC_PREFIXES = ("/static/",)
PUBLIC_METHODS = frozenset({"GET", "HEAD"})
# Longer than any key that we make, shorter than what is worth hashing.
MAX_KEY_BYTES = 512
_CALLER = "paceline.caller"
# One token's share that rounding of the clock may take.
_TINY = 1e-6


class TokenBucket:
    """Refills all the time; holds a minute's worth, so that a key that was idle may begin with so
    many at once. Invariant: 0 <= level <= per_minute."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._seen_s = now_s

    def take(self, now_s: float) -> float:
        """Seconds until there is a token; 0 when one was there and is taken."""
        per_s = self._per_minute / 60.0
        elapsed_s = max(now_s - self._seen_s, 0.0)
        self._seen_s = now_s
        self._level = min(self._level + elapsed_s * per_s, float(self._per_minute))
        if self._level < 1.0 - _TINY:
            return (1.0 - self._level) / per_s
        self._level = max(self._level - 1.0, 0.0)
        return 0.0


class Caller:
    """The holder of one key, or anybody where no keys are configured: then without limits."""

    def __init__(self, key: ApiKeyConfig | None, cache_salt: int, now_s: float) -> None:
        self._key = key
        self._bucket = TokenBucket(key.max_requests_per_minute, now_s) if key else None
        # What the prefix cache tells this key's texts by; 0 is everybody's.
        self.cache_salt = cache_salt
        # Choices from whole body to end of answer. Invariant: <= the key's limit.
        self.room = Places(
            key.max_concurrent_requests if key else None,
            "This API key has {num} requests in progress",
            KEY_MAX_CONCURRENT,
        )

    @property
    def name(self) -> str:
        """As the configuration calls the key; empty for anybody."""
        return self._key.name if self._key else ""

    def admit(self, now_s: float) -> None:
        """Count one request. Raises OverloadedError, which costs no token."""
        wait_s = self._bucket.take(now_s) if self._bucket else 0.0
        if self._key and wait_s:
            raise OverloadedError(
                f"This API key may send {self._key.max_requests_per_minute} requests per minute. "
                "Try again later.",
                None,
                "rate_limit_exceeded",
                retry_after_s=max(math.ceil(wait_s - _TINY), 1),
            )

    @contextmanager
    def places(self, num_choices: int) -> Iterator[None]:
        """Room for one request's choices. Raises OverloadedError; RequestError (400) for more
        than the key ever has room for."""
        limit = self.room.limit
        if limit is not None and num_choices > limit:
            raise RequestError(
                f"With this API key 'n' may be at most {limit}, all prompts together.",
                "n",
                "too_many",
            )
        with self.room.take(num_choices):
            yield


class Keyring:
    """The configured keys; without any, everybody is let in."""

    def __init__(
        self,
        keys: Sequence[ApiKeyConfig],
        isolates_prefix_cache: bool,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._callers = [
            (
                bytes.fromhex(key.sha256),
                Caller(key, cache_salt(key.name) if isolates_prefix_cache else 0, clock()),
            )
            for key in keys
        ]
        self._anybody = None if keys else Caller(None, 0, clock())

    def admit(self, authorizations: Sequence[bytes]) -> Caller:
        """Who sent these Authorization headers. Raises AuthenticationError, OverloadedError."""
        caller = self._anybody or self._find(authorizations)
        caller.admit(self._clock())
        return caller

    def _find(self, authorizations: Sequence[bytes]) -> Caller:
        if not authorizations:
            raise _refusal("An API key is needed: send the header 'Authorization: Bearer KEY'.")
        scheme, _, key = authorizations[0].partition(b" ")
        key = key.strip(b" ")
        is_bearer = scheme.lower() == b"bearer" and len(authorizations) == 1
        if not is_bearer or not 0 < len(key) <= MAX_KEY_BYTES:
            raise _refusal("The header must read 'Authorization: Bearer KEY', once.")
        digest = hashlib.sha256(key).digest()
        found = None
        # To the end: how long it takes says nothing about which key is near.
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        if found is None:
            raise _refusal("This API key is not known here.")
        return found


class AuthMiddleware:
    """Denies by default: what is not public needs a key, whether or not such a route exists."""

    def __init__(self, app: ASGIApp, keyring: Keyring, more_public: Collection[str] = ()) -> None:
        self._app = app
        self._keyring = keyring
        self._public = PUBLIC_PATHS | set(more_public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_public(scope):
            sent = [value for name, value in scope["headers"] if name == b"authorization"]
            scope[_CALLER] = self._keyring.admit(sent)
        elif scope["type"] == "websocket":
            # No route speaks it; a handshake must not be a way around the keys either.
            await send({"type": "websocket.close", "code": 1000})
            return
        await self._app(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        path = route_path(scope)
        is_known = path in self._public or path.startswith(PUBLIC_PREFIXES)
        return is_known and scope["method"] in PUBLIC_METHODS


def route_path(scope: Scope) -> str:
    """The path as routes spell it, wherever the app is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def caller_of(scope: Scope) -> Caller:
    """Whom the middleware let in. A route that it does not guard has none: KeyError."""
    caller: Caller = scope[_CALLER]
    return caller


def cache_salt(name: str) -> int:
    """A u64 for a key's name, never 0. Nothing that a client sends has a part in it."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"paceline-cache")
    return int.from_bytes(digest.digest()) or 1


def _refusal(message: str) -> AuthenticationError:
    return AuthenticationError(message, None, "invalid_api_key")
