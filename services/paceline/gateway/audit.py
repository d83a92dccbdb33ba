"""The losslessness audit: a sampled share of requests is run again without a draft.

Greedy and coupled texts must be the same, token by token. Where they part, the target is asked
whether rounding could have swapped the two tokens (`audit_runs.ReRuns.is_tie`); if not, that is a
mismatch: an error in the log and in `paceline_audit_mismatches_total`. Behind a tie the comparison
goes on along the client's text. Rejection modes promise a law and not a text: there each text, its
tokens under the target's own law (`audit_law`), and an undrafted text with a new seed feed a
sequential two-sample test (`betting`), whose alarm comes once, and from a right service with
probability `audit.false_alarm_rate`, ever.

Serving goes on whatever is found. An audit is one request at a time, in the background; it waits
while the gateway is busy. When clients come it is given up and counted as skipped.

No evidence may be chosen by what it says. So requests are sampled, and get their place in the
queue, before their first token; those that their client left are compared as far as they came. Of
laws more is needed: they are weighed in the order in which their requests began; a text that was
ended for what it says (a stop string, a client that left) is gone on with as the law has it; and a
run that clients ended is repeated until it is whole, the same text again, since the longer one
gets, the likelier they end it. (A target that fails takes long texts rather than short ones, too:
as long as that is rare, `audit.law_tolerance` covers it.) Requests whose client chose the seed are
left out: the same noise again is no new evidence.

Knows no HTTP, no Ray and no text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from paceline.gateway.audit_samples import REJECTION_MODES, AuditCounts, Sample, Skip
from paceline.gateway.betting import SequentialTest
from paceline.gateway.plan import Plan
from paceline.gateway.targets import ServedModel
from paceline.generation import GenerateRequest, TokenLogprobs
from paceline.logs import RequestIds
from paceline.sampling.params import SamplingParams, VerificationMode

logger = logging.getLogger(__name__)

# While the gateway is busy it looks again so often.
PAUSE_S = 0.25
# Of one choice: a text that parts from itself more often is not compared any further.
MAX_TIES = 8
_NUM_SEEDS = 2**64
_TOKENS, _PAIRS = 0, 1


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
        # In the order in which their requests began. Invariant: <= config.max_pending.
        self._pending: list[Sample] = []
        self._worker: asyncio.Task[None] | None = None
        self._num_runs = 0
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        return self._worker is None

    def begin(self, plan: Plan) -> Sample | None:
        """Toss the coin. None: this request is not audited."""
        ratio = self.config.sample_ratio
        if not ratio or self._is_closed or plan.is_prompt_only:
            return None
        if self._random_seed() >= ratio * _NUM_SEEDS:
            return None
        request, model = plan.request, self._models[plan.model]
        mode = _mode(request, VerificationMode(model.speculation.mode))
        why_not = self._why_not(plan, mode)
        if why_not is not None:
            self.counts[plan.model].skipped[why_not] += 1
            return None
        max_tokens = min(self.config.max_tokens, request.max_tokens)
        sample = Sample(plan.model, request, mode, max_tokens, [[] for _ in range(request.n)])
        self._pending.append(sample)
        return sample

    def _why_not(self, plan: Plan, mode: VerificationMode) -> Skip | None:
        asked, model = plan.request.speculation, self._models[plan.model]
        if "off" in (asked.method, model.speculation.method) or asked.max_tokens == 0:
            return Skip.PLAIN
        if mode in REJECTION_MODES and plan.is_seeded:
            return Skip.SEEDED
        if plan.num_prompt_tokens > self.config.max_prompt_tokens:
            return Skip.LONG_PROMPT
        if len(self._pending) >= self.config.max_pending:
            return Skip.FULL
        return None

    def end(self, sample: Sample | None) -> None:
        """The request is over, however."""
        if sample is None:
            return
        sample.is_over = True
        if not any(sample.texts) and sample in self._pending:
            self._pending.remove(sample)
        self._start()

    async def close(self) -> None:
        """Give up whatever waits or runs, and begin nothing more."""
        self._is_closed = True
        self._pending.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})

    def _start(self) -> None:
        if self._worker is None and not self._is_closed and self._next() is not None:
            self._worker = asyncio.ensure_future(self._work())
            self._worker.add_done_callback(self._end_work)

    def _end_work(self, worker: asyncio.Task[None]) -> None:
        self._worker = None
        if not worker.cancelled():
            self._start()  # for who came after its last look

    def _may_go_on(self) -> bool:
        return self._load() <= self.config.max_load

    async def _may_begin(self) -> None:
        while not self._may_go_on():
            await self._sleep(PAUSE_S)

    async def _pause(self) -> None:
        await self._sleep(PAUSE_S)
        await self._may_begin()

    def _next(self) -> Sample | None:
        """The first that is over; no law before one whose request began earlier, or short texts
        would be weighed first."""
        is_held = False
        for sample in self._pending:
            if sample.is_over and not (is_held and sample.is_of_law):
                return sample
            is_held = is_held or sample.is_of_law
        return None

    async def _work(self) -> None:
        while (sample := self._next()) is not None:
            await self._may_begin()
            self._pending.remove(sample)
            await self._audit(sample)

    async def _audit(self, sample: Sample) -> None:
        counts = self.counts[sample.model]
        try:
            audit = self._weigh_all if sample.is_of_law else self._compare_all
            is_decided = await audit(sample, self._runs(sample))
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
            if is_decided:
                counts.num_requests += 1
            else:
                counts.skipped[Skip.UNDECIDED] += 1

    def _runs(self, sample: Sample) -> ReRuns:
        return ReRuns(
            sample.request,
            sample.mode,
            self._models[sample.model].targets,
            self._random_seed(),
            self._silence_s,
            self._timeout_s,
            self._may_go_on,
            lambda: self._new_name(sample.request),
            self._pause if sample.is_of_law else None,
        )

    def _new_name(self, request: GenerateRequest) -> str:
        self._num_runs += 1
        return f"{request.request_id}~audit{self._num_runs}"

    # -- the same text ----------------------------------------------------------------------

    async def _compare_all(self, sample: Sample, runs: ReRuns) -> bool:
        """Whether all of it could be decided."""
        decided = [
            await self._compare(sample, runs, choice, tuple(text))
            for choice, text in enumerate(sample.texts)
            if text
        ]
        return all(decided)

    async def _compare(
        self, sample: Sample, runs: ReRuns, choice: int, sent: tuple[int, ...]
    ) -> bool:
        """Whether it could be decided."""
        counts, start = self.counts[sample.model], 0
        for _ in range(MAX_TIES + 1):
            plain = sent[:start] + await runs.plain(choice, sent[:start], len(sent))
            at = first_difference(sent, plain)
            counts.num_tokens += (len(sent) if at is None else at + 1) - start
            if at is None:
                return True
            is_tie: bool | None = False
            if at < min(len(sent), len(plain)):
                is_tie = await runs.is_tie(choice, sent[:at], sent[at], self.config.tie_tolerance)
            if is_tie is None:
                return False
            if not is_tie:
                counts.num_mismatches += 1
                _log_mismatch(sample, choice, at, sent, plain)
                return True
            counts.num_ties += 1
            start = at + 1
            if start == len(sent):
                break
        return True

    # -- the same law -----------------------------------------------------------------------

    async def _weigh_all(self, sample: Sample, runs: ReRuns) -> bool:
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
        return True

    async def _weigh(
        self,
        sample: Sample,
        runs: ReRuns,
        choice: int,
        sent: tuple[int, ...],
        evidence: _Evidence,
    ) -> None:
        # A text that fills the context leaves no place for the token that scoring it makes.
        room = self._models[sample.model].max_model_len - len(sample.request.prompt_token_ids) - 1
        length = min(sample.max_tokens, room)
        sent = sent[:length]
        if not sent:
            return
        # First, as nothing that is known of the texts has a part in whether it may begin.
        plain = await runs.plain(choice, (), length, self._fresh(sample))
        whole = sent
        if choice not in sample.ended and len(sent) < length:
            whole += await runs.plain(choice, sent, length, self._fresh(sample))
        scored = await runs.score(whole, NUM_TOP)
        drafted = scored[: len(sent)]
        evidence.tokens += await asyncio.to_thread(self._token_values, sample, drafted, sent)
        again = await runs.score(plain, 0)
        evidence.pairs.append(pair_values(_logprobs(scored), _logprobs(again), whole, plain))

    def _fresh(self, sample: Sample) -> SamplingParams:
        return replace(sample.request.sampling, seed=self._random_seed())

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
    ids = RequestIds(request.http_request_id, request.trace_id, request.answer_id)
    return logs.extra(ids)
