"""How a request ends that this target does not finish: what its client is told. Pure."""

from __future__ import annotations

from paceline.errors import OverloadedError, RequestError

NO_PLACE = "no_place"
# A session id and how its request ends.
Ending = tuple[int, RequestError]


def engine_error() -> RequestError:
    """A pass over this request alone failed; the engine goes on."""
    return RequestError(
        "the model failed on this request; nothing more was generated", None, "engine_error", 500
    )


def engine_broken() -> RequestError:
    """It was in the pass that broke the engine, and may be the cause."""
    return RequestError(
        "the model failed under this request's batch, and this target has stopped; try again",
        None,
        "engine_broken",
        503,
        1,
    )


def target_lost() -> RequestError:
    """The target has stopped, through no fault of this request."""
    return RequestError("this target has stopped; try again", None, "target_lost", 503, 1)


def queue_timeout(max_queue_s: float) -> RequestError:
    """It never had a place."""
    return RequestError(
        f"no place became free within {max_queue_s:g} s (target.max_queue_s); try again later",
        None,
        "queue_timeout",
        503,
        1,
    )


def no_place() -> OverloadedError:
    """No client waits for it, and it would have to wait, or another one does."""
    return OverloadedError("no place is free for a background request", None, NO_PLACE)


def aborted() -> RequestError:
    return RequestError("the request was aborted", None, "aborted", 499)
