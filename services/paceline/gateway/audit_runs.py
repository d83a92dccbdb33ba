"""The requests of an audit: a finished request again without a draft, and its text scored.

They go to the same targets as clients' requests, one at a time, in the background: a target takes
one only if it can start at once, and ends it when somebody has to wait. One choice is one request,
so that it needs one place. The prefix cache is not shared with anything that a draft had a part
in. Knows no verdict, no statistics and no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from paceline.errors import OverloadedError
from paceline.gateway.failover import target_lost
from paceline.gateway.targets import ABORT_TIMEOUT_S, TargetClient, next_delta
from paceline.generation import (
    GenerateRequest,
    Resumption,
    RoundDelta,
    SpeculationRequest,
    TokenLogprobs,
)
from paceline.sampling.params import MAX_LOGIT_BIAS, SamplingParams, VerificationMode


class GiveWay(Exception):
    """Clients need the service: the audit ends here."""


@dataclass(slots=True)
class ReRuns:
    """Re-runs of one request. `may_go_on` is asked after every round. `timeout_s`: of each run.

    `pause` is awaited before a run that clients ended is repeated; None: the audit ends there, as
    it does in any case when a target has no place for the very first run.
    """

    request: GenerateRequest
    mode: VerificationMode
    targets: TargetClient
    cache_salt: int
    silence_s: float
    timeout_s: float
    may_go_on: Callable[[], bool]
    new_name: Callable[[], str]
    pause: Callable[[], Awaitable[None]] | None = None
    _has_begun: bool = field(default=False, init=False)

    async def plain(
        self,
        choice: int,
        output: tuple[int, ...],
        max_tokens: int,
        sampling: SamplingParams | None = None,
    ) -> tuple[int, ...]:
        """What follows `output` in a choice without a draft, up to `max_tokens` in all."""
        request = self.request
        sampling = sampling or request.sampling
        outputs = tuple(output if i == choice else None for i in range(request.n))
        again = replace(
            request,
            request_id=self.new_name(),
            max_tokens=max_tokens,
            sampling=replace(sampling, min_tokens=min(sampling.min_tokens, max_tokens)),
            speculation=SpeculationRequest("off", mode=self.mode),
            num_logprobs=None,
            num_prompt_logprobs=None,
            resumption=Resumption(1, outputs),
            cache_salt=self.cache_salt,
            traceparent="",
            is_background=True,
        )
        return tuple(i for delta in await self._run(again) for i in delta.token_ids)

    async def is_tie(
        self, choice: int, output: tuple[int, ...], sent: int, tolerance: float
    ) -> bool | None:
        """Whether one logit larger by `tolerance` would have made the plain target write `sent`:
        it is asked again so.

        So every processor, the noise and each filter's edge have their part, and the target
        itself is the judge. None: it cannot be asked.
        """
        nudged = nudge(self.request.sampling, sent, tolerance)
        if nudged is None:
            return None
        return (await self.plain(choice, output, len(output) + 1, nudged)) == (sent,)

    async def score(self, output: tuple[int, ...], num_top: int) -> tuple[TokenLogprobs, ...]:
        """The tokens of an output under the model's own law, in one pass."""
        prompt = self.request.prompt_token_ids
        scored = GenerateRequest(
            self.new_name(),
            prompt + output,
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0),
            speculation=SpeculationRequest("off"),
            num_prompt_logprobs=num_top,
            cache_salt=self.cache_salt,
            adapter=self.request.adapter,
            http_request_id=self.request.http_request_id,
            answer_id=self.request.answer_id,
            is_background=True,
        )
        first, *_ = await self._run(scored)
        return first.prompt_logprobs[len(prompt) - 1 :]

    async def _run(self, request: GenerateRequest) -> list[RoundDelta]:
        """Raises what the target raises, TimeoutError and GiveWay."""
        while True:
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await self._try(request)
            except (GiveWay, OverloadedError):
                if self.pause is None or not self._has_begun:
                    raise
                await self.pause()
            request = replace(request, request_id=self.new_name())

    async def _try(self, request: GenerateRequest) -> list[RoundDelta]:
        stream = self.targets.generate(request)
        rounds = aiter(stream)
        deltas: list[RoundDelta] = []
        is_over = False
        try:
            while (delta := await next_delta(rounds, self.silence_s)) is not None:
                deltas.append(delta)
                self._has_begun = True
                if not self.may_go_on():
                    raise GiveWay
            is_over = True
            # One choice is one request, and its last round says that it is whole.
            if not deltas or deltas[-1].finish_reason is None:
                raise target_lost()
            return deltas
        finally:
            if not is_over:
                stream.cancel()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ABORT_TIMEOUT_S):
                        await self.targets.abort(request.request_id)


def nudge(sampling: SamplingParams, token_id: int, tolerance: float) -> SamplingParams | None:
    """The same with one logit raised by `tolerance`. None: there is no room for that.

    No other is lowered: a third token as near would then win.
    """
    biases = dict(sampling.logit_bias)
    biases[token_id] = biases.get(token_id, 0.0) + tolerance
    if biases[token_id] > MAX_LOGIT_BIAS:
        return None
    try:
        return replace(sampling, logit_bias=tuple(sorted(biases.items())))
    except ValueError:  # too many
        return None
