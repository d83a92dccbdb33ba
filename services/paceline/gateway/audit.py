"""The losslessness audit: a sampled share of requests is run again without a draft.

Greedy and coupled texts must be the same, token by token. Where they part, the target is asked
whether rounding could have swapped the two tokens (`audit_runs.ReRuns.is_tie`); if not, that is a
mismatch: an error in the log and in `paceline_audit_mismatches_total`. Behind a tie the comparison
goes on along the client's text. Rejection modes promise a law and not a text: there each text, its
tokens under the target's own law (`audit_law`), and an undrafted text with a new seed feed a
sequential two-sample test (`betting`), whose alarm comes once, and from a right service with
probability `audit.false_alarm_rate`, ever.

Serving goes on whatever is found. An audit is one request at a time, in the background; it waits
while the gateway is busy, and is given up, and counted as skipped, when clients come. Which
requests are sampled is decided before their first token, and those that their client left are
compared as far as they came: else what is looked at would depend on what was written. In rejection
modes, requests whose client chose the seed are left out: the same noise again is no new evidence.

Knows no HTTP, no Ray and no text.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline import logs
from paceline.config import AuditConfig
from paceline.errors import OverloadedError, RequestError
from paceline.gateway.audit_law import (
    NUM_TOP,
    PAIR_SIDES,
    TOKEN_SIDES,
    PairValues,
    Place,
    TokenValues,
    pair_values,
    token_values,
)
from paceline.gateway.audit_runs import GiveWay, ReRuns
from paceline.gateway.betting import SequentialTest
from paceline.gateway.plan import Plan
from paceline.gateway.targets import ServedModel
from paceline.generation import GenerateRequest, RoundDelta, TokenLogprobs
from paceline.logs import RequestIds
from paceline.sampling.params import SamplingParams, VerificationMode

logger = logging.getLogger(__name__)

# While the gateway is busy it looks again so often.
PAUSE_S = 0.25
# Of one choice: a text that parts from itself more often is not compared any further.
MAX_TIES = 8
_NUM_SEEDS = 2**64
_REJECTION = (VerificationMode.REJECTION, VerificationMode.BLOCK)
_TOKENS, _PAIRS = 0, 1


class Skip(StrEnum):
    """Why a sampled request was not audited."""

    PLAIN = "plain"  # no draft had a part in it
    SEEDED = "seeded"  # a rejection mode with the client's seed
    LONG_PROMPT = "long_prompt"  # audit.max_prompt_tokens
    FULL = "full"  # audit.max_pending
    BUSY = "busy"  # clients needed the service
    ERROR = "error"  # the target failed on the re-run
    UNDECIDED = "undecided"  # the texts part, and whether it is a tie cannot be asked


@dataclass(slots=True)
class AuditCounts:
    """Of one served model, since the start. `num_alarms` is 0 or 1."""

    num_requests: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    num_mismatches: int = 0
    num_alarms: int = 0
    e_value: float = 1.0
    skipped: Counter[Skip] = field(default_factory=Counter)


@dataclass(slots=True)
class Sample:
    """A request that is to be audited, as its tokens come. `ended`: choices that their target
    ended."""

    model: str
    request: GenerateRequest
    mode: VerificationMode
    max_tokens: int
    has_stop_strings: bool
    texts: list[list[int]]
    ended: set[int] = field(default_factory=set)

    def receive(self, delta: RoundDelta) -> None:
        text = self.texts[delta.choice]
        text += delta.token_ids[: self.max_tokens - len(text)]
        if delta.finish_reason:
            self.ended.add(delta.choice)

    def is_whole(self, choice: int) -> bool:
        """Whether nobody but the law, or a length fixed before, has ended this text."""
        is_long = len(self.texts[choice]) >= self.max_tokens
        return is_long or (choice in self.ended and not self.has_stop_strings)


@dataclass(slots=True)
class _Evidence:
    """What one request says in a rejection mode."""

    tokens: list[TokenValues] = field(default_factory=list)
    pairs: list[PairValues] = field(default_factory=list)

    def feed(self, test: SequentialTest) -> float:
        """The e-value with it."""
        for tokens in self.tokens:
            test.receive(_TOKENS, tokens)
        for pair in self.pairs:
            test.receive(_PAIRS, pair)
        test.end_sample()
        return test.e_value


class Auditor:
    """Owns the queue of samples and the one task that works on it.

    `load` is the share of the gateway's places that clients hold.
    """

    def __init__(
        self,
        config: AuditConfig,
        models: Mapping[str, ServedModel],
        *,
        load: Callable[[], float],
        silence_s: float,
        timeout_s: float,
        random_seed: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.config = config
        self.counts = {name: AuditCounts() for name in models}
        self._models = models
        self._load = load
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._random_seed = random_seed
        self._sleep = sleep
        self._tests = {
            name: SequentialTest((TOKEN_SIDES, PAIR_SIDES), config.law_tolerance) for name in models
        }
        # Of all models together one may ever be wrong with this probability.
        self.alarm_at = len(models) / config.false_alarm_rate
        self._pending: deque[Sample] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._num_runs = 0

    @property
    def is_idle(self) -> bool:
        return self._worker is None

    def begin(self, plan: Plan) -> Sample | None:
        """Toss the coin. None: this request is not audited."""
        ratio = self.config.sample_ratio
        if not ratio or plan.is_prompt_only or self._random_seed() >= ratio * _NUM_SEEDS:
            return None
        request, model = plan.request, self._models[plan.model]
        mode = _mode(request, VerificationMode(model.speculation.mode))
        why_not = self._why_not(plan, mode)
        if why_not is not None:
            self.counts[plan.model].skipped[why_not] += 1
            return None
        return Sample(
            plan.model,
            request,
            mode,
            min(self.config.max_tokens, request.max_tokens),
            bool(plan.stop),
            [[] for _ in range(request.n)],
        )

    def _why_not(self, plan: Plan, mode: VerificationMode) -> Skip | None:
        asked, model = plan.request.speculation, self._models[plan.model]
        if "off" in (asked.method, model.speculation.method) or asked.max_tokens == 0:
            return Skip.PLAIN
        if mode in _REJECTION and plan.is_seeded:
            return Skip.SEEDED
        if plan.num_prompt_tokens > self.config.max_prompt_tokens:
            return Skip.LONG_PROMPT
        return None

    def end(self, sample: Sample | None) -> None:
        """The request is over, however."""
        if sample is None or not any(sample.texts):
            return
        if len(self._pending) >= self.config.max_pending:
            self.counts[sample.model].skipped[Skip.FULL] += 1
            return
        self._pending.append(sample)
        if self._worker is None:
            self._worker = asyncio.ensure_future(self._work())
            self._worker.add_done_callback(self._end_work)

    async def close(self) -> None:
        """Give up whatever waits or runs."""
        self._pending.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})

    def _end_work(self, worker: asyncio.Task[None]) -> None:
        self._worker = None

    def _may_go_on(self) -> bool:
        return self._load() <= self.config.max_load

    async def _work(self) -> None:
        while self._pending:
            while not self._may_go_on():
                await self._sleep(PAUSE_S)
            await self._audit(self._pending.popleft())

    async def _audit(self, sample: Sample) -> None:
        counts = self.counts[sample.model]
        try:
            async with asyncio.timeout(self._timeout_s):
                if sample.mode in _REJECTION:
                    await self._weigh_all(sample, self._runs(sample))
                else:
                    await self._compare_all(sample, self._runs(sample))
        except (GiveWay, OverloadedError):
            counts.skipped[Skip.BUSY] += 1
        except (RequestError, TimeoutError) as error:
            # Its message may quote the client's text.
            code = error.code if isinstance(error, RequestError) else None
            logger.warning("audit failed: %s", code or type(error).__name__, extra=_about(sample))
            counts.skipped[Skip.ERROR] += 1
        except Exception as error:
            # A bug here must not end the audit of what comes.
            shown = logs.without_message(error)
            logger.exception("audit failed", exc_info=shown, extra=_about(sample))
            counts.skipped[Skip.ERROR] += 1
        else:
            counts.num_requests += 1

    def _runs(self, sample: Sample) -> ReRuns:
        return ReRuns(
            sample.request,
            sample.mode,
            self._models[sample.model].targets,
            self._random_seed(),
            self._silence_s,
            self._may_go_on,
            lambda: self._new_name(sample.request),
        )

    def _new_name(self, request: GenerateRequest) -> str:
        self._num_runs += 1
        return f"{request.request_id}~audit{self._num_runs}"

    # -- the same text ----------------------------------------------------------------------

    async def _compare_all(self, sample: Sample, runs: ReRuns) -> None:
        for choice, text in enumerate(sample.texts):
            if text:
                await self._compare(sample, runs, choice, tuple(text))

    async def _compare(
        self, sample: Sample, runs: ReRuns, choice: int, sent: tuple[int, ...]
    ) -> None:
        counts, start = self.counts[sample.model], 0
        for _ in range(MAX_TIES + 1):
            plain = sent[:start] + await runs.plain(choice, sent[:start], len(sent))
            at = first_difference(sent, plain)
            counts.num_tokens += (len(sent) if at is None else at + 1) - start
            if at is None:
                return
            is_tie: bool | None = False
            if at < min(len(sent), len(plain)):
                is_tie = await runs.is_tie(choice, sent[:at], sent[at], self.config.tie_tolerance)
            if is_tie is None:
                counts.skipped[Skip.UNDECIDED] += 1
                return
            if not is_tie:
                counts.num_mismatches += 1
                _log_mismatch(sample, choice, at, sent, plain)
                return
            counts.num_ties += 1
            start = at + 1
            if start == len(sent):
                return

    # -- the same law -----------------------------------------------------------------------

    async def _weigh_all(self, sample: Sample, runs: ReRuns) -> None:
        evidence = _Evidence()
        for choice, text in enumerate(sample.texts):
            await self._weigh(sample, runs, choice, tuple(text), evidence)
        # All of it or nothing: what was given up amid it says nothing. Thousands of logarithms are
        # not for the event loop.
        test, counts = self._tests[sample.model], self.counts[sample.model]
        counts.e_value = await asyncio.to_thread(evidence.feed, test)
        counts.num_tokens += len(evidence.tokens)
        if counts.e_value >= self.alarm_at and not counts.num_alarms:
            counts.num_alarms = 1
            logger.error(
                "audit: texts of model %s do not follow the target's law: after %d requests the"
                " e-value is %.3g, the alarm is at %.3g (this is the last of them)",
                sample.model, test.num_samples, counts.e_value, self.alarm_at,
                extra=_about(sample),
            )  # fmt: skip

    async def _weigh(
        self,
        sample: Sample,
        runs: ReRuns,
        choice: int,
        sent: tuple[int, ...],
        evidence: _Evidence,
    ) -> None:
        request = sample.request
        # A text that fills the context leaves no place for the token that scoring it makes.
        model = self._models[sample.model]
        room = model.max_model_len - len(request.prompt_token_ids) - 1
        sent = sent[:room]
        if not sent:
            return
        scored = await runs.score(sent, NUM_TOP)
        evidence.tokens += await asyncio.to_thread(self._token_values, sample, scored, sent)
        fresh = replace(request.sampling, seed=self._random_seed())
        plain = (await runs.plain(choice, (), sample.max_tokens, fresh))[:room]
        again = await runs.score(plain, 0)
        evidence.pairs.append(
            pair_values(_logprobs(scored), _logprobs(again), sent, plain, sample.is_whole(choice))
        )

    def _token_values(
        self, sample: Sample, scored: Sequence[TokenLogprobs], sent: tuple[int, ...]
    ) -> list[TokenValues]:
        request, model = sample.request, self._models[sample.model]
        tokenizer, stop_ids = model.tokenizer, frozenset(request.stop_token_ids)
        sampling: SamplingParams = request.sampling

        def place(index: int) -> Place:
            return Place(
                sampling,
                request.prompt_token_ids,
                sent[:index],
                tokenizer.vocab_size,
                lambda i: i in stop_ids or tokenizer.is_special(i),
            )

        tolerance = self.config.tie_tolerance
        return [token_values(token, place(i), tolerance) for i, token in enumerate(scored)]


def first_difference(sent: Sequence[int], plain: Sequence[int]) -> int | None:
    """Where two texts part, or where one goes on behind the other's end."""
    pairs = enumerate(zip(sent, plain, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), None)
    if at is None and len(sent) != len(plain):
        return min(len(sent), len(plain))
    return at


def _mode(request: GenerateRequest, deployed: VerificationMode) -> VerificationMode:
    if request.sampling.is_greedy:
        return VerificationMode.GREEDY
    return request.speculation.mode or deployed


def _logprobs(scored: Sequence[TokenLogprobs]) -> list[float]:
    return [token.logprob for token in scored]


def _log_mismatch(
    sample: Sample, choice: int, at: int, sent: Sequence[int], plain: Sequence[int]
) -> None:
    logger.error(
        "audit: choice %d (%s) parts from the plain target at output token %d:"
        " sent %s, plain %s",
        choice, sample.mode.value, at, _token(sent, at), _token(plain, at),
        extra=_about(sample),
    )  # fmt: skip


def _token(text: Sequence[int], at: int) -> str:
    return str(text[at]) if at < len(text) else "the end"


def _about(sample: Sample) -> dict[str, Any]:
    request = sample.request
    ids = RequestIds(request.http_request_id, request.trace_id, request.request_id)
    return logs.extra(ids)
