"""What Ray reports becomes what a client may hear. No cluster: a hand-written handle."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.errors import OverloadedError, RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.sampling.params import SamplingParams

with warnings.catch_warnings():
    # Ray Serve's own models use deprecated pydantic; not ours to fix.
    warnings.simplefilter("ignore")
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        OwnerDiedError,
        RayTaskError,
        TaskCancelledError,
    )
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import (
        BackPressureError,
        DeploymentUnavailableError,
        RequestCancelledError,
    )

    from paceline.gateway.target_client import ServeTargetClient, translate

REQUEST = GenerateRequest("id", (1,), 4, SamplingParams())
ROUND = RoundDelta(0, (), ())


def raised_there(cause: Exception) -> RayTaskError:
    error = RayTaskError("generate", "traceback", cause, "target", 1, "127.0.0.1")
    return error.as_instanceof_cause()


class FakeHandle:
    """The parts of a DeploymentHandle that the client uses."""

    def __init__(
        self,
        failure: BaseException | None = None,
        items: Sequence[RoundDelta | RequestError | None] = (ROUND,),
    ) -> None:
        self.failure = failure
        self.items = list(items)
        self.calls: list[Any] = []
        self.num_cancels = 0

    @property
    def generate(self) -> FakeHandle:
        return self

    @property
    def ready(self) -> FakeHandle:
        return self

    def options(self, **options: Any) -> FakeHandle:
        self.calls.append(options)
        return self

    def remote(self, *args: Any) -> FakeHandle:
        self.calls.append(args)
        return self

    def broadcast(self, *args: Any) -> FakeHandle:
        self.calls.append(args)
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        if self.failure:
            raise self.failure
        return [timeout_s, return_exceptions]

    def cancel(self) -> None:
        self.num_cancels += 1

    async def __anext__(self) -> RoundDelta | RequestError | None:
        if self.items:
            return self.items.pop(0)
        if self.failure:
            raise self.failure
        raise StopAsyncIteration

    def __await__(self) -> Any:
        yield from ()
        if self.failure:
            raise self.failure
        return True


def test_own_errors_survive_the_process_border() -> None:
    own = OverloadedError("full", "max_tokens", "overloaded", 429, 3)
    translated = translate(raised_there(own))
    assert isinstance(translated, OverloadedError)
    assert translated.args == own.args
    assert translated.retry_after_s == 3


def test_backpressure_is_429() -> None:
    for error in (BackPressureError(1, 1), raised_there(BackPressureError(1, 1))):
        translated = translate(error)
        assert isinstance(translated, OverloadedError)
        assert (translated.status, translated.retry_after_s) == (429, 1)


def preempted() -> ActorDiedError:
    error = ActorDiedError()
    error._preempted = True
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ActorDiedError(), "target_died"),
        (preempted(), "target_lost"),
        (ActorUnavailableError("no connection", None), "target_lost"),
        (DeploymentUnavailableError(DeploymentID("TargetReplica", "paceline")), "target_lost"),
        (RequestCancelledError("id"), "target_lost"),
        (TaskCancelledError(), "target_lost"),
        (OwnerDiedError("", b"", ""), "target_lost"),
    ],
)
def test_a_target_that_is_gone_is_503(error: Exception, code: str) -> None:
    translated = translate(error)
    assert isinstance(translated, RequestError)
    assert (translated.status, translated.retry_after_s) == (503, 1)
    assert translated.code == code


def test_bug_of_the_target_stays_one() -> None:
    error = raised_there(ValueError("x"))
    assert translate(error) is error


async def test_stream() -> None:
    handle = FakeHandle(raised_there(OverloadedError("full")))
    stream = ServeTargetClient(handle).generate(REQUEST)
    rounds = aiter(stream)
    assert await anext(rounds) == ROUND
    with pytest.raises(OverloadedError) as caught:
        await anext(rounds)
    assert str(caught.value) == "full"
    assert handle.calls == [{"stream": True}, (REQUEST,)]
    stream.cancel()
    assert handle.num_cancels == 1


async def test_a_refusal_is_an_item_of_the_stream() -> None:
    refusal = OverloadedError("full", None, "queue_full", 429, 1)
    rounds = aiter(ServeTargetClient(FakeHandle(items=[ROUND, refusal])).generate(REQUEST))
    assert await anext(rounds) == ROUND
    with pytest.raises(OverloadedError) as caught:
        await anext(rounds)
    assert caught.value is refusal


async def test_signs_of_life_and_the_end_pass_through() -> None:
    rounds = aiter(ServeTargetClient(FakeHandle(items=[None, ROUND, None])).generate(REQUEST))
    assert [item async for item in rounds] == [None, ROUND, None]


async def test_a_call_that_another_cancelled_is_a_lost_target() -> None:
    """Serve raises CancelledError for it, which must not look like the end of our own task."""
    rounds = aiter(ServeTargetClient(FakeHandle(asyncio.CancelledError(), [])).generate(REQUEST))
    with pytest.raises(RequestError) as caught:
        await anext(rounds)
    assert caught.value.code == "target_lost"


async def test_our_own_cancellation_stays_one() -> None:
    class Silent(FakeHandle):
        async def __anext__(self) -> None:
            await asyncio.Event().wait()

    rounds = aiter(ServeTargetClient(Silent()).generate(REQUEST))
    waiting = asyncio.ensure_future(anext(rounds))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(rounds)


def test_cancel_of_a_call_that_no_replica_took() -> None:
    class Unassigned(FakeHandle):
        def cancel(self) -> None:
            super().cancel()
            raise DeploymentUnavailableError(DeploymentID("TargetReplica", "paceline"))

    handle = Unassigned()
    ServeTargetClient(handle).generate(REQUEST).cancel()
    assert handle.num_cancels == 1


async def test_abort_goes_to_every_replica_and_never_raises() -> None:
    handle = FakeHandle()
    await ServeTargetClient(handle).abort("id")
    assert handle.calls[-1] == ("abort", "id", None)
    await ServeTargetClient(handle).abort("id", 2)
    assert handle.calls[-1] == ("abort", "id", 2)
    for failure in (TimeoutError(), ActorDiedError(), RuntimeError("Router is not initialized")):
        await ServeTargetClient(FakeHandle(failure)).abort("id")


async def test_ready() -> None:
    assert await ServeTargetClient(FakeHandle()).ready()
    assert not await ServeTargetClient(FakeHandle(ActorDiedError())).ready()
